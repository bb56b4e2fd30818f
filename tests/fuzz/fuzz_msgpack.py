"""Coverage-guided fuzzing of the msgpack reader, run by hand (the suite has a bounded version).

    pip install atheris && python tests/fuzz/fuzz_msgpack.py -runs=1000000 -rss_limit_mb=2048 -timeout=5 CORPUS_DIR

A finding is any exception but FormatError, a message that the check of its framing judges otherwise than the
reader, a tree that does not survive being written again, and a run of over five seconds or two gigabytes.
"""

import io
import sys

import atheris

with atheris.instrument_imports(include=["eformer"]):
    from eformer._engine.formats.msgpack import reader as _reader
    from eformer._engine.formats.msgpack.views import unpack
    from eformer._engine.formats.msgpack.writer import pack
    from eformer.errors import FormatError


def read(data: bytes, *, check_framing_first: bool) -> object:
    _reader._CHECK_FRAMING_ABOVE = -1 if check_framing_first else 2**16
    try:
        return unpack(data)
    except FormatError:
        return FormatError


def one_input(data: bytes) -> None:
    tree = read(data, check_framing_first=False)
    if (tree is FormatError) != (read(data, check_framing_first=True) is FormatError):
        raise AssertionError("the two ways of reading disagree")
    if tree is FormatError:
        return
    first, second = io.BytesIO(), io.BytesIO()
    pack(tree, first.write, max_chunk=64, sort_keys=False)
    pack(unpack(first.getvalue()), second.write, max_chunk=64, sort_keys=False)
    if first.getvalue() != second.getvalue():
        raise AssertionError("what was read is not what is read after writing it")


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
