"""Folders of encoders of the Hub with random weights, whose results are recorded with transformers.

The class of nomic-embed-text-v2-moe is not in transformers: its states are computed in float64.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from support.folders import model_folders
from support.folders.bert_relatives import splade_modules
from support.folders.model_folders import Folder, Shapes, norm, repeated
from support.folders.tokenizer_folders import GPT_4O_PATTERN
from support.places import DATA

RECORD = DATA / "transformers_encoder_folders.npz"
CONTEXT = 330
LENGTHS = (1, 9, 300)  # of texts; the last is longer than pages, and than distances that are distinguished

TEXT = "a rose by any name"  # whose vector over the vocabulary is recorded


def texts() -> Iterator[npt.NDArray[np.int64]]:
    """Yield texts without special tokens."""
    for length in LENGTHS:
        yield np.random.default_rng(length).integers(5, 300, length)


def rows_of(states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    chosen = np.unique(np.linspace(0, len(states) - 1, min(len(states), 15)).astype(int))
    return states[chosen]


class Size(NamedTuple):
    """Dimensions of an encoder."""

    dim: int
    heads: int
    ffn: int
    layers: int


def linear_of(names: dict[str, tuple[int, int]], *, bias: bool = True) -> Shapes:
    """Return the shapes of matrices, then of their biases."""
    shapes: Shapes = {f"{name}.weight": shape for name, shape in names.items()}
    return shapes | ({f"{name}.bias": shape[:1] for name, shape in names.items()} if bias else {})


def _embeddings(vocab: int, dim: int, *, types: int = 2, positions: int = CONTEXT) -> Shapes:
    tables = {"word": vocab, "position": positions, "token_type": types}
    shapes: Shapes = {f"embeddings.{name}_embeddings.weight": (n, dim) for name, n in tables.items() if n}
    return shapes | norm("embeddings.LayerNorm", dim)


def _filled(folder: Folder, prefix: str, shapes: Shapes, seed: int) -> Folder:
    """Give a folder random tensors: matrices that keep the size of their input, and norms around 1."""
    rng = np.random.default_rng(seed)
    folder.tensors = {}
    for name, shape in shapes.items():
        values = rng.normal(0, 0.3 if len(shape) == 1 else 1.3 * shape[1] ** -0.5, shape)
        if "norm" in name.lower() and name.endswith("weight"):
            values += 1
        folder.tensors[prefix + name] = values.astype(np.float32)
    return folder


def _bert(path: Path, name: str, size: Size, **config: Any) -> Folder:
    folder = model_folders.bert(path, max_position_embeddings=CONTEXT)
    folder.config |= {"architectures": [name], "hidden_size": size.dim, "num_hidden_layers": size.layers}
    folder.config |= {"num_attention_heads": size.heads, "intermediate_size": size.ffn, **config}
    return folder


def _bert_layers(size: Size, end: str = "") -> Shapes:
    dim, _, ffn, layers = size
    names = {f"attention.self.{name}{end}": (dim, dim) for name in ("query", "key", "value")}
    names |= {"attention.output.dense": (dim, dim), "intermediate.dense": (ffn, dim)}
    layer = linear_of({**names, "output.dense": (dim, ffn)})
    layer |= norm("attention.output.LayerNorm", dim) | norm("output.LayerNorm", dim)
    return repeated("encoder.layer.{}.", layer, layers)


def albert(path: Path, seed: int, size: Size, embedding: int, act: str, head: str = "") -> Folder:
    """Make a folder of ALBERT, all of whose layers share their weights."""
    config = {"model_type": "albert", "embedding_size": embedding, "hidden_act": act, "num_hidden_groups": 1}
    folder = _bert(path, f"Albert{head or 'Model'}", size, **config)
    dim, at = size.dim, "encoder.albert_layer_groups.0.albert_layers.0."
    square = {f"{at}attention.{name}": (dim, dim) for name in ("query", "key", "value", "dense")}
    shapes = _embeddings(folder.config["vocab_size"], embedding)
    shapes |= linear_of({"encoder.embedding_hidden_mapping_in": (dim, embedding), "pooler": (dim, dim)})
    shapes |= linear_of({**square, f"{at}ffn": (size.ffn, dim), f"{at}ffn_output": (dim, size.ffn)})
    shapes |= norm(f"{at}attention.LayerNorm", dim) | norm(f"{at}full_layer_layer_norm", dim)
    return _filled(folder, "albert." if head else "", shapes, seed)


def electra(path: Path, seed: int, size: Size, embedding: int, head: str = "ForPreTraining") -> Folder:
    """Make a folder of a small ELECTRA, whose embedding is narrower than its layers."""
    folder = _bert(path, f"Electra{head}", size, model_type="electra", embedding_size=embedding)
    shapes = _embeddings(folder.config["vocab_size"], embedding)
    shapes |= linear_of({"embeddings_project": (size.dim, embedding)}) | _bert_layers(size)
    return _filled(folder, "electra.", shapes, seed)


def bert(path: Path, seed: int, size: Size) -> Folder:
    """Make a folder of BERT with a long context."""
    folder = _bert(path, "BertModel", size, model_type="bert")
    shapes = _embeddings(folder.config["vocab_size"], size.dim) | _bert_layers(size)
    return _filled(folder, "", shapes, seed)


def deberta(
    path: Path,
    seed: int,
    size: Size,
    buckets: int = -1,
    furthest: int = -1,
    absolute: bool = False,
    head: str = "",
) -> Folder:
    """Make a folder of DeBERTa; without buckets every distance up to the furthest has its own row."""
    config = {
        "model_type": "deberta-v2",
        "relative_attention": True,
        "position_buckets": buckets,
        "max_relative_positions": furthest,
        "norm_rel_ebd": "none" if absolute else "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": absolute,
        "type_vocab_size": 2 if absolute else 0,
        "layer_norm_eps": 1e-7,
        "pooler_hidden_size": size.dim,
    }
    folder = _bert(path, f"DebertaV2{head or 'Model'}", size, **config)
    types, positions = (2, CONTEXT) if absolute else (0, 0)
    shapes = _embeddings(folder.config["vocab_size"], size.dim, types=types, positions=positions)
    span = buckets if buckets > 0 else furthest
    shapes["encoder.rel_embeddings.weight"] = (2 * span, size.dim)
    shapes |= {} if absolute else norm("encoder.LayerNorm", size.dim)
    return _filled(folder, "deberta." if head else "", shapes | _bert_layers(size, "_proj"), seed)


def t5(path: Path, seed: int, size: Size, width: int, act: str) -> Folder:
    """Make a folder of T5's encoder."""
    dim, heads, ffn, layers = size
    folder = model_folders.bert(path, "XLMRobertaModel", "unigram")
    folder.config = {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "d_model": dim,
        "d_kv": width,
        "d_ff": ffn,
        "num_layers": layers,
        "num_heads": heads,
        "feed_forward_proj": act,
        "n_positions": CONTEXT,
        "relative_attention_num_buckets": 32,
        "vocab_size": folder.config["vocab_size"],
        "pad_token_id": 1,
    }
    shapes: Shapes = {"shared.weight": (folder.config["vocab_size"], dim)}
    inner = ("wi_0", "wi_1") if act.startswith("gated") else ("wi",)
    for layer in range(layers):
        at = f"encoder.block.{layer}.layer."
        shapes |= {f"{at}0.SelfAttention.{name}.weight": (heads * width, dim) for name in "qkv"}
        shapes[f"{at}0.SelfAttention.o.weight"] = (dim, heads * width)
        if layer == 0:
            shapes[f"{at}0.SelfAttention.relative_attention_bias.weight"] = (32, heads)
        shapes |= {f"{at}1.DenseReluDense.{name}.weight": (ffn, dim) for name in inner}
        shapes[f"{at}1.DenseReluDense.wo.weight"] = (dim, ffn)
        shapes |= {f"{at}{i}.layer_norm.weight": (dim,) for i in (0, 1)}
    folder = _filled(folder, "", shapes | {"encoder.final_layer_norm.weight": (dim,)}, seed)
    for name, tensor in folder.tensors.items():
        if name.endswith("SelfAttention.q.weight"):  # scores are not divided by the width of heads
            folder.tensors[name] = tensor * np.float32(width**-0.5)
    return folder


