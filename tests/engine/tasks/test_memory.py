"""How much memory there is."""

from pathlib import Path

import pytest

from eformer._engine.tasks import memory


def test_available_memory_is_at_most_that_of_the_machine():
    (total,) = (
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    assert 0 < memory.available_memory() < int(total.split()[1]) * 1024


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/job/inner", {"job/memory.max": 1000, "job/memory.current": 400, "job/inner/memory.max": "max"}),
        (
            "5:cpu,memory:/job",
            {"memory/job/memory.limit_in_bytes": 1000, "memory/job/memory.usage_in_bytes": 400},
        ),
        (
            "0::/job",
            {
                "job/memory.max": 1000,
                "job/memory.current": 900,
                "job/memory.stat": "anon 400\ninactive_file 500\nactive_file 0",
            },
        ),
        (
            "5:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": 1000,
                "memory/job/memory.usage_in_bytes": 900,
                "memory/job/memory.stat": "cache 500\ninactive_file 1\ntotal_inactive_file 500",
            },
        ),
    ],
)
def test_a_control_group_limits_the_available_memory_but_for_files_in_the_page_cache(tmp_path, group, files):
    (tmp_path / "cgroup").write_text(f"3:devices:/x\n{group}\n")
    for name, value in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert list(memory._of_groups(tmp_path, tmp_path / "cgroup")) == [600]
