"""Row of a model class of transformers: how it becomes an architecture of GGUF.

Names of tensors in the body of a model are those of `gguf.TensorNameMap`; rows add prefixes to remove and the
names of heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import gguf

from metal_prefill.conversion._folder import MAX_LAYERS, REQUIRED, Fields
from metal_prefill.conversion._weights import FloatArray, Weight
from metal_prefill.errors import UnsupportedModelError
from metal_prefill.files._architecture import ARCHITECTURES, MISSING_STEPS
from metal_prefill.files._metadata_keys import MAX_INT
from metal_prefill.files._task_config import DENSE

Task: TypeAlias = Literal["body", "causal", "sequence", "tokens", "late", "masked"]
Change: TypeAlias = Callable[[Fields, str, Weight], Weight]


class Key(NamedTuple):
    """A field of ``config.json``, under the first of several names that is present."""

    names: tuple[str, ...]
    # Used if the field is missing, unless the field is `REQUIRED`; 0 leaves the key out. The field has the
    # type of the default: numbers whose default is a float may have fractions, and others are integers.
    default: Any
    most: int  # largest integer


def stated(*names: str, default: float | str | bool = REQUIRED, most: int = MAX_INT) -> Key:
    """Return the key of a field under one of these names."""
    return Key(names, default, most)


def read_keys(config: Fields, keys: Mapping[str, Key]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    getters: dict[type, Callable[..., Any]] = {float: config.number, str: config.string, bool: config.boolean}
    for suffix, (names, default, most) in keys.items():
        if (get := getters.get(type(default))) is not None:
            found[suffix] = get(*names, default=default)
        elif default != 0 or any(map(config.has, names)):
            found[suffix] = config.integer(*names, default=default, most=most)
    return found


def head_width(key: Key) -> dict[str, Key]:
    """Return the width of keys and values, if both are that of a head."""
    return {"attention.key_length": key, "attention.value_length": key}


def never(*names: str) -> dict[str, tuple[bool]]:
    """Return fields that must be false or missing, for `Source.accepted`."""
    return dict.fromkeys(names, (False,))


More: TypeAlias = Callable[[Fields], Mapping[str, Any]] | Mapping[str, Key]
LAYERS = stated("num_hidden_layers", "n_layer", most=MAX_LAYERS)
SHAPE = {
    "embedding_length": stated("hidden_size", "n_embd"),
    "block_count": LAYERS,
    "feed_forward_length": stated("intermediate_size", "n_inner"),
    "attention.head_count": stated("num_attention_heads", "n_head"),
    "context_length": stated("max_position_embeddings", "n_positions"),
}
LAYER_NORM = {"attention.layer_norm_epsilon": stated("layer_norm_eps", "layer_norm_epsilon", default=1e-12)}
DECODER = {
    "attention.head_count_kv": stated("num_key_value_heads", default=0),
    "attention.layer_norm_rms_epsilon": stated("rms_norm_eps", default=1e-6),
    "rope.freq_base": stated("rope_theta", default=10000.0),
    **head_width(stated("head_dim", default=0)),
}

# Tensors without an effect on the results: positions that are counted, frequencies that are computed, the
# pooler of BERT's next-sentence task, and heads that predict masked tokens.
UNUSED = (
    r".*\bposition_ids",
    r".*\brotary_emb\.inv_freq",
    r"cls\.(predictions|seq_relationship)\..*",
    r"lm_head\..*",
    r"pooler\.dense\.(weight|bias)",
)
LARGER_EPSILON = {"attention.layer_norm_rms_epsilon": stated("rms_norm_eps", default=1e-5)}


def experts_of(count: int, used: int) -> dict[str, Key]:
    """Return the numbers of experts, with the defaults of a class."""
    return {
        "expert_count": stated("num_experts", "num_local_experts", default=count),
        "expert_used_count": stated("num_experts_per_tok", default=used),
    }


@dataclass(frozen=True)
class Source:
    """How a model class becomes a GGUF file."""

    architecture: str  # ``general.architecture`` of the file
    names_of: str = ""  # architecture with the names of `gguf.TensorNameMap`, where that has no own ones
    prefixes: tuple[str, ...] = ()  # prefixes of tensor names, of which the first that matches is removed
    added_prefix: str = ""  # prefix of the names of `gguf.TensorNameMap`, which the folder may lack
    keys: Mapping[str, Key] = field(default_factory=dict)  # metadata under the prefix of the architecture
    # Metadata that are the same for all models of the class.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Fields of the configuration without which a model has no biases of some layers, by a pattern of their
    # names in the GGUF file.
    biases: Mapping[str, str] = field(default_factory=dict)
    # Values of fields that the architecture implies; the first is the default.
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Names in a GGUF file of modules that `gguf.TensorNameMap` lacks, and of modules of heads by task.
    names: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Names of the tensors that one tensor of the folder contains, with equal numbers of rows, by its name.
    # All are names of modules within a layer.
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = UNUSED  # patterns of tensors that are omitted, unless they belong to a head
    # Functions of configuration, name in the GGUF file and tensor that return the tensor to write, by a
    # pattern of the name.
    changes: Mapping[str, Change] = field(default_factory=dict)
    more: tuple[More, ...] = ()  # more metadata: fields, and functions of the configuration
    # Function of the configuration that returns tensors that the folder does not contain.
    computed: Callable[[Fields], Mapping[str, FloatArray]] = lambda config: {}
    # Function of the configuration and the tensors of a folder by name that returns those to write, by the
    # same kind of names.
    combined: Callable[[Fields, Mapping[str, Weight]], Mapping[str, Weight]] = lambda config, weights: weights
    made: str = "(?!)"  # pattern of the names of tensors that `combined` adds, which are those in a GGUF file
    # Object of the configuration that describes the text model, if the class has other parts, too.
    text_part: str = ""
    frames: bool = True  # whether texts have the tokens that the tokenizer adds at their ends
    of_positions: Mapping[str, str] = field(default_factory=dict)  # families by `position_embedding_type`
    # Function of the configuration that returns the row for a folder that differs from others of its class.
    variant: Callable[[Fields], Source | None] = lambda config: None

    def metadata(self, config: Fields) -> dict[str, Any]:
        """Return the metadata of the architecture, without its prefix."""
        for name, accepted in self.accepted.items():
            config.require(name, accepted, accepted[0])
        is_causal = ARCHITECTURES[self.architecture].causal
        found: dict[str, Any] = ({} if is_causal else {"attention.causal": False}) | dict(self.constants)
        for part in (self.keys, *self.more):
            found |= part(config) if callable(part) else read_keys(config, part)
        return found

    def gguf_name(self, task: Task, names: gguf.TensorNameMap, name: str) -> str | None:
        """Return the name of a tensor in a GGUF file, or None for a tensor that is omitted."""
        if re.fullmatch(self.made, name):
            return name
        bare = next((name.removeprefix(start) for start in self.prefixes if name.startswith(start)), name)
        stem, _, suffix = bare.rpartition(".")
        suffix = {"gamma": "weight", "beta": "bias"}.get(suffix, suffix)
        own = self.heads.get(task, {}).get(stem, self.names.get(stem))
        if own is not None:
            return f"{own}.{suffix}"
        if any(re.fullmatch(pattern, bare) for pattern in self.unused):
            return None
        if suffix in _PARAMETERS:
            module, suffix = _PARAMETERS[suffix]
            stem = f"{stem}.{module}"
        if self.added_prefix and not bare.startswith(self.added_prefix):
            stem = self.added_prefix + stem
        whole: str | None = names.get_name(f"{stem}.{suffix}")  # of a parameter without a suffix
        if whole is not None:
            return whole
        found: str | None = names.get_name(stem)
        if found is None or suffix not in ("weight", "bias"):
            raise UnsupportedModelError(f"tensor {name} is not part of a {self.architecture} model")
        return f"{found}.{suffix}"

    def bidirectional(self) -> Source:
        """Return the row for a decoder whose tokens attend to later ones, and may be projected."""
        if self.architecture == "gemma3":
            return replace(self, architecture="gemma-embedding")
        return replace(
            self,
            architecture="llama-embed" if self.architecture == "llama" else self.architecture,
            constants={**self.constants, "attention.causal": False},
            heads={**self.heads, "body": {"linear": DENSE[0]}},
        )

    def states_bidirectional(self, config: Fields) -> bool:
        """Return whether a folder states that tokens attend to later ones, in fields not in `accepted`."""
        fields = {"use_bidirectional_attention": True, "is_causal": False}
        return any(
            config.boolean(name, default=not value) == value
            for name, value in fields.items()
            if name not in self.accepted
        )


# Parameters other than weights and biases: the modules and suffixes in `gguf.TensorNameMap`.
_PARAMETERS = {
    "dt_bias": ("dt_proj", "bias"),
    "layer_scalar": ("layer_scalar", "weight"),
    "expert_bias": ("expert_bias", "bias"),
}
# Suffixes of model classes, with the purpose of their heads.
_TASKS: dict[str, Task] = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "tokens",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForConditionalGeneration": "causal",
    "ForMaskedLM": "body",
    "ForPreTraining": "body",
    "TextModel": "body",
    "EncoderModel": "body",
    "Model": "body",
}
# Stanford's ColBERT: the name of its class, and families by the type of its body.
_COLBERT = "HF_ColBERT"
_BODIES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}
_BIDIRECTIONAL = "Bidirectional"  # ends the names of decoders whose tokens attend to later ones


def find_source(rows: Mapping[str, Source], config: Fields) -> tuple[Source, Task]:
    """Return the row for a folder's model class, and the task of its head."""
    classes = config.sequence("architectures")
    name = classes[0] if classes and isinstance(classes[0], str) else None
    if name is None:
        raise config.error("architectures must name the class of the model, such as BertModel")
    if name == _COLBERT:
        family = _BODIES[config.choice("model_type", known=_BODIES, default="")]
        return _row(rows, family, config), "late"
    match = re.fullmatch(rf"(.+?)({'|'.join(_TASKS)})", name)
    family = match[1].removesuffix(_BIDIRECTIONAL) if match else ""
    if family.lower() in MISSING_STEPS:
        raise config.unsupported(
            f"model class {name} is not supported; it needs {MISSING_STEPS[family.lower()]}"
        )
    if match is None or family not in rows:
        known = ", ".join((*rows, _COLBERT))
        raise config.unsupported(f"model class {name} is not supported; supported families are {known}")
    source, task = _row(rows, family, config), _TASKS[match[2]]
    if ARCHITECTURES[source.architecture].causal and (
        family != match[1] or source.states_bidirectional(config)
    ):
        source, task = source.bidirectional(), "body" if task == "causal" else task
    has_other_parts = match[2] == "ForConditionalGeneration"
    if task not in ("body", *source.heads) or (has_other_parts and not source.text_part):
        raise config.unsupported(f"the head of {name} is not supported")
    return source, task


def _row(rows: Mapping[str, Source], family: str, config: Fields) -> Source:
    """Return the row of a family, or of the one that a folder has in its place."""
    source = rows[family]
    positions = config.string("position_embedding_type", default="")
    source = rows[source.of_positions.get(positions, family)]
    return source.variant(config) or source
