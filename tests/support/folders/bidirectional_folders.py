"""Folders of decoders with bidirectional attention, and texts with recorded vectors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.folders.decoder_folders import folder
from support.folders.model_folders import DIM, Folder, filled, llama
from support.places import DATA

RECORD = DATA / "transformers_bidirectional.npz"
TEXTS = ["who is the king?", "A rose, by any other name", "x", "Long live the King! He is dead."]
PROJECTED = 48  # values of a projected vector
_CONTEXT = {"max_position_embeddings": 200, "use_sliding_window": False}


def _body(made: Folder, name: str, **config: Any) -> Folder:
    """Set a class without a head, whose tensors have no prefix, and mean pooling."""
    made.config |= {"architectures": [name], **_CONTEXT, **config}
    made.tensors.pop("lm_head.weight", None)
    made.tensors = {name.removeprefix("model."): tensor for name, tensor in made.tensors.items()}
    return made.pool("mean_tokens")


def nemotron(path: Path) -> Folder:
    """Make a folder in the form of llama-nemotron-embed."""
    name, made = "LlamaBidirectionalModel", llama(path)
    for tensor in made.tensors:  # so that attention has an effect
        if tensor.endswith("norm.weight"):
            made.tensors[tensor] += 1
        else:
            made.tensors[tensor] *= 3
    return _body(made, name, model_type="llama_bidirec", pooling="avg", rope_theta=500000.0)


def qwen3(path: Path) -> Folder:
    """Make a folder of Qwen3 whose configuration sets attention that is not causal."""
    return _body(folder(path, "qwen3"), "Qwen3Model", is_causal=False)


def voyage(path: Path) -> Folder:
    """Make a folder in the form of voyage-4-nano: projects states before pooling."""
    made = folder(path, "qwen3", tie_word_embeddings=True)
    del made.tensors["lm_head.weight"]
    made.tensors |= filled({"linear.weight": (PROJECTED, DIM)})
    made.config |= {
        "architectures": ["Qwen3BidirectionalModel"],
        "use_bidirectional_attention": True,
        "num_labels": PROJECTED,
        **_CONTEXT,
    }
    return made.pool("mean_tokens")


def pplx(path: Path) -> Folder:
    """Make a folder in the form of pplx-embed: the class implies the attention, and vectors are integers."""
    made = _body(folder(path, "qwen3"), "PPLXQwen3Model", model_type="bidirectional_pplx_qwen3")
    modules = made.loaded("modules.json")[:2]
    quantizer = {"path": "", "type": "st_quantize.FlexibleQuantizer", "kwargs": ["quantization"]}
    made.json("modules.json", [*modules, quantizer])
    return made


def gte_qwen2(path: Path) -> Folder:
    """Make a folder in the form of gte-Qwen2: its class predicts text, but its attention is not causal."""
    return folder(path, "qwen2", is_causal=False, **_CONTEXT).pool("lasttoken")


RECORDED: dict[str, Callable[[Path], Folder]] = {
    "llama": nemotron,
    "qwen3": qwen3,
    "qwen3, projected": voyage,
    "qwen2, last": gte_qwen2,
    "qwen3, integers": pplx,
    "ministral3": lambda path: _body(folder(path, "ministral3"), "Ministral3Model", is_causal=False),
    "gemma3": lambda path: _body(folder(path, "gemma3", use_bidirectional_attention=True), "Gemma3TextModel"),
}
