"""Large tensors are converted in blocks of rows: the file is the same, and memory is bounded by a block."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from support.folders import decoder_folders, encoder_folders, other_encoders
from support.folders.model_folders import Folder

from metal_prefill.conversion import _weights, convert

_ALL: dict[str, Callable[[Path], Folder]] = {
    **decoder_folders.RECORDED,
    **encoder_folders.RECORDED,
    **other_encoders.NOMIC_MOE,
}
# Matrices that are divided, turned or stacked, and those that are changed in another way.
FOLDERS: dict[str, Callable[[Path], Folder]] = {
    name: _ALL[name]
    for name in (
        *("lfm2", "qwen35", "granite_hybrid", "mamba2", "falcon_h1", "smollm3", "phi3", "ernie4_5", "gpt2"),
        *("gpt_neox", "qwen3_moe", "granite_moe, shared", "granite_hybrid, experts", "lfm2_moe", "gemma4"),
        *("albert", "t5, gated", "deberta", "jina v3", "privacy filter", "nomic moe"),
    )
}
LARGE = 1024  # columns of a table with 1.5 million values


@pytest.mark.parametrize("name", FOLDERS)
def test_blocks_of_rows_make_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Most rows have more values than the smallest blocks."""
    folder, made = FOLDERS[name](tmp_path / "m").write(), []
    first = name in ("smollm3", "albert", "gpt2", "lfm2")
    for block in (_weights.BLOCK, 20 if first else 2000):
        monkeypatch.setattr(_weights, "BLOCK", block)
        made.append(convert(folder, tmp_path / f"{block}.gguf", tensor_type="Q8_0").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("tensor_type", ["auto", "Q8_0"])
def test_a_large_table_is_never_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_type: str
) -> None:
    folder = decoder_folders.wider(tmp_path / "m", LARGE)
    table = next(values for name, values in folder.tensors.items() if "embed_tokens_per_layer" in name)
    path, size = folder.write(), table.size * 4
    convert(path, tmp_path / "m.gguf", tensor_type=tensor_type)  # imports what the package needs
    monkeypatch.setattr(_weights, "BLOCK", 1 << 14)
    assert size > 5 << 20
    tracemalloc.start()
    try:
        convert(path, tmp_path / "m.gguf", tensor_type=tensor_type)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 4, f"{peak} bytes were in use, the table has {size} in float32"
