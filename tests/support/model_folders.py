"""Small model folders as transformers and sentence-transformers write them, with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from support import encoder_tokenizers

Values = npt.NDArray[np.float32]
IDENTITY = "torch.nn.modules.linear.Identity"
LAYERS, DIM, FFN, HEADS, CONTEXT = 2, 32, 64, 4, 40


class Folder:
    """A folder under construction.

    Attributes
    ----------
    config : dict
        Contents of ``config.json``.
    tensors : dict of str to numpy.ndarray
        Contents of ``model.safetensors``.
    """

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, Values]) -> None:
        self.path = path
        self.config = config
        self.tensors = tensors

    def write(self) -> Path:
        """Write configuration and weights."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.json("config.json", self.config)
        save_file(self.tensors, self.path / "model.safetensors")
        return self.path

    def json(self, name: str, content: Any) -> None:
        """Write a file."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(json.dumps(content))

    def pool(self, mode: str = "mean_tokens", dense: int = 0, normalize: bool = True) -> None:
        """Add the modules of sentence-transformers."""
        kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
        kinds += [("Dense", "2_Dense")] if dense else []
        kinds += [("Normalize", "3_Normalize")] if normalize else []
        modules = [
            {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds)
        ]
        self.json("modules.json", modules)
        modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
        pooling = {f"pooling_mode_{name}": name == mode for name in modes}
        self.json("1_Pooling/config.json", {"word_embedding_dimension": DIM, **pooling})
        if dense:
            settings = {"in_features": DIM, "out_features": dense, "bias": False}
            self.json("2_Dense/config.json", {**settings, "activation_function": IDENTITY})
            save_file({"linear.weight": values((dense, DIM))}, self.path / "2_Dense" / "model.safetensors")


def save_bfloat16(tensors: dict[str, Values], path: Path) -> None:
    """Write the upper halves of float32 values, which NumPy has no type for."""
    header, data = {}, b""
    for name, array in tensors.items():
        content = (array.view(np.uint32) >> 16).astype("<u2").tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def values(shape: tuple[int, ...], seed: int = 0) -> Values:
    """Return random values of the size of weights."""
    return np.random.default_rng([seed, *shape]).normal(0, 0.1, shape).astype(np.float32)


def bert(path: Path, architecture: str = "BertModel", variant: str = "uncased", **config: Any) -> Folder:
    """Make a folder of a BERT or XLM-R class."""
    path.mkdir(parents=True, exist_ok=True)
    encoder_tokenizers.write_recorded(path, variant, encoder_tokenizers.recorded())
    tokenizer = json.loads((path / "tokenizer.json").read_bytes())
    vocab = max(len(tokenizer["model"]["vocab"]), *(t["id"] + 1 for t in tokenizer["added_tokens"]))
    roberta = "Roberta" in architecture
    settings = {
        "architectures": [architecture],
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "max_position_embeddings": CONTEXT,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "vocab_size": vocab,
        "type_vocab_size": 1 if roberta else 2,
        "pad_token_id": 1 if roberta else 0,
        **config,
    }
    prefix = "" if architecture.endswith("Model") else ("roberta." if roberta else "bert.")
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (vocab, DIM),
        "embeddings.position_embeddings.weight": (CONTEXT, DIM),
        "embeddings.token_type_embeddings.weight": (settings["type_vocab_size"], DIM),
        "embeddings.LayerNorm.weight": (DIM,),
        "embeddings.LayerNorm.bias": (DIM,),
    }
    linear = {
        "attention.self.query": (DIM, DIM),
        "attention.self.key": (DIM, DIM),
        "attention.self.value": (DIM, DIM),
        "attention.output.dense": (DIM, DIM),
        "intermediate.dense": (FFN, DIM),
        "output.dense": (DIM, FFN),
    }
    for layer in range(LAYERS):
        for name, shape in linear.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"encoder.layer.{layer}.{name}.{end}": (DIM,) for end in ("weight", "bias")}
    tensors = {prefix + name: values(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    return Folder(path, settings, tensors)


def with_head(folder: Folder, shapes: dict[str, tuple[int, ...]]) -> Folder:
    """Add the tensors of a head."""
    for i, (name, shape) in enumerate(shapes.items()):
        folder.tensors[name] = values(shape, 1000 + i)
    return folder


Change = Callable[[Folder], None]
