"""Files of tests with calls of Linux hidden: `tests/support/masked`."""

from __future__ import annotations

import os

from kinds.suites import ROOT, Suite

_MASK = ROOT / "tests" / "support" / "masked"

# Tests of promises that need the hidden calls, as docs/support.md says, and tests that make such a call themselves.
NOT_KEPT = {
    "a mount of the same file system is not recognised": (
        "engine/stores/test_links.py::test_a_root_that_is_mounted_there_is_left_alone",
        "engine/stores/test_links_tools.py::test_a_step_with_something_mounted_in_it_is_left_and_the_others_are_pruned",
        "engine/stores/test_links_tools.py::test_a_run_goes_on_removing_steps_beside_one_with_something_mounted_in_it",
    ),
    "conversions and databases are written by path": (
        "engine/stores/test_neighbours.py::test_a_conversion_whose_scratch_is_swapped_for_a_link_changes_nothing_outside",
        "engine/stores/test_neighbours.py::test_a_database_is_not_written_into_another_that_takes_its_place",
    ),
    "the page cache is used": (
        "engine/formats/test_safetensors.py::test_a_save_up_to_an_eighth_of_the_available_memory_is_warm_for_its_reader",
        "engine/formats/test_safetensors.py::test_a_small_save_never_looks_at_the_memory_of_the_machine",
        "engine/stores/test_local.py::test_a_file_system_that_cannot_do_without_the_page_cache_uses_it",
        "engine/stores/test_local.py::test_a_full_disk_is_an_error_all_the_same",
        "engine/stores/test_local.py::test_a_write_that_ends_early_goes_on",
        "engine/stores/test_local_files.py::test_the_page_cache_stays_as_it_is",
    ),
    "the memory of the process is known by its peak alone": (
        "engine/tools/test_convert.py::test_a_conversion_stays_within_its_memory",
    ),
    "a directory without the permission to read it cannot be used": (
        "engine/saving/test_held_promises.py::test_an_ordinary_user_may_save_wherever_files_may_be_created"
        "[file where nothing can be listed]",
    ),
}


class Masked(Suite):
    """Each file is one case, and runs as in `make test`, in processes that lack the calls."""

    def __init__(self, mask: str, title: str) -> None:
        super().__init__(
            f"masked-{mask}",
            title,
            "engine/formats/test_safetensors.py",
            "engine/formats/test_zarr.py",
            "engine/loading/test_mapped.py",
            "engine/runs/test_near.py",
            "engine/runs/test_run.py",
            "engine/saving/test_commit.py",
            "engine/saving/test_held_promises.py",
            "engine/saving/test_reuse.py",
            "engine/stores/test_directory.py",
            "engine/stores/test_links*.py",
            "engine/stores/test_local*.py",
            "engine/stores/test_neighbours.py",
            "engine/stores/test_new_place.py",
            "engine/stores/test_swaps.py",
            "engine/tools/test_convert.py",
            "engine/tools/test_prune.py",
            "faults/test_errors.py",
            "faults/test_kills.py",
            "faults/test_run_kills.py",
        )
        path = os.pathsep.join(filter(None, (str(_MASK), os.environ.get("PYTHONPATH"))))
        # The folder for temporary files of a worker is its own; one of the tests saves as another user.
        self.environment = {"EFORMER_MASK": mask, "PYTHONPATH": path, "TMPDIR": "/tmp"}
        self.arguments = ["-p", "require_mask"]
        self.arguments += [f"--deselect=tests/{test}" for tests in NOT_KEPT.values() for test in tests]


MASKED = (
    Masked("linux", "tests without newer calls of Linux, O_PATH, O_DIRECT and /proc"),
    Masked("macos", "tests without the calls that macOS lacks"),
)
