"""The readers that are fuzzed: their corpus, and the doors to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fuzz import doors
from fuzz.cases import Case
from fuzz.parsers import parsed_files

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
REGRESSIONS = HERE / "regressions"


@dataclass(frozen=True)
class Reader:
    """`share` is how many inputs it gets, compared to others. `writes`: the doors change the directory.
    `in_bucket`: the files are objects of a bucket. `in_memory`: every file of the others is given to its parser alone.
    `is_slow`: it starts a process for each call."""

    name: str
    doors: tuple[str, ...] = doors.READING
    share: int = 4
    writes: bool = False
    in_bucket: bool = False
    in_memory: bool = False
    is_slow: bool = False

    def seeds(self) -> list[Case]:
        if self.in_memory:
            readers = (reader for reader in READERS.values() if not reader.in_memory)
            return parsed_files([case for reader in readers for case in reader.seeds()])
        return [Case.unpacked(path.read_bytes()) for path in sorted((CORPUS / self.name).glob("*.zip"))]


READERS = {
    reader.name: reader
    for reader in (
        Reader("parsers", ("parse",), share=60, in_memory=True),
        Reader("safetensors", share=8),
        Reader("single_file", share=6),
        Reader("arrays", (*doors.READING, "leaves"), share=6),
        Reader("processes", share=6),
        Reader("database", share=2),
        Reader("database_files", share=2),
        Reader("hugging_face", share=6),
        Reader("msgpack", (*doors.READING, *doors.MSGPACK), share=8),
        Reader("msgpack_gzip", doors.COMPRESSED, share=2),
        Reader("npz", share=6),
        Reader("equinox", share=4),
        Reader("torch", share=6),
        Reader("gguf", share=4),
        Reader("keras", share=1, is_slow=True),
        Reader("flax_directory", share=2),
        Reader("signed", doors.SIGNED, share=3),
        Reader("zarr", (*doors.READING, "leaves"), share=6),
        Reader("zarr3", share=4),
        Reader("original", (*doors.READING, "leaves"), share=4),
        Reader("orbax", share=4),
        Reader("orbax_keys", share=2),
        Reader("orbax_old", share=2),
        Reader("orbax_kinds", share=2),
        Reader("runs", doors.RUNS, share=2, writes=True),
        Reader(
            "bucket",
            (*doors.READING, *doors.WRITING * 3, "remove", "remove"),
            share=2,
            writes=True,
            in_bucket=True,
        ),
        Reader("near", doors.NEAR, share=1, writes=True),
        Reader("bucket_runs", doors.RUNS, share=1, writes=True, in_bucket=True),
        Reader("leftovers", doors.WRITING, share=2, writes=True),
    )
}
