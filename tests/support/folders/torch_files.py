"""Files as ``torch.save`` writes them for dictionaries of tensors, without torch."""

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

ORDERED = b"ccollections\nOrderedDict\n)R"


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def _numbers(*numbers: int) -> bytes:
    return b"(" + b"".join(b"J" + struct.pack("<i", n) for n in numbers) + b"t"


def pickled(tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return a pickle of protocol 2 that refers to tensors in files ``data/0``, ``data/1`` and so on."""
    made = b"\x80\x02" + ORDERED + b"("
    for i, (name, tensor) in enumerate(tensors.items()):
        strides = [step // tensor.itemsize for step in tensor.strides]
        storage = b"ctorch\n" + {2: b"Half", 4: b"Float"}[tensor.itemsize] + b"Storage\n"
        place = b"(" + _text("storage") + storage + _text(str(i)) + _text("cpu") + b"J"
        made += (
            _text(name)
            + b"ctorch._utils\n_rebuild_tensor_v2\n("
            + place
            + struct.pack("<i", tensor.size)
            + b"tQ"
        )
        made += b"K\x00" + _numbers(*tensor.shape) + _numbers(*strides) + b"\x89" + ORDERED + b"tR"
    return made + b"u."


def write_torch_file(
    path: Path, tensors: Mapping[str, npt.NDArray[Any]], pickle: bytes | None = None
) -> None:
    """Write a file; `pickle` replaces the usual one."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickled(tensors) if pickle is None else pickle)
        archive.writestr(f"{path.stem}/byteorder", "little")
        for i, tensor in enumerate(tensors.values()):
            archive.writestr(f"{path.stem}/data/{i}", tensor.tobytes("K"))
