"""Folders of encoders that llama.cpp's converter supports, and texts with recorded vectors."""

from collections.abc import Callable
from pathlib import Path

from metal_prefill.conversion import convert
from support.files.gguf_mutator import take_apart
from support.folders import bidirectional_folders, encoder_folders, other_encoders
from support.folders.model_folders import Folder
from support.places import DATA

RECORD = DATA / "llama_cpp_folders.npz"
# By architecture.
FOLDERS: dict[str, Callable[[Path], Folder]] = {
    "t5encoder": encoder_folders.RECORDED["t5"],
    "t5encoder, gated": encoder_folders.RECORDED["t5, gated"],
    "llama-embed": bidirectional_folders.RECORDED["llama"],
    "jina-bert-v3": encoder_folders.RECORDED["jina v3"],
    "nomic-bert-moe": other_encoders.NOMIC_MOE["nomic moe"],
}
ARCHITECTURES = {name.partition(",")[0] for name in FOLDERS}
# Keys that this project's conversion adds.
_OWN = (b".hidden_activation", b".embedding_normalize", b"t5encoder.attention.causal")


def written(folder: Path, name: str) -> Path:
    """Write the file of a folder with the keys of llama.cpp's converter, and mean pooling.

    That converter omits the bias of the sum of experts.
    """
    made = FOLDERS[name](folder / "m").pool("mean_tokens")
    made.tensors = {name: t for name, t in made.tensors.items() if not name.endswith("experts.bias")}
    parts = take_apart(convert(made.write(), folder / "whole.gguf"))
    parts.metadata = [entry for entry in parts.metadata if not entry[0].endswith(_OWN)]
    return parts.write(folder / "m.gguf")