def jina_v3(path: Path, seed: int, size: Size, base: float) -> Folder:
    """Make a folder of jina-embeddings-v3 as transformers has it, with the names of Jina's own class."""
    config = {
        "model_type": "jina_embeddings_v3",
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
    }
    folder, (dim, _, ffn, layers) = _bert(path, "JinaEmbeddingsV3Model", size, **config), size
    shapes = _rotated(folder.config["vocab_size"], dim)
    layer = linear_of({"mixer.Wqkv": (3 * dim, dim), "mixer.out_proj": (dim, dim)})
    layer |= (
        linear_of({"mlp.fc1": (ffn, dim), "mlp.fc2": (dim, ffn)}) | norm("norm1", dim) | norm("norm2", dim)
    )
    return _filled(folder, "roberta.", shapes | repeated("encoder.layers.{}.", layer, layers), seed)


def _rotated(vocab: int, dim: int) -> Shapes:
    shapes = _embeddings(vocab, dim, types=1, positions=0)
    return {name.replace("embeddings.LayerNorm", "emb_ln"): shape for name, shape in shapes.items()}


def nomic_moe(path: Path, seed: int, size: Size, experts: int, used: int, every: int = 2) -> Folder:
    """Make a folder of nomic-embed-text-v2-moe, with experts in some layers."""
    dim, heads, ffn, layers = size
    folder = model_folders.bert(path)
    folder.config = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "n_embd": dim,
        "n_head": heads,
        "n_inner": ffn,
        "n_layer": layers,
        "n_positions": CONTEXT,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu",
        "rotary_emb_base": 10000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "num_experts": experts,
        "moe_top_k": used,
        "moe_every_n_layers": every,
        "moe_normalize_expert_weights": False,
        "type_vocab_size": 1,
        "vocab_size": folder.config["vocab_size"],
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
        **dict.fromkeys(("causal", "prenorm", "expert_choice_router"), False),
    }
    shapes = _rotated(folder.config["vocab_size"], dim)
    for layer in range(layers):
        at = f"encoder.layers.{layer}."
        shapes |= linear_of({f"{at}attn.Wqkv": (3 * dim, dim), f"{at}attn.out_proj": (dim, dim)})
        shapes |= norm(f"{at}norm1", dim) | norm(f"{at}norm2", dim)
        if layer % every == 1:
            shapes |= {f"{at}mlp.experts.mlp.{name}": (experts * ffn, dim) for name in ("w1", "w2")}
            shapes |= {f"{at}mlp.experts.bias": (dim,), f"{at}mlp.router.layer.weight": (experts, dim)}
        else:
            shapes |= linear_of({f"{at}mlp.fc1": (ffn, dim), f"{at}mlp.fc2": (dim, ffn)})
    return _filled(folder, "", shapes, seed)


