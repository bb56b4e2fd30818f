"""Write samples.zip with zarr-python: directories of zarr 2 and 3 in many kinds, and what zarr-python reads of them.

Run it in an environment with zarr (3.1.6 wrote the samples): python tests/compat/zarr/write.py
"""

import tempfile
import zipfile
from pathlib import Path

import numcodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

HERE = Path(__file__).parent
ARRAY = np.arange(60, dtype=np.float32).reshape(6, 10) + 1
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"


def put(group, name="w", data=ARRAY, **options):
    array = group.create_array(name, shape=data.shape, dtype=data.dtype, **options)
    array[...] = data


def default(group):
    group.attrs.update({"note": "x", "step": 3})
    put(group)
    put(group.create_group("sub"), "b", ARRAY.astype(np.int64), chunks=(4, 4))
    put(group, "s", np.array(3.5, np.float32))
    put(group, "empty", np.zeros((0, 3), np.float32))


V3 = {
    "default": default,
    "dtypes": lambda group: [put(group, name, np.arange(1, 7).astype(name)) for name in DTYPES.split()],
    "big": lambda group: put(group, serializer=BytesCodec(endian="big")),
    "transpose": lambda group: put(group, chunks=(4, 4), filters=[TransposeCodec(order=(1, 0))]),
    "shards": lambda group: put(group, chunks=(2, 5), shards=(4, 10)),
    "dots": lambda group: put(group, chunks=(4, 4), chunk_key_encoding={"name": "default", "separator": "."}),
    "v2keys": lambda group: put(group, chunks=(4, 4), chunk_key_encoding={"name": "v2", "separator": "."}),
}
for name, codec in {
    "gzip": GzipCodec(),
    "zstd": ZstdCodec(),
    "blosc": BloscCodec(),
    "none": None,
    "crc": [ZstdCodec(), Crc32cCodec()],
}.items():
    V3[name] = lambda group, codec=codec: put(group, chunks=(4, 4), compressors=codec)
V3_REFUSED = {
    "text": lambda group: put(group, data=np.array(["a", "bc"])),
    "zeros": lambda group: put(group, data=np.zeros((6, 10), np.float32), chunks=(3, 10)),
    "shards-blosc": lambda group: put(group, chunks=(2, 5), shards=(4, 10), compressors=BloscCodec()),
}
V2 = {"default": default}
for name in ("Blosc", "Zstd", "Zlib", "GZip", "BZ2"):
    V2[name.lower()] = lambda group, name=name: put(
        group, chunks=(4, 4), compressors=getattr(numcodecs, name)()
    )
V2_REFUSED = {
    "lz4": lambda group: put(group, compressors=numcodecs.LZ4()),
    "lzma": lambda group: put(group, compressors=numcodecs.LZMA()),
    "delta": lambda group: put(group, filters=[numcodecs.Delta(dtype="f4")]),
    "shuffle": lambda group: put(group, filters=[numcodecs.Shuffle(4)]),
    "zeros": lambda group: put(group, data=np.zeros((6, 10), np.float32), chunks=(3, 10)),
}


def read(group, above=""):
    for name, member in group.members():
        if isinstance(member, zarr.Group):
            yield from read(member, f"{above}{name}:")
        else:
            data = np.asarray(member[...])
            key = f"{above}{name}|{data.dtype.name}|{list(data.shape)}"
            yield key, np.frombuffer(data.tobytes(), np.uint8)


def write(folder):
    for version, kinds in ((3, V3), (2, V2), (3, V3_REFUSED), (2, V2_REFUSED)):
        for name, fill in kinds.items():
            group = zarr.open_group(folder / f"v{version}-{name}", mode="w", zarr_format=version)
            fill(group)
            if kinds in (V3, V2):
                np.savez_compressed(folder / f"v{version}-{name}.npz", **dict(read(group)))
    for version in (2, 3):
        zarr.create_array(folder / f"v{version}-one", data=ARRAY, chunks=(4, 4), zarr_format=version)


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as name,
        zipfile.ZipFile(HERE / "samples.zip", "w", zipfile.ZIP_DEFLATED) as z,
    ):
        write(Path(name))
        for path in sorted(Path(name).rglob("*")):
            if path.is_file():
                z.write(path, path.relative_to(name))
