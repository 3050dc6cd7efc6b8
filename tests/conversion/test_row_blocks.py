"""Large tensors are converted in blocks of rows: the file is the same, and memory is bounded by a block."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import (
    decoder_folders,
    encoder_folders,
    expert_folders,
    gpt_folders,
    layered_folders,
    recurrent_folders,
)
from support.model_folders import Folder

from metal_prefill.conversion import _weights, convert

FOLDERS: dict[str, dict[str, Callable[..., Folder]]] = {
    "decoders": decoder_folders.RECORDED,
    "encoders": encoder_folders.RECORDED | encoder_folders.NOMIC_MOE,
    "experts": expert_folders.RECORDED,
    "GPT": gpt_folders.RECORDED,
    "differing layers": layered_folders.RECORDED,
    "recurrent": recurrent_folders.RECORDED,
}
LARGE: dict[str, Any] = {"hidden_size_per_layer_input": 2048}  # 3 million values, 10 MB in bfloat16


@pytest.mark.parametrize("kind", FOLDERS)
def test_blocks_of_rows_make_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def converted(name: str, folder: Path) -> bytes:
        return convert(folder, tmp_path / f"{name}.gguf", tensor_type="Q8_0").read_bytes()

    for i, (name, make) in enumerate(FOLDERS[kind].items()):
        folder = make(tmp_path / str(i)).write()
        with monkeypatch.context() as patch:
            whole = converted(f"{i} whole", folder)
            patch.setattr(_weights, "BLOCK", 2000 if i else 20)  # most rows of the first have more values
            assert converted(f"{i} blocks", folder) == whole, name


@pytest.mark.parametrize("tensor_type", ["auto", "Q8_0"])
def test_a_large_table_is_never_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_type: str
) -> None:
    folder = layered_folders.gemma4(tmp_path / "m", **LARGE)
    table = next(values for name, values in folder.tensors.items() if "embed_tokens_per_layer" in name)
    path, size = folder.write(), table.size * 4
    convert(path, tmp_path / "m.gguf", tensor_type=tensor_type)  # imports what the package needs
    monkeypatch.setattr(_weights, "BLOCK", 1 << 14)
    assert size > 10 << 20
    tracemalloc.start()
    try:
        convert(path, tmp_path / "m.gguf", tensor_type=tensor_type)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 4, f"{peak} bytes were in use, the table has {size} in float32"
