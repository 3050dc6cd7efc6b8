"""Small folders of encoders with random weights and results recorded with transformers.

A folder is a configuration and the tensors that transformers saves for it, whose shapes are also recorded.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from support.comparison import random_texts
from support.folders import encoder_tokenizers, model_folders
from support.folders.model_folders import Folder, filled, shapes_of, values
from support.folders.tokenizer_folders import GPT_4O_PATTERN
from support.places import DATA

RECORD = DATA / "transformers_encoder_folders.npz"
CONTEXT = 330
LENGTHS = (1, 9, 300)  # of texts; the last exceeds pages and the distances that have separate buckets
# Texts whose vectors over the vocabulary are recorded.
TEXTS = ["a rose by any name", "", "would smell as sweet would smell as sweet"]
_WORDS, _PIECES = 1517, 1202  # tokens of the vocabularies
MASKED = ("albert", "distilbert", "gte")  # with a head that predicts masked tokens
Config = Mapping[str, Any]


texts = partial(random_texts, 300, 5, LENGTHS)  # without special tokens


def rows_of(states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    chosen = np.unique(np.linspace(0, len(states) - 1, min(len(states), 15)).astype(int))
    return states[chosen]


def _of(name: str, kind: str, dim: int, heads: int, ffn: int, layers: int, **settings: Any) -> Config:
    """Return the configuration of a class from its dimensions."""
    return {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": dim,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "max_position_embeddings": CONTEXT,
        "vocab_size": _WORDS,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "pad_token_id": 0,
        **settings,
    }


def _with_head(config: Config, task: str, labels: tuple[str, ...] = ("x",)) -> Config:
    """Return the configuration of a class with a head, and a context that texts of tests exceed."""
    name = config["architectures"][0].removesuffix("Model")
    short = {} if task == "MaskedLM" else {"max_position_embeddings": model_folders.CONTEXT}
    head = {"id2label": {str(i): label for i, label in enumerate(labels)}}
    return {**config, "architectures": [f"{name}For{task}"], **head, **short}


def _t5(dim: int, heads: int, ffn: int, layers: int, width: int, act: str) -> Config:
    return {
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
        "vocab_size": _PIECES,
        "pad_token_id": 1,
    }


_albert = partial(_of, "AlbertModel", "albert", num_hidden_groups=1)
_electra = partial(_of, "ElectraModel", "electra")
_bert = partial(_of, "BertModel", "bert")
# Without buckets every distance up to the maximum has a row.
_deberta = partial(
    _of,
    "DebertaV2Model",
    "deberta-v2",
    relative_attention=True,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type="p2c|c2p",
    position_biased_input=False,
    type_vocab_size=0,
    layer_norm_eps=1e-7,
)


def _jina_v3(*sizes: int, base: float) -> Config:
    rope = {"rope_type": "default", "rope_theta": base}
    usual: dict[str, Any] = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
    return _of("JinaEmbeddingsV3Model", "jina_embeddings_v3", *sizes, rope_parameters=rope, **usual)


def _gte(**rope: Any) -> Config:
    stated = {"rope_type": "default", "rope_theta": 500.0, **rope}
    usual = {"vocab_size": _PIECES, "type_vocab_size": 1, "pad_token_id": 1}
    return _of("GteModel", "gte", 32, 4, 64, 2, rope_parameters=stated, **usual)


_DISTILBERT = {
    "architectures": ["DistilBertModel"],
    "model_type": "distilbert",
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
    "max_position_embeddings": CONTEXT,
    "activation": "gelu",
    "vocab_size": _WORDS,
    "pad_token_id": 0,
}
# Labels of OpenAI Privacy Filter with two kinds of parts.
PRIVACY_TAGS = ("O", *(f"{tag}-{label}" for label in ("private_person", "secret") for tag in "BIES"))


def _privacy_filter(
    *sizes: int, kv_heads: int, width: int, experts: int, used: int, band: int = 128, **rope: Any
) -> Config:
    """Return a configuration of OpenAI Privacy Filter: gpt-oss with a bidirectional window."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 256}
    settings: dict[str, Any] = {
        "head_dim": width,
        "num_key_value_heads": kv_heads,
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "sliding_window": band,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "rope_parameters": {"rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, **yarn, **rope},
        "vocab_size": 304,
        "pad_token_id": 1,
        "eos_token_id": 1,
    }
    return _of("OpenAIPrivacyFilterModel", "openai_privacy_filter", *sizes, **settings)


PRIVACY_FILTERS: dict[str, Config] = {
    "privacy filter": _privacy_filter(64, 4, 32, 3, kv_heads=2, width=16, experts=8, used=4),
    "privacy filter, odd": {
        **_privacy_filter(
            *(72, 6, 40, 2),
            kv_heads=3,
            width=20,
            experts=3,
            used=1,
            band=7,
            truncate=True,
            attention_factor=1.5,
        ),
        "attention_bias": False,
    },
    "privacy filter, many experts": _privacy_filter(
        32, 7, 24, 2, kv_heads=1, width=32, experts=64, used=8, band=40, rope_type="default"
    ),
}
_STATES: dict[str, Config] = {
    "albert": _albert(32, 4, 64, 3, embedding_size=16, hidden_act="gelu_new"),
    "albert, odd": _albert(72, 3, 88, 5, embedding_size=40),
    "albert, wide": _albert(32, 2, 56, 2, embedding_size=48, hidden_act="relu"),
    "electra": _electra(64, 4, 96, 2, embedding_size=16),
    "electra, odd": _electra(72, 3, 40, 3, embedding_size=24),
    "t5": _t5(32, 3, 64, 2, width=16, act="relu"),
    "t5, gated": _t5(40, 5, 72, 3, width=8, act="gated-gelu"),
    "t5, odd": _t5(36, 2, 50, 2, width=20, act="gated-silu"),
    "deberta": _deberta(32, 4, 64, 2, position_buckets=16),
    "deberta, absolute": _deberta(
        *(72, 3, 88, 3),
        max_relative_positions=20,
        norm_rel_ebd="none",
        position_biased_input=True,
        type_vocab_size=2,
    ),
    "deberta, far": _deberta(64, 1, 40, 2, position_buckets=64),
    "jina v3": _jina_v3(32, 4, 64, 2, base=20000.0),
    "jina v3, odd": _jina_v3(72, 3, 88, 3, base=500.0),
    "jina v3, one head": _jina_v3(64, 1, 56, 2, base=20000.0),
    "mpnet": _of(
        *("MPNetModel", "mpnet", 32, 4, 64, 2),
        layer_norm_eps=1e-5,
        relative_attention_num_buckets=32,
        pad_token_id=1,
    ),
    "distilbert": _DISTILBERT,
    "gte": _gte(),
    # Equals the type ntk with a factor of 8 in Alibaba's own class (https://kexue.fm/archives/9706).
    "gte, longer": _gte(rope_type="linear", rope_theta=8 * 500.0, factor=8.0 ** (2 / 8)),
    **PRIVACY_FILTERS,
}
CONFIGS: dict[str, Config] = {
    **_STATES,
    "bert": _bert(32, 4, 64, 2),
    "bert, small": _bert(64, 2, 64, 1),
    **{f"bert, {width} columns": _bert(width, 2, 16, 1) for width in (8, 24, 40)},
    "deberta, 48 columns": _deberta(48, 4, 64, 2, position_buckets=16, max_relative_positions=64),
    "t5, two heads": _t5(32, 2, 64, 2, width=16, act="gated-gelu"),
    "albert, pairs": _with_head(_STATES["albert"], "SequenceClassification"),
    "electra, pairs": _with_head(_STATES["electra"], "SequenceClassification"),
    "deberta, pairs": {
        **_with_head(_STATES["deberta"], "SequenceClassification"),
        "max_relative_positions": CONTEXT,
    },
    "gte, pairs": _with_head(_STATES["gte"], "SequenceClassification"),
    "distilbert, classes": _with_head(_DISTILBERT, "SequenceClassification", ("NEGATIVE", "POSITIVE")),
    "deberta, tags": _with_head(
        _STATES["deberta"], "TokenClassification", ("B-PER", "O", "I-PER", "B-LOC", "I-LOC")
    ),
    "privacy filter, tags": _with_head(
        _privacy_filter(64, 4, 32, 2, kv_heads=2, width=16, experts=8, used=4),
        "TokenClassification",
        PRIVACY_TAGS,
    ),
    **{f"{name}, masked": _with_head(_STATES[name], "MaskedLM") for name in MASKED},
}
# Factors of tensors of OpenAI Privacy Filter. Sinks are as large as scores, and some gates exceed 7. As in
# trained models, layers add less than the stream's size, and keys compensate for the factor of YaRN.
# Otherwise errors grow from layer to layer: without these factors, and with larger gates, float64 with
# operands of products rounded to half precision has an NMSE of 1.5e-5.
_FACTORS = {
    "sinks": 4.0,
    "gate_up_proj": 2.6,
    "gate_up_proj_bias": 4.0,
    "router.weight": 2.6,
    "embed_tokens.weight": 10.0,
    "k_proj.weight": 0.65,
    "o_proj.weight": 0.9,
    "down_proj": 0.26,
}


def folder(path: Path, name: str, **config: Any) -> Folder:
    """Make a folder of one of `CONFIGS` with changed fields."""
    settings = {**deepcopy(dict(CONFIGS[name])), **config}
    path.mkdir(parents=True, exist_ok=True)
    factors: dict[str, float] = {}
    if name.startswith("privacy filter"):
        factors = _FACTORS
        model_folders.byte_level_tokenizer(path, pattern=GPT_4O_PATTERN)
        tokenizer = json.loads((path / "tokenizer.json").read_bytes())
        (path / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    elif name.startswith("t5"):  # scores are not divided by the width of heads
        factors = {"SelfAttention.q.weight": settings["d_kv"] ** -0.5}
    if not name.startswith("privacy filter"):
        encoder_tokenizers.write_recorded(path, "unigram" if settings["vocab_size"] == _PIECES else "uncased")
    made = Folder(path, settings, filled(shapes_of(name)))
    for tensor in made.tensors:
        made.tensors[tensor] *= next((f for end, f in factors.items() if tensor.endswith(end)), 1.0)
    return made


RECORDED: dict[str, Callable[..., Folder]] = {name: partial(folder, name=name) for name in _STATES}
private_parts = partial(folder, name="privacy filter, tags")


# Vectors over the vocabulary from the masked-token head.
_SPARSE = "sentence_transformers.sparse_encoder.models."


def masked(path: Path, name: str) -> Folder:
    """Make a SPLADE folder."""
    made = folder(path, f"{name}, masked")
    made.json("1_SpladePooling/config.json", {"pooling_strategy": "max", "activation_function": "relu"})
    return made.modules({"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}, _SPARSE)


distilbert_masked = partial(masked, name="distilbert")


def routed(path: Path) -> Folder:
    """Make a SPLADE folder whose query vectors are weights of the tokens."""
    made = distilbert_masked(path)
    query, pooling = "query_0_SparseStaticEmbedding", "document_1_SpladePooling"
    kinds = {query: "SparseStaticEmbedding", "": "MLMTransformer", pooling: "SpladePooling"}
    made.modules({"": "Router"})
    made.json(
        "router_config.json",
        {
            "types": {name: f"{_SPARSE}{kind}.{kind}" for name, kind in kinds.items()},
            "structure": {"query": [query], "document": ["", pooling]},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        },
    )
    made.json("config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    (path / "1_SpladePooling").rename(path / pooling)
    made.json(f"{query}/config.json", {"frozen": False})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(path / name, path / query / name)
    weights = np.abs(values((made.config["vocab_size"],), 11))
    save_file({"weight": np.where(weights > 0.02, weights, 0)}, path / query / "model.safetensors")
    return made
