"""Write GGUF files by the specification of the format, without the package of llama.cpp; hostile ones, too."""

import struct

NUMBERS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
KINDS = {
    "float32": 0, "float16": 1, "int8": 24, "int16": 25, "int32": 26, "int64": 27, "float64": 28, "bfloat16": 30
}  # fmt: skip


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind, content):
    """A value of metadata, as type and bytes. The kind of an array is "[kind]"."""
    if kind == "text":
        return 8, text(content)
    if kind.startswith("["):
        inner = [value(kind[1:-1], item) for item in content]
        number = inner[0][0] if inner else 4
        return 9, struct.pack("<IQ", number, len(inner)) + b"".join(data for _, data in inner)
    number, code = NUMBERS[kind]
    return number, struct.pack(f"<{code}", content)


def pair(key, kind, content):
    number, data = value(kind, content)
    return text(key) + struct.pack("<I", number) + data


def tensor(name, shape, kind, offset):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def file(pairs=(), tensors=(), data=b"", *, version=3, alignment=32, counts=None):
    """A whole file of pairs and tensors that are bytes already."""
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    header = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count)
    header += b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def of_arrays(arrays, pairs=(), alignment=32):
    """A file of arrays by name."""
    tensors, data = [], b""
    for name, array in arrays.items():
        tensors.append(tensor(name, array.shape, KINDS[array.dtype.name], len(data)))
        data += array.tobytes()
        data += bytes(-len(data) % alignment)
    return file(pairs, tensors, data, alignment=alignment)
