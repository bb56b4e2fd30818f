"""Write the samples of this directory with the package gguf of llama.cpp, and beside each what it reads of them.

Run it in an environment with gguf (0.19.0 wrote the samples) and ml_dtypes: python tests/compat/gguf/write.py
"""

from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).parent


def tensors(random):
    yield "token_embd.weight", random.standard_normal((5, 32)).astype(np.float32), None
    yield "blk.0.attn_norm.weight", random.standard_normal(7).astype(np.float16), None
    bits = random.integers(0, 2**15, (3, 4)).astype(np.uint16)
    yield "blk.0.attn_q.weight", bits.view(np.uint8).reshape(3, 8), gguf.GGMLQuantizationType.BF16
    yield "blk.0.steps", random.integers(-9, 9, (2, 3, 4)).astype(np.int32), None
    yield "blk.1.i8", random.integers(-9, 9, 33).astype(np.int8), None
    yield "blk.1.i16", random.integers(-9, 9, (1, 3)).astype(np.int16), None
    yield "blk.1.i64", random.integers(-9, 9, 2).astype(np.int64), None
    yield "blk.1.f64", random.standard_normal((2, 2)), None


def write(path, is_quantised=False, **options):
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_name("sample")
    writer.add_uint32("llama.context_length", 2048)
    writer.add_uint64("llama.big", 2**63 + 1)
    writer.add_int8("llama.small", -3)
    writer.add_float32("llama.eps", 0.5)
    writer.add_float64("llama.base", 1e4)
    writer.add_bool("llama.tied", True)
    writer.add_token_list(["<s>", "\u2581a", ""])
    writer.add_array("llama.scores", [0.5, -1.5])
    if path.stem == "aligned":
        writer.add_custom_alignment(256)
    for name, array, kind in tensors(random):
        writer.add_tensor(name, array, raw_dtype=kind)
    if is_quantised:
        for name, kind in (("blk.2.q8", "Q8_0"), ("blk.2.q4", "Q4_0")):
            kind = gguf.GGMLQuantizationType[kind]
            plain = random.standard_normal((2, 64)).astype(np.float32)
            writer.add_tensor(name, gguf.quants.quantize(plain, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path):
    """Read the tensors with gguf: dtype, shape and bytes of each."""
    return {
        f"{tensor.name}|{tensor.tensor_type.name}|{tensor.shape.tolist()[::-1]}": np.frombuffer(
            np.ascontiguousarray(tensor.data).tobytes(), np.uint8
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


if __name__ == "__main__":
    for name in ("plain", "aligned", "quantised"):
        write(HERE / f"{name}.gguf", is_quantised=name == "quantised")
        np.savez_compressed(HERE / f"{name}.npz", **read(HERE / f"{name}.gguf"))
    write(HERE / "big_endian.gguf", endianess=gguf.GGUFEndian.BIG)
