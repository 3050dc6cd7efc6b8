"""Folders of decoders whose tokens see those after them, and texts whose vectors are recorded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.folders.decoder_folders import gemma3, ministral3, qwen2, sized
from support.folders.decoder_folders import qwen3 as qwen3_decoder
from support.folders.model_folders import DIM, Folder, llama
from support.places import DATA

RECORD = DATA / "transformers_bidirectional.npz"
TEXTS = ["who is the king?", "A rose, by any other name", "x", "Long live the King! He is dead."]
PROJECTED = 48  # values of a projected vector
_CONTEXT = {"max_position_embeddings": 200, "use_sliding_window": False}


def _body(folder: Folder, name: str, **config: Any) -> Folder:
    """Name a class without a head, whose tensors have no prefix, and pool its states by their mean."""
    folder.config |= {"architectures": [name], **_CONTEXT, **config}
    folder.tensors.pop("lm_head.weight", None)
    folder.tensors = {name.removeprefix("model."): tensor for name, tensor in folder.tensors.items()}
    return sized(folder.pool("mean_tokens"))


def nemotron(path: Path) -> Folder:
    """Make a folder as llama-nemotron-embed has it."""
    name = "LlamaBidirectionalModel"
    return _body(llama(path), name, model_type="llama_bidirec", pooling="avg", rope_theta=500000.0)


def qwen3(path: Path) -> Folder:
    """Make a folder of Qwen3 that states that its attention is not causal."""
    return _body(qwen3_decoder(path), "Qwen3Model", is_causal=False)


def voyage(path: Path) -> Folder:
    """Make a folder as voyage-4-nano has it: states are projected before they are pooled."""
    folder = qwen3_decoder(path, tie_word_embeddings=True)
    del folder.tensors["lm_head.weight"]
    folder.add({"linear.weight": (PROJECTED, DIM)})
    folder.config |= {
        "architectures": ["Qwen3BidirectionalModel"],
        "use_bidirectional_attention": True,
        "num_labels": PROJECTED,
        **_CONTEXT,
    }
    return sized(folder.pool("mean_tokens"))


def pplx(path: Path) -> Folder:
    """Make a folder as pplx-embed has it: the class implies the attention, and vectors are integers."""
    folder = _body(qwen3_decoder(path), "PPLXQwen3Model", model_type="bidirectional_pplx_qwen3")
    modules = folder.loaded("modules.json")[:2]
    quantizer = {"path": "", "type": "st_quantize.FlexibleQuantizer", "kwargs": ["quantization"]}
    folder.json("modules.json", [*modules, quantizer])
    return folder


def gte_qwen2(path: Path) -> Folder:
    """Make a folder as gte-Qwen2 has it: its class predicts text, but its attention is not causal."""
    folder = qwen2(path, is_causal=False)
    folder.config |= _CONTEXT
    return sized(folder.pool("lasttoken"))


RECORDED: dict[str, Callable[[Path], Folder]] = {
    "llama": nemotron,
    "qwen3": qwen3,
    "qwen3, projected": voyage,
    "qwen2, last": gte_qwen2,
    "qwen3, integers": pplx,
    "ministral3": lambda path: _body(ministral3(path), "Ministral3Model", is_causal=False),
    "gemma3": lambda path: _body(gemma3(path, use_bidirectional_attention=True), "Gemma3TextModel"),
}
