# Two commands for a newcomer: `make demo` and `make test`. Both need only Python >= 3.11, pip and make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# torch, transformers, peft and Keras are heavy, so they have an environment of their own.
FRAMEWORKS := .venv-frameworks

# Servers of object stores: they are not needed for anything else, and some have many dependencies.
SERVERS := .venv-cloud

# Orbax of the version that scenarios compare with, and libraries that use it.
ORBAX := .venv-orbax

# Tests wait for disks and other processes as long as they compute.
WORKERS ?= $(shell $(PYTHON) -c "import os; n = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(); print(min(16, n + (n + 1) // 2))")

# Tests of pages in a browser, of the notebook and of the built packages.
SITE := tests/browser tests/package tests/test_notebooks.py

.PHONY: demo test suite test-site docs cloud faults fuzz frameworks orbax-door orbax-suite package check format bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	@$(BIN)/eformer demo

# Leaves of every name become files of that name, which a locale without UTF-8 does not have. Tests start hundreds of
# interpreters, which would compile eformer again each without bytecode.
test suite test-site: export PYTHONUTF8 = 1
# Programs of XLA run once, on a few numbers, so optimising them takes longer than running them; `make faults` does it.
# Level 0 would take even less time, but gives other random bits than the samples of tests/compat have.
test suite: export XLA_FLAGS = --xla_backend_optimization_level=1
test: $(VENV)/.dev
	+$(MAKE) --no-print-directory -j2 suite check

suite: $(VENV)/.dev
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(addprefix --ignore=,$(SITE))

test-site: $(VENV)/.dev
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(SITE)

# The site, in docs/_build/html: https://www.sphinx-doc.org. Needs no network once its environment is there. Warnings are
# errors: a link or an anchor that leads nowhere, a page that is not in the navigation, a docstring that cannot be read.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -E -W --keep-going -n -q -j auto -d docs/_build/doctrees -c docs . docs/_build/html
	@echo "The pages are in docs/_build/html/index.html"

# Every fault that is known, for so many minutes, with a table at the end; `make test` has a fast part of it. With PEERS=1
# also against other libraries. `--resume` and others: python faults/run.py --help. EFORMER_FAULTS_STRIDE=1 and such are
# for those of the cases that are files of tests. The kinds masked-linux and masked-macos run the contracts without calls
# that only Linux has.
MINUTES ?= 20
PEERS ?=
faults: $(VENV)/.dev
	$(BIN)/python faults/run.py --minutes $(MINUTES)
	$(BIN)/python tests/fuzz/run.py --minutes 1
	$(if $(PEERS),$(BIN)/python faults/run.py --minutes $(MINUTES) --peers)

# Every reader, with changed checkpoints: `make fuzz MINUTES=60`. Findings are kept in tests/fuzz/findings.
fuzz: $(VENV)/.dev
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES)

# Everything that a checkpoint in a bucket promises, on servers on loopback: moto, ministack, SeaweedFS, Ceph, azurite, a
# double of Google's, and one that ignores conditions. Installs what it can, and says which servers it could not start.
cloud: export EFORMER_CLOUD = 1
cloud: export EFORMER_CLOUD_BIN = $(CURDIR)/$(SERVERS)/bin:$(CURDIR)/$(SERVERS)/npm/node_modules/.bin
cloud: $(VENV)/.dev
	sh tests/cloud/install.sh $(SERVERS) $(PYTHON)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests/cloud

# The tests that need torch, transformers, peft or Keras, which `make test` leaves out.
frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks

# Programs over `ocp`, run with Orbax and with eformer.compat.orbax, and compared; ARGS="--only 'managers.*' --verbose".
orbax-door: $(ORBAX)/.installed
	PYTHONPATH=tests $(ORBAX)/bin/python -m orbax_door.run $(ARGS)

# Orbax's own tests, with its classes and with ours in their place: the abstract tests in its newest wheel, and the tests
# of public names in a source package that has tests. Downloads them into an ignored directory.
orbax-suite: $(ORBAX)/.installed
	PYTHONPATH=tests $(ORBAX)/bin/python -m orbax_door.graft.run --set shipped --python $(CURDIR)/$(ORBAX)/bin/python $(ARGS)
	PYTHONPATH=tests $(ORBAX)/bin/python -m orbax_door.graft.run --set public $(ARGS)

# The wheel and the sdist, in new environments of every Python from 3.11 to 3.14 that is found, also in EFORMER_PYTHONS.
package: $(VENV)/.dev
	$(BIN)/python tests/package/check.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python bench/run.py
	$(BIN)/python bench/processes.py
	$(BIN)/python bench/msgpack_door.py
	$(BIN)/python bench/runs.py
	$(BIN)/python bench/rename.py

clean:
	rm -rf docs/_build $(VENV) $(FRAMEWORKS) $(SERVERS) $(ORBAX) tests/orbax_door/graft/.work .venv-peers .venv-original bench/.scratch faults/.scratch .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "eformer needs Python >= 3.11, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

# torch comes first and alone: others only ask for any torch, which may be a build of several gigabytes.
$(FRAMEWORKS)/.installed: PIP = $(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check --quiet
$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt tests/frameworks/requirements.txt tests/frameworks/no-deps.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(PIP) install $$(grep '^torch==' tests/frameworks/requirements.txt)
	$(PIP) install -c constraints.txt -r tests/frameworks/requirements.txt
	$(PIP) install --no-deps --ignore-requires-python -r tests/frameworks/no-deps.txt
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(ORBAX)/.installed: PIP = $(ORBAX)/bin/python -m pip --disable-pip-version-check --quiet
$(ORBAX)/.installed: pyproject.toml constraints.txt tests/orbax_door/requirements.txt
	$(PYTHON) -m venv $(ORBAX)
	$(PIP) install -c constraints.txt -r tests/orbax_door/requirements.txt -e .
	@touch $@
