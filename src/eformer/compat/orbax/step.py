"""The names of steps, and the steps in a directory.

Tests: tests/compat_orbax/test_policies.py.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from eformer._engine.formats.others.orbax import UNFINISHED, find_item, holds_tree
from eformer._engine.formats.others.orbax_metadata import COMMITTED, JSON_FILE
from eformer._engine.record.indexes import INDEX, MANIFEST, ORBAX_CHECKPOINT, ORBAX_TREE
from eformer.compat.orbax._alike import on_disk, to_path
from eformer.compat.orbax.metadata import read_step

TMP_DIR_SUFFIX = UNFINISHED
ALLOWED_STEP_NAME_PATTERN = r"(.+)_(\d+)"
TMP_DIR_STEP_PATTERN = r".*?_*?(\d+)\.orbax-checkpoint-tmp"
_MARKS = (ORBAX_CHECKPOINT, COMMITTED, ORBAX_TREE, MANIFEST, INDEX)

MetadataT = TypeVar("MetadataT", covariant=True)


@dataclass(frozen=True)
class Metadata:
    """A step: its number and its path."""

    step: int
    path: Any

    @property
    def init_timestamp_nsecs(self) -> int | None:
        """When its save began."""
        return read_step(self.path).init_timestamp_nsecs

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        """When its save was committed."""
        return read_step(self.path).commit_timestamp_nsecs

    @property
    def commit_timestamp(self) -> dt.datetime:
        """When its save was committed, or its directory was last changed."""
        nanoseconds = self.commit_timestamp_nsecs
        seconds = on_disk(self.path).stat().st_mtime if nanoseconds is None else nanoseconds / 1e9
        return dt.datetime.fromtimestamp(seconds, dt.UTC)


class NameFormat(Protocol, Generic[MetadataT]):
    """How the directories of steps are called. Subclass it for names of your own."""

    def build_name(self, step: int) -> str:
        """Return the name of a step."""
        ...

    def find_all(self, base_path: Any) -> Iterator[MetadataT]:
        """Find all complete steps."""
        ...

    def find_step(self, base_path: Any, step: int) -> MetadataT:
        """Find a complete step. Raise ValueError if it does not exist."""
        ...


def is_path_finalized(path: Any, **_: Any) -> bool:
    """Tell whether a path is complete: it is not the unfinished directory of a save."""
    return UNFINISHED not in on_disk(path).name


def is_path_temporary(path: Any, **_: Any) -> bool:
    """Tell whether a path is the unfinished directory of a save."""
    return on_disk(path).is_dir() and not is_path_finalized(path)


is_checkpoint_finalized, is_tmp_checkpoint = is_path_finalized, is_path_temporary


def is_step(path: Any) -> bool:
    """Tell whether a directory is a step: it has a mark of a checkpoint, or items that have one."""
    place = on_disk(path)
    if not place.is_dir() or not is_path_finalized(place):
        return False
    if any((place / mark).is_file() for mark in _MARKS) or holds_tree(place):
        return True
    return any(_is_item(each) for each in place.iterdir())


def _is_item(path: Any) -> bool:
    """Tell whether a directory is an item by Orbax, which left no mark in steps before 0.5.20. Items by eformer do not
    count: their step has its marks, or is not complete."""
    if not path.is_dir() or (path / MANIFEST).is_file():
        return False
    names = {each.name for each in path.iterdir()} - {COMMITTED}
    return names in ({JSON_FILE}, {"metrics"}) or find_item(path, {}) is not None


@dataclass(frozen=True)
class _StandardNameFormat(NameFormat[Metadata]):
    """Names such as 23, 0023, step_23."""

    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    single_host_load_and_broadcast: bool = False

    def __str__(self) -> str:
        return f'StandardNameFormat("{self.build_name(1234)}")'

    @property
    def _start(self) -> str:
        return step_prefix_with_underscore(self.step_prefix)

    def build_name(self, step: int) -> str:
        """Return the name of a step."""
        width = self.step_format_fixed_length
        return f"{self._start}{step}" if width is None else f"{self._start}{step:0{width}d}"

    def _number(self, name: str) -> int | None:
        width = self.step_format_fixed_length
        digits = rf"0\d{{{width - 1}}}|[1-9]\d{{{width - 1}}}\d*" if width else r"0|[1-9]\d*"
        match = re.fullmatch(f"{re.escape(self._start)}({digits})", name, re.ASCII)
        return int(match[1]) if match else None

    def find_all(self, base_path: Any) -> Iterator[Metadata]:
        """Find all complete steps, in the order of their numbers."""
        place = on_disk(base_path)
        names = [each.name for each in place.iterdir()] if place.is_dir() else []
        found = sorted((number, name) for name in names if (number := self._number(name)) is not None)
        return iter(
            [Metadata(number, to_path(base_path) / name) for number, name in found if is_step(place / name)]
        )

    def find_step(self, base_path: Any, step: int) -> Metadata:
        """Find a complete step. Raise ValueError if it does not exist."""
        path = to_path(base_path) / self.build_name(step)
        if not is_step(path):
            raise ValueError(
                f"No step path found with name={self.build_name(step)}, NameFormat={self} for step={step} under "
                f"{base_path}."
            )
        return Metadata(step, path)


def standard_name_format(
    *,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
    **_: Any,
) -> NameFormat[Metadata]:
    """Return the format of names such as 23, 0023, step_23."""
    return _StandardNameFormat(step_prefix, step_format_fixed_length, single_host_load_and_broadcast)


@dataclass(frozen=True)
class _CompositeNameFormat(NameFormat[Metadata]):
    """One format to write, several to read."""

    write_name_format: Any
    read_name_formats: Sequence[Any]

    def __post_init__(self) -> None:
        if self.write_name_format not in self.read_name_formats:
            shown = ",".join(map(str, self.read_name_formats))
            raise ValueError(
                f"write_name_format: {self.write_name_format} must be present in read_name_formats: [{shown}]."
            )

    def __str__(self) -> str:
        return f"Composite([{','.join(map(str, self.read_name_formats))}])"

    def build_name(self, step: int) -> str:
        """Return the name of a step."""
        return str(self.write_name_format.build_name(step))

    def find_all(self, base_path: Any) -> Iterator[Metadata]:
        """Find all complete steps of all formats."""
        seen = set()
        for each in self.read_name_formats:
            for found in each.find_all(base_path):
                if found.path not in seen:
                    seen.add(found.path)
                    yield found

    def find_step(self, base_path: Any, step: int) -> Metadata:
        """Find a complete step by the first format that has it."""
        problems = []
        for each in self.read_name_formats:
            try:
                return each.find_step(base_path, step)  # type: ignore[no-any-return]
            except Exception as error:  # noqa: BLE001  formats of the caller raise anything
                problems.append(str(error))
        raise ValueError("\n".join(problems))


def composite_name_format(write_name_format: Any, read_name_formats: Sequence[Any]) -> NameFormat[Metadata]:
    """Return a format that writes one kind of names and reads several."""
    return _CompositeNameFormat(write_name_format, read_name_formats)


def is_standard_name_format(name_format: Any) -> bool:
    """Tell whether a format is a standard one."""
    return isinstance(name_format, _StandardNameFormat)


def single_host_load_and_broadcast_name_format(name_format: Any) -> Any:
    """Return a standard format unchanged but for a flag, which has no effect."""
    if not is_standard_name_format(name_format):
        raise ValueError(
            f"single_host_load_and_broadcast is only supported for standard name formats. Got {name_format}."
        )
    return replace(name_format, single_host_load_and_broadcast=True)


def step_prefix_with_underscore(step_prefix: str | None) -> str:
    """Return the text before the number of a step."""
    return "" if step_prefix is None else f"{step_prefix}_"


def build_step_path(base_path: Any, name_format: Any, step: int) -> Any:
    """Return the path of a step."""
    return to_path(base_path) / name_format.build_name(step)


def build_step_metadatas(step_paths: Iterable[Any], build_metadata: Callable[[Any], Any]) -> Iterator[Any]:
    """Describe the paths that are steps."""
    return (found for path in step_paths if (found := build_metadata(path)) is not None)


def latest_step_metadata(root_path: Any, name_format: Any) -> Any:
    """Return the step of the highest number; None without steps."""
    return max(name_format.find_all(root_path), key=lambda found: found.step, default=None)


def step_metadata_of_checkpoint_path(checkpoint_path: Any, name_format: Any) -> Any:
    """Return the step at a path. Raise ValueError if it is none."""
    path = to_path(checkpoint_path)
    there = list(name_format.find_all(path.parent))
    for found in there:
        if found.path.name == path.name:
            return found
    raise ValueError(
        f"Failed to resolve step metadata of checkpoint path with NameFormat={name_format}, checkpoint path={path}: "
        f"the steps there are {[found.path.name for found in there]}"
    )


def find_step_path(base_path: Any, name_format: Any, *, step: int, include_uncommitted: bool = False) -> Any:
    """Return the path of a complete step. Unfinished saves of eformer are not visible."""
    return name_format.find_step(base_path, step).path


def maybe_find_step_metadata(base_path: Any, name_format: Any, *, step: int) -> Any:
    """Return a step; None if it does not exist."""
    try:
        return name_format.find_step(base_path, step)
    except ValueError:
        return None


def get_save_directory(
    step: int,
    directory: Any,
    name: str | None = None,
    step_prefix: str | None = None,
    override_directory: Any = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
) -> Any:
    """Return the path of a step, or of an item in it."""
    if directory is None:
        raise ValueError("Directory cannot be None.")
    names = step_name_format or standard_name_format(
        step_prefix=step_prefix, step_format_fixed_length=step_format_fixed_length
    )
    found = (
        build_step_path(directory, names, step) if override_directory is None else to_path(override_directory)
    )
    return found if name is None else found / name


def step_from_checkpoint_name(name: str) -> int:
    """Return the number in the name of a step."""
    if name.isdigit():
        return int(name)
    if match := re.fullmatch(ALLOWED_STEP_NAME_PATTERN, name):
        return int(match[2])
    if match := re.match(TMP_DIR_STEP_PATTERN, name):
        return int(match[1])
    raise ValueError(f"Unrecognized name format: {name}.")


def checkpoint_steps_paths(checkpoint_dir: Any) -> list[Any]:
    """List the paths of complete steps, whatever comes before their numbers."""
    place = on_disk(checkpoint_dir)
    if not place.is_dir():
        return []
    names = sorted(each.name for each in place.iterdir())
    return [to_path(checkpoint_dir) / name for name in names if _has_number(name) and is_step(place / name)]


def _has_number(name: str) -> bool:
    return name.isdigit() or name.split("_")[-1].isdigit()


def checkpoint_steps(checkpoint_dir: Any) -> list[int]:
    """List the numbers of complete steps."""
    return [step_from_checkpoint_name(path.name) for path in checkpoint_steps_paths(checkpoint_dir)]


def any_checkpoint_step(checkpoint_dir: Any) -> int | None:
    """Return the number of any complete step; None without steps."""
    return next(iter(checkpoint_steps(checkpoint_dir)), None)


def tmp_checkpoints(checkpoint_dir: Any, **_: Any) -> list[str]:
    """List the names of unfinished directories, which Orbax leaves when it is killed."""
    place = on_disk(checkpoint_dir)
    return sorted(each.name for each in place.iterdir() if is_path_temporary(each)) if place.is_dir() else []