# Labels of OpenAI Privacy Filter with two kinds of parts.
PRIVACY_TAGS = ("O", *(f"{tag}-{label}" for label in ("private_person", "secret") for tag in "BIES"))


def privacy_filter(
    path: Path,
    seed: int,
    size: Size,
    kv_heads: int,
    width: int,
    experts: int,
    used: int,
    band: int = 128,
    rope: dict[str, Any] | None = None,
    biases: bool = True,
    head: str = "Model",
) -> Folder:
    """Make a folder of OpenAI Privacy Filter, whose body is that of gpt-oss with a window on both sides.

    Sinks and the limits of experts have effects: sinks are as large as scores, and some gates exceed 7.
    """
    dim, heads, ffn, layers = size
    path.mkdir(parents=True, exist_ok=True)
    model_folders.byte_level_tokenizer(path, pattern=GPT_4O_PATTERN)
    tokenizer = json.loads((path / "tokenizer.json").read_bytes())
    (path / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 256}
    config = {
        "architectures": [f"OpenAIPrivacyFilter{head}"],
        "model_type": "openai_privacy_filter",
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "head_dim": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "sliding_window": band,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "attention_bias": biases,
        "rope_parameters": {"rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, **yarn, **(rope or {})},
        "vocab_size": 304,
        "pad_token_id": 1,
        "eos_token_id": 1,
    }
    prefix = "" if head == "Model" else "model."
    shapes: Shapes = {"embed_tokens.weight": (304, dim), "norm.weight": (dim,)}
    rows = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    projections = {f"self_attn.{name}_proj": (n, dim) for name, n in rows.items()}
    projections["self_attn.o_proj"] = (dim, heads * width)
    layer = linear_of(projections, bias=biases) | linear_of({"mlp.router": (experts, dim)})
    layer |= {f"{name}_layernorm.weight": (dim,) for name in ("input", "post_attention")}
    layer["self_attn.sinks"] = (heads,)
    for name, inputs, outputs in (("gate_up", dim, 2 * ffn), ("down", ffn, dim)):
        layer[f"mlp.experts.{name}_proj"] = (experts, inputs, outputs)
        layer[f"mlp.experts.{name}_proj_bias"] = (experts, outputs)
    shapes |= repeated("layers.{}.", layer, layers)
    folder = _filled(Folder(path, config, {}), prefix, shapes, seed)
    sizes = {"sinks": 4.0, "gate_up_proj": 2.0, "gate_up_proj_bias": 4.0, "router.weight": 2.0}
    # As in trained models, layers add less to the stream than it has, and keys allow for the factor of YaRN.
    # Otherwise errors grow from layer to layer: without the next line, and with larger gates, computing in
    # float64 with operands of products that are rounded to half precision has an NMSE of 1.5e-5.
    sizes |= {"embed_tokens.weight": 8.0, "k_proj.weight": 0.5, "o_proj.weight": 0.7, "down_proj": 0.2}
    for name, tensor in folder.tensors.items():
        factor = next((factor for end, factor in sizes.items() if name.endswith(end)), 1.0)
        folder.tensors[name] = tensor * np.float32(factor)
    return folder


def private_parts(path: Path) -> Folder:
    """Make a folder of OpenAI Privacy Filter with its head."""
    folder = privacy_filter(path, 1, Size(64, 4, 32, 2), 2, 16, 8, 4, head="ForTokenClassification")
    return with_head(folder, linear_of({"score": (len(PRIVACY_TAGS), 64)}), PRIVACY_TAGS)


def with_head(folder: Folder, shapes: Shapes, labels: tuple[str, ...] = ("x",)) -> Folder:
    folder.config["id2label"] = {str(i): label for i, label in enumerate(labels)}
    rng = np.random.default_rng(9)
    folder.tensors |= {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    return folder


def pairs(path: Path, name: str) -> Folder:
    """Make a folder of `RECORDED` with a head that scores pairs."""
    folder = RECORDED[name](path, head="ForSequenceClassification")
    dim = folder.config["hidden_size"]
    folder.config |= {"max_position_embeddings": model_folders.CONTEXT, "max_relative_positions": CONTEXT}
    for tensor in folder.tensors:
        if tensor.endswith("position_embeddings.weight"):
            folder.tensors[tensor] = folder.tensors[tensor][: model_folders.CONTEXT]
    head = {"deberta": {"pooler.dense": (dim, dim)}, "electra": {"classifier.dense": (dim, dim)}}.get(
        name, {}
    )
    output = "classifier.out_proj" if name == "electra" else "classifier"
    return with_head(folder, linear_of({**head, output: (1, dim)}))


def tags(path: Path, labels: tuple[str, ...]) -> Folder:
    """Make a folder of DeBERTa with a head that labels tokens."""
    folder = RECORDED["deberta"](path, head="ForTokenClassification")
    return with_head(folder, linear_of({"classifier": (len(labels), folder.config["hidden_size"])}), labels)


def masked(path: Path) -> Folder:
    """Make a SPLADE folder of ALBERT, whose head is as narrow as its embedding."""
    folder = RECORDED["albert"](path, head="ForMaskedLM")
    dim, width = folder.config["hidden_size"], folder.config["embedding_size"]
    shapes = linear_of({"predictions.dense": (width, dim)}) | norm("predictions.LayerNorm", width)
    with_head(folder, {**shapes, "predictions.bias": (folder.config["vocab_size"],)})
    splade_modules(folder)
    return folder


PRIVACY_FILTERS: dict[str, Callable[..., Folder]] = {
    "privacy filter": partial(
        privacy_filter, seed=1, size=Size(64, 4, 32, 3), kv_heads=2, width=16, experts=8, used=4
    ),
    "privacy filter, odd": partial(
        privacy_filter,
        seed=2,
        size=Size(72, 6, 40, 2),
        kv_heads=3,
        width=20,
        experts=3,
        used=1,
        band=7,
        rope={"truncate": True, "attention_factor": 1.5},
        biases=False,
    ),
    "privacy filter, many experts": partial(
        privacy_filter,
        seed=3,
        size=Size(32, 7, 24, 2),
        kv_heads=1,
        width=32,
        experts=64,
        used=8,
        band=40,
        rope={"rope_type": "default"},
    ),
}
RECORDED: dict[str, Callable[..., Folder]] = {
    "albert": partial(albert, seed=1, size=Size(32, 4, 64, 3), embedding=16, act="gelu_new"),
    "albert, odd": partial(albert, seed=2, size=Size(72, 3, 88, 5), embedding=40, act="gelu"),
    "albert, wide": partial(albert, seed=3, size=Size(32, 2, 56, 2), embedding=48, act="relu"),
    "electra": partial(electra, seed=1, size=Size(64, 4, 96, 2), embedding=16),
    "electra, odd": partial(electra, seed=2, size=Size(72, 3, 40, 3), embedding=24),
    "t5": partial(t5, seed=1, size=Size(32, 3, 64, 2), width=16, act="relu"),
    "t5, gated": partial(t5, seed=2, size=Size(40, 5, 72, 3), width=8, act="gated-gelu"),
    "t5, odd": partial(t5, seed=3, size=Size(36, 2, 50, 2), width=20, act="gated-silu"),
    "deberta": partial(deberta, seed=1, size=Size(32, 4, 64, 2), buckets=16),
    "deberta, absolute": partial(deberta, seed=2, size=Size(72, 3, 88, 3), furthest=20, absolute=True),
    "deberta, far": partial(deberta, seed=3, size=Size(64, 1, 40, 2), buckets=64),
    "jina v3": partial(jina_v3, seed=1, size=Size(32, 4, 64, 2), base=20000.0),
    "jina v3, odd": partial(jina_v3, seed=2, size=Size(72, 3, 88, 3), base=500.0),
    "jina v3, one head": partial(jina_v3, seed=3, size=Size(64, 1, 56, 2), base=20000.0),
    **PRIVACY_FILTERS,
}
NOMIC_MOE: dict[str, Callable[[Path], Folder]] = {
    "nomic moe": partial(nomic_moe, seed=1, size=Size(32, 4, 64, 4), experts=8, used=2),
    "nomic moe, odd": partial(nomic_moe, seed=2, size=Size(72, 3, 88, 3), experts=5, used=3),
    "nomic moe, one of three": partial(
        nomic_moe, seed=3, size=Size(48, 2, 40, 5), experts=3, used=1, every=3
    ),
}
