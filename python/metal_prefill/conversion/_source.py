"""Row of a model class of transformers: how it becomes an architecture of GGUF."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from metal_prefill.conversion._fields import MAX_LAYERS, Fields
from metal_prefill.conversion._settings import Values
from metal_prefill.conversion._weights import Weight
from metal_prefill.files._metadata_keys import MAX_INT

Task: TypeAlias = Literal["body", "causal", "sequence", "tokens", "late", "masked"]
Change: TypeAlias = Callable[[Fields, str, Weight], Weight]
Shape: TypeAlias = tuple[int, ...]
Combined: TypeAlias = Callable[[Fields, Mapping[str, Weight]], Mapping[str, Weight]]


class Key(NamedTuple):
    """A number in ``config.json``, under the first of several names that is present."""

    names: tuple[str, ...]
    # Used if the field is missing; None requires the field, and 0 leaves the key out. Numbers whose default
    # is a float may have fractions.
    default: float | None
    most: int  # largest integer


def stated(*names: str, default: float | None = None, most: int = MAX_INT) -> Key:
    """Return the key of a number under one of these names."""
    return Key(names, default, most)


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
    "attention.key_length": stated("head_dim", default=0),
    "attention.value_length": stated("head_dim", default=0),
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
    prefixes: tuple[str, ...] = ()  # beginnings of tensor names, of which the first that matches is removed
    added_prefix: str = ""  # beginning of the names of `gguf.TensorNameMap`, which the folder may lack
    keys: Mapping[str, Key] = field(default_factory=dict)  # metadata under the prefix of the architecture
    # Metadata that are the same for all models of the class.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Fields of the configuration without which a model has no biases of some layers, by a pattern of their
    # names in the GGUF file.
    biases: Mapping[str, str] = field(default_factory=dict)
    # Values of fields that the architecture implies; the first is the default.
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Names in a GGUF file of the tensors of a head, by task.
    heads: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Names of the tensors that one tensor of the folder contains, with equal numbers of rows, by its name.
    # All are names of modules within a layer.
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = UNUSED  # patterns of tensors that are left out, unless they belong to a head
    # Functions of configuration, name in the GGUF file and tensor that return the tensor to write, by a
    # pattern of the name.
    changes: Mapping[str, Change] = field(default_factory=dict)
    # Functions of configuration, name in the GGUF file and shape that return the shape to write, by a pattern
    # of the name.
    shapes: Mapping[str, Callable[[Fields, str, Shape], Shape]] = field(default_factory=dict)
    # Function of the configuration that returns more metadata.
    more: Callable[[Fields], Mapping[str, Any]] = lambda config: {}
    # Function of the configuration that returns tensors that the folder does not contain.
    computed: Callable[[Fields], Mapping[str, Values]] = lambda config: {}
    # Function of the configuration and the tensors of a folder by name that returns those to write, by the
    # same kind of names.
    combined: Combined = lambda config, weights: weights
    made: str = "(?!)"  # pattern of the names of tensors that `combined` adds, which are those in a GGUF file
    position_offset: bool = False  # whether positions start after the id of the padding token
    # Object of the configuration that describes the text model, if the class has other parts, too.
    text_part: str = ""
    frames: bool = True  # whether texts have the tokens that the tokenizer adds at their ends
