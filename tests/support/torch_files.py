"""Write archives and pickles as torch.save writes them, without PyTorch; hostile ones, too."""

import io
import struct
import zipfile


def archive(pickled, **members):
    """An archive as torch.save writes it, around this pickle."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        for name, data in members.items():
            file.writestr(f"archive/data/{name.removeprefix('_')}", data)
    return memory.getvalue()


def tensor(storage="0", kind=b"FloatStorage", size=4, offset=0, shape=(4,), strides=(1,)):
    """The pickle of one tensor, written opcode by opcode."""

    def number(value):
        return b"J" + struct.pack("<i", value)

    def several(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    persistent = (
        b"(" + text("storage") + b"ctorch\n" + kind + b"\n" + text(storage) + text("cpu") + number(size)
    )
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + b"tQ" + number(offset) + several(shape)
        + several(strides) + b"\x89}tR."
    )  # fmt: skip
