"""Small model folders as transformers and sentence-transformers write them, with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
from gguf import quants
from safetensors.numpy import save_file
from tokenizers import processors

from support.comparison import VERSE
from support.files.gguf_reader import GGUFReader
from support.folders import encoder_tokenizers
from support.folders.tokenizer_folders import trained_byte_level
from support.places import DATA

TENSORS = DATA / "transformers_tensors.npz"
Values = npt.NDArray[np.float32]
IDENTITY = "torch.nn.modules.linear.Identity"
Shapes: TypeAlias = dict[str, tuple[int, ...]]
LAYERS, DIM, FFN, HEADS, CONTEXT = 2, 32, 64, 4, 40
KV, VOCAB = DIM // 2, 304
# Fields of most configurations.
SIZES = {
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT,
}
GROUPED = {**SIZES, "num_key_value_heads": HEADS // 2, "vocab_size": VOCAB}
LLAMA_LAYER: Shapes = {
    **{f"self_attn.{name}_proj": (KV if name in "kv" else DIM, DIM) for name in "qkvo"},
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (FFN, DIM)),
    "mlp.down_proj": (DIM, FFN),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (DIM,)),
}


class Folder:
    """A folder under construction."""

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, Values]) -> None:
        self.path = path
        self.config = config  # contents of ``config.json``
        self.tensors = tensors  # contents of ``model.safetensors``

    def add(self, shapes: Shapes, first: int = 0, size: float = 1, prefix: str = "") -> Folder:
        """Add tensors with random values; seeds are consecutive."""
        for seed, (name, shape) in enumerate(shapes.items(), first):
            self.tensors[prefix + name] = size * values(shape, seed)
        return self

    def modules(self, places: Mapping[str, str], package: str = "sentence_transformers.models.") -> Folder:
        """List modules of sentence-transformers: the kind of each, by its path."""
        listed = [
            {"idx": i, "name": str(i), "path": place, "type": package + kind}
            for i, (place, kind) in enumerate(places.items())
        ]
        self.json("modules.json", listed)
        return self

    def dense(self, place: str, rows: int, columns: int, size: float = 1, **settings: Any) -> Folder:
        """Add a dense layer of sentence-transformers, by default without bias and activation."""
        stated = {
            "in_features": columns,
            "out_features": rows,
            "bias": False,
            "activation_function": IDENTITY,
        }
        self.json(f"{place}/config.json", {**stated, **settings})
        save_file({"linear.weight": size * values((rows, columns))}, self.path / place / "model.safetensors")
        return self

    def write(self, shards: int = 1) -> Path:
        """Write configuration and weights, in one file or several with an index."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.json("config.json", self.config)
        if shards == 1:
            save_file(self.tensors, self.path / "model.safetensors")
            return self.path
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        places = {name: files[i % shards] for i, name in enumerate(self.tensors)}
        for file in files:
            save_file({name: self.tensors[name] for name in places if places[name] == file}, self.path / file)
        self.json("model.safetensors.index.json", {"metadata": {}, "weight_map": places})
        return self.path

    def json(self, name: str, content: Any) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(json.dumps(content))

    def merge(self, name: str, **fields: Any) -> Folder:
        """Change fields of a file."""
        self.json(name, {**self.loaded(name), **fields})
        return self

    def loaded(self, name: str) -> Any:
        """Return the contents of a file of JSON."""
        return json.loads((self.path / name).read_bytes())

    def list_words(self) -> Folder:
        """Write a list of words instead of the tokenizer, as in early folders of BERT."""
        ids = self.loaded("tokenizer.json")["model"]["vocab"]
        (self.path / "vocab.txt").write_text("\n".join(sorted(ids, key=ids.get)) + "\n")
        (self.path / "tokenizer.json").unlink()
        return self

    def pool(self, mode: str = "mean_tokens", dense: int = 0, normalize: bool = True) -> Folder:
        """Add the modules of sentence-transformers."""
        places = {"": "Transformer", "1_Pooling": "Pooling"}
        places |= {"2_Dense": "Dense", "3_Dense": "Dense"} if dense else {}
        self.modules(places | ({"4_Normalize": "Normalize"} if normalize else {}))
        modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
        pooling = {f"pooling_mode_{name}": name == mode for name in modes}
        self.json("1_Pooling/config.json", {"word_embedding_dimension": DIM, **pooling})
        return self.dense("2_Dense", dense, DIM).dense("3_Dense", DIM, dense) if dense else self


def types_of(path: Path) -> dict[str, str]:
    """Return the types of the tensors of a GGUF file."""
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}


def assert_same_tensors(found: Mapping[str, Any], expected: Mapping[str, Any], near: float = 0) -> None:
    """Compare tensors of two files."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=near, atol=near)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata and the dequantized tensors of a GGUF file, as the gguf package reads them."""
    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {
        t.name: quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in reader.tensors
    }
    return fields, tensors


def save_bfloat16(tensors: dict[str, Values], path: Path) -> None:
    """Write the upper halves of float32 values: NumPy has no bfloat16."""
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


@cache
def shapes_of(name: str) -> Shapes:
    """Return the shapes of the tensors that transformers saves for a recorded configuration."""
    with np.load(TENSORS) as recorded:
        listed = json.loads(str(recorded[name]))
    return {tensor: tuple(shape) for tensor, shape in listed.items()}


def filled(shapes: Mapping[str, tuple[int, ...]], norm: float = 1, gain: float = 1) -> dict[str, Values]:
    """Return random values, with a seed from the names of tensors.

    Matrices scale their inputs by about `gain`, and factors of norms and layers are around `norm`.
    """
    found: dict[str, Values] = {}
    for name, shape in shapes.items():
        is_factor = ("norm" in name.lower() and name.endswith("weight")) or name.endswith("layer_scalar")
        center, size = (norm * is_factor, 0.3) if len(shape) == 1 else (0, gain * shape[-1] ** -0.5)
        drawn = np.random.default_rng(crc32(name.encode())).normal(center, size, shape)
        found[name] = drawn.astype(np.float32)
    return found


def linear(name: str, rows: int = DIM, columns: int = DIM) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name: str, dim: int = DIM) -> Shapes:
    return {f"{name}.{end}": (dim,) for end in ("weight", "bias")}


def weights(at: str, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {f"{at}{name}.weight": shape for name, shape in shapes.items()}


def repeated(at: str, layer: Mapping[str, tuple[int, ...]], layers: int = LAYERS) -> Shapes:
    """Return the shapes of all layers; `at` formats the layer's number."""
    return {at.format(i) + name: shape for i in range(layers) for name, shape in layer.items()}


def tokenized(path: Path, config: dict[str, Any], shapes: Shapes, pattern: str | None = None) -> Folder:
    """Make a folder with a byte-level tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer(path, pattern=pattern)
    return Folder(path, config, {}).add(shapes)


def bert(path: Path, architecture: str = "BertModel", variant: str = "uncased", **config: Any) -> Folder:
    """Make a folder of a BERT or XLM-R class."""
    path.mkdir(parents=True, exist_ok=True)
    encoder_tokenizers.write_recorded(path, variant)
    tokenizer = json.loads((path / "tokenizer.json").read_bytes())
    vocab = max(len(tokenizer["model"]["vocab"]), *(t["id"] + 1 for t in tokenizer["added_tokens"]))
    roberta = "Roberta" in architecture
    settings = {
        **SIZES,
        "architectures": [architecture],
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "vocab_size": vocab,
        "type_vocab_size": 1 if roberta else 2,
        "pad_token_id": 1 if roberta else 0,
        **config,
    }
    prefix = "" if architecture.endswith("Model") else ("roberta." if roberta else "bert.")
    tables = {"word": vocab, "position": CONTEXT, "token_type": settings["type_vocab_size"]}
    shapes = weights("embeddings.", {f"{name}_embeddings": (rows, DIM) for name, rows in tables.items()})
    shapes |= norm("embeddings.LayerNorm")
    layer: Shapes = {}
    for name in ("self.query", "self.key", "self.value", "output.dense"):
        layer |= linear(f"attention.{name}")
    layer |= linear("intermediate.dense", FFN, DIM) | linear("output.dense", DIM, FFN)
    layer |= norm("attention.output.LayerNorm") | norm("output.LayerNorm")
    shapes |= repeated("encoder.layer.{}.", layer)
    return Folder(path, settings, {}).add(shapes, prefix=prefix)


# The pattern of Qwen3.5 as published.
QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_tokenizer(path: Path, size: int = 300, pattern: str | None = None) -> None:
    """Write a byte-level BPE tokenizer with two control tokens, by default with the pattern of Llama 3."""
    (path / "tokenizer.json").write_text(_byte_level(size, pattern))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@cache
def _byte_level(size: int, pattern: str | None) -> str:
    tokenizer = trained_byte_level(pattern, size, [VERSE])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer.to_str()


def llama(path: Path, architecture: str = "LlamaForCausalLM", **config: Any) -> Folder:
    """Make a folder of a Llama class with a task's head."""
    settings = {
        **GROUPED,
        "architectures": [architecture],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": [1, 0],
        **config,
    }
    shapes = weights("model.", {"embed_tokens": (VOCAB, DIM), "norm": (DIM,)})
    shapes |= repeated("model.layers.{}.", weights("", LLAMA_LAYER), settings["num_hidden_layers"])
    if architecture.endswith("CausalLM"):
        shapes["lm_head.weight"] = (VOCAB, DIM)
    return tokenized(path, settings, shapes)
