"""Settings of a file for tasks: pooling, the heads after the last layer, prompts, and lengths of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

from metal_prefill.files._entity_head import ENTITY_TENSORS, EntityHead, check_floats, read_entity_head
from metal_prefill.files._gguf_file import SUPPORTED_TYPES, FloatArray, GGUFFile, dequantized
from metal_prefill.files._metadata_keys import (
    DEFAULT_PROMPT_KEY,
    ENTITY_KEYS,
    LABEL_ENCODER,
    LENGTH_KEYS,
    MAX_INT,
    POOLING_KEY,
    POOLS_PROMPT_KEY,
    PROMPT_KEYS,
    TRUNCATE_KEY,
    Keys,
)

# Poolings with a number in the file, and poolings to one vector, some of which need a key of this project.
NumberedPooling: TypeAlias = Literal["none", "mean", "cls", "last", "rank"]
TextPooling: TypeAlias = Literal["mean", "cls", "last", "max", "weighted_mean", "mean_sqrt_len"]
Pooling: TypeAlias = Literal[NumberedPooling, TextPooling]
NUMBERED_POOLINGS: tuple[NumberedPooling, ...] = get_args(NumberedPooling)
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
TEXT_POOLINGS: tuple[TextPooling, ...] = get_args(TextPooling)
HeadActivation: TypeAlias = Literal["tanh", "gelu", "gelu_erf", "relu"]
HEAD_ACTIVATIONS: tuple[HeadActivation, ...] = get_args(HeadActivation)
# Function that turns the outputs of a classification head into scores; "none" leaves a single one as it is.
Scores: TypeAlias = Literal["softmax", "sigmoid", "none"]
SCORES: tuple[Scores, ...] = get_args(Scores)

_Name = TypeVar("_Name", bound=str)

DENSE = ("dense_2", "dense_3")
# Steps from a pooled vector to an embedding, besides dense layers: a LayerNorm, division by its length, and,
# in pplx-embed, rounding of 127 times its hyperbolic tangents.
NORM, NORMALIZE, TANH_INT8 = "dense_norm", "normalize", "tanh_int8"
STEPS = (*DENSE, NORM, NORMALIZE, TANH_INT8)
# Activation of a dense layer, under its name with _activation.
DenseActivation: TypeAlias = Literal["none", "tanh", "gelu_erf", "relu", "silu", "sigmoid"]
DENSE_ACTIVATIONS: tuple[DenseActivation, ...] = get_args(DenseActivation)
# The classification head, and the masked-token head, whose output matrix may be the embedding.
CLASSIFIER, MASKED = (
    tuple(f"{head}.{part}{end}" for part in ("", "norm.", "output.") for end in ("weight", "bias"))
    for head in ("cls", "mlm")
)
# Weight of each token of a query, [vocab], in models for vectors over the vocabulary.
QUERY_WEIGHTS = "query_weights"
# Heads of bge-m3 that read the state of each token: its weight, and its vector for late interaction.
TOKEN_WEIGHTS, TOKEN_VECTORS = "sparse", "colbert"
# Reduction of the logits of a text's tokens to one vector over the vocabulary.
VocabularyPooling: TypeAlias = Literal["max", "sum"]
VOCABULARY_POOLINGS: tuple[VocabularyPooling, ...] = get_args(VocabularyPooling)
HEAD_TENSORS = frozenset(
    (
        *(
            f"{name}.{end}"
            for name in (*DENSE, NORM, TOKEN_WEIGHTS, TOKEN_VECTORS)
            for end in ("weight", "bias")
        ),
        *(*CLASSIFIER, *MASKED, QUERY_WEIGHTS, *ENTITY_TENSORS),
    )
)


class TransitionBiases(NamedTuple):
    """Terms that Viterbi decoding adds to the score of a sequence of tags, for each adjacent pair."""

    background_stay: float = 0.0  # from ``O`` to ``O``
    background_to_start: float = 0.0  # from ``O`` to the first tag of a part, ``B-`` or ``S-``
    # From ``B-`` or ``I-`` to ``I-`` and to ``E-`` of the same label.
    inside_to_continue: float = 0.0
    inside_to_end: float = 0.0
    # From the last tag of a part, ``E-`` or ``S-``, to ``O`` and to the first tag of another part.
    end_to_background: float = 0.0
    end_to_start: float = 0.0


TRANSITION_KEYS = "classifier.transition_bias."  # after the architecture, before the name of a bias


@dataclass(frozen=True)
class HeadTraits:
    """The classification head of an architecture, unless the file defines it."""

    # Hidden state that the head reads: the last token's, the first token's, or the mean of all.
    state: Pooling = "last"
    activation: HeadActivation = "tanh"  # activation after the dense layer of the head, if it has one
    one_score: Scores = "none"  # function of a single output


_ENCODER = HeadTraits("cls", one_score="sigmoid")  # scores of pairs as in sentence-transformers
HEADS: dict[str, HeadTraits] = {
    **dict.fromkeys(("bert", "deberta-v2", "eurobert", "gte", "nomic-bert", "t5encoder"), _ENCODER),
    **dict.fromkeys(("jina-bert-v2", "jina-bert-v3"), _ENCODER),
    "modern-bert": HeadTraits("mean", "gelu_erf", "sigmoid"),
}


@dataclass(frozen=True)
class PooledHead:
    """Validated pooling and heads of a file."""

    gguf: GGUFFile
    architecture: str
    pooling: Pooling | None  # that the file declares
    steps: tuple[str, ...]  # those of `STEPS` from a pooled vector to an embedding, in order
    activations: Mapping[str, DenseActivation]  # after each dense layer
    pools_prompt: bool  # whether pooling includes the tokens of a prompt
    # Labels of the classification head, which are numbers if the file has no names. Empty without a head.
    labels: tuple[str, ...]
    width: int  # length of an embedding
    dimensions: int  # number of first values of an embedding to keep unless the caller chooses
    state: Pooling  # of the hidden states that the classification head reads
    activation: HeadActivation  # after the dense layer of the classification head
    scores: Scores  # function that turns the outputs of the classification head into scores
    norm_eps: float  # added to the variance in the norms of heads
    # Pooling of logits to a vector over the vocabulary; None without a head for it. Then the activation of
    # its dense layer, and how often ``log(1 + x)`` is applied to positive logits before the pooling.
    vocabulary_pooling: VocabularyPooling | None
    vocabulary_activation: HeadActivation
    logarithms: int
    entities: EntityHead | None  # head that finds entities of labels that a call names
    transitions: TransitionBiases  # of the tags of tokens

    @property
    def per_token(self) -> bool:
        """Whether the dense layers apply to each token, as in models for late interaction."""
        return bool(self.steps) and self.pooling in (None, "none")

    @property
    def weighs_tokens(self) -> bool:
        """Whether a head computes the weight of each token."""
        return f"{TOKEN_WEIGHTS}.weight" in self.gguf.tensors

    @property
    def projects_tokens(self) -> bool:
        """Whether a head projects each token for late interaction, besides the vector of a text."""
        return f"{TOKEN_VECTORS}.weight" in self.gguf.tensors

    def matrix(self, name: str) -> FloatArray:
        """Return a tensor as float32, dequantized on first use."""
        return self.derived(name, lambda: dequantized(self.gguf, self.gguf.tensors[name]))

    def derived(self, name: str, make: Callable[[], FloatArray]) -> FloatArray:
        """Return an array that follows from tensors, made on first use."""
        matrices: dict[str, FloatArray] = self.__dict__.setdefault("_matrices", {})
        if name not in matrices:
            matrices[name] = make()
        return matrices[name]


def read_head(gguf: GGUFFile, architecture: str, dim: int) -> PooledHead:
    """Read and check the pooling and heads of a file.

    Raises GGUFError if a tensor that the metadata declares is missing, a shape contradicts the metadata, or
    the pooling requires a head that the file lacks; UnsupportedModelError if the pooling or the type of a
    tensor is not supported.
    """
    keys, metadata = Keys(gguf), gguf.metadata
    own = POOLING_KEY in metadata
    pooling = _one_of(keys, POOLING_KEY, POOLINGS, "") if own else _read_pooling(keys, "pooling_type")
    steps, width = _read_steps(keys, dim)
    prefix = keys.architecture
    activations = {
        name: _one_of(keys, f"{prefix}.{name}_activation", DENSE_ACTIVATIONS, "none") for name in DENSE
    }
    traits = HEADS.get(architecture, HeadTraits())
    labels = _read_labels(keys, dim)
    for name in (TOKEN_WEIGHTS, TOKEN_VECTORS):
        rows = _layer(keys, name, dim)
        if name == TOKEN_WEIGHTS and rows > 1:
            raise keys.error(f"tensor {name}.weight has {rows} rows, expected 1")
    state = _read_pooling(keys, "classifier.pooling_type") or traits.state
    if state in ("none", "rank"):
        raise keys.error(
            f"{prefix}.classifier.pooling_type is {state}, must be the pooling whose result the head reads"
        )
    scores = "softmax" if len(labels) > 1 else traits.one_score
    if pooling == "rank" and "cls.output.weight" not in gguf.tensors:
        raise keys.error(f"{architecture}.pooling_type is rank, but tensor cls.output.weight is missing")
    return PooledHead(
        gguf,
        architecture,
        pooling,
        steps,
        activations,
        metadata.typed(POOLS_PROMPT_KEY, "bool", default=True),
        labels,
        width,
        metadata.integer(TRUNCATE_KEY, 1, width, default=width),
        state,
        _one_of(keys, f"{prefix}.classifier.hidden_activation", HEAD_ACTIVATIONS, traits.activation),
        _one_of(keys, f"{prefix}.classifier.activation", SCORES, scores),
        keys.positive_float("attention.layer_norm_epsilon", default=1e-5),
        _read_vocabulary_pooling(keys, dim),
        _one_of(keys, f"{prefix}.vocabulary_activation", HEAD_ACTIVATIONS, "gelu_erf"),
        keys.positive("vocabulary_logarithms", default=1),
        _read_entities(keys, dim),
        TransitionBiases(
            *(keys.number(f"{TRANSITION_KEYS}{name}", default=0.0) for name in TransitionBiases._fields)
        ),
    )


def _read_entities(keys: Keys, dim: int) -> EntityHead | None:
    if (key := f"{ENTITY_KEYS}mode") not in keys.gguf.metadata:
        tensors = keys.gguf.tensors
        names = (n for n in tensors if n in ENTITY_TENSORS or n.startswith(LABEL_ENCODER))
        _check_needed(keys, names, key)
        return None
    entities = read_entity_head(keys, dim)
    if entities.label_tokens is None:
        labels = Keys(keys.gguf.inner(LABEL_ENCODER))
        width = read_head(labels.gguf, labels.architecture, labels.positive("embedding_length")).width
        if width != entities.width:
            raise keys.error(f"vectors of labels have {width} values, and those of words {entities.width}")
    return entities


def _read_vocabulary_pooling(keys: Keys, dim: int) -> VocabularyPooling | None:
    tensors, suffix = keys.gguf.tensors, "vocabulary_pooling"
    if not keys.has(suffix):
        _check_needed(keys, (*MASKED, QUERY_WEIGHTS), f"{keys.architecture}.{suffix}")
        return None
    missing = next((name for name in ("mlm.weight", "mlm.norm.weight") if name not in tensors), None)
    if missing is not None:
        raise keys.error(f"{keys.architecture}.{suffix} is set, but tensor {missing} is missing")
    vocabulary, width = _matrix_shape(keys, "token_embd.weight")
    for name, shape in (("mlm.weight", (width, dim)), ("mlm.output.weight", (vocabulary, width))):
        if name in tensors and _matrix_shape(keys, name) != shape:
            raise keys.error(f"tensor {name} has shape {tensors[name].shape}, expected {shape}")
    for name in ("mlm.bias", "mlm.norm.weight", "mlm.norm.bias"):
        _check_vector(keys, name, width)
    for name in ("mlm.output.bias", QUERY_WEIGHTS):
        _check_vector(keys, name, vocabulary)
    return _one_of(keys, f"{keys.architecture}.{suffix}", VOCABULARY_POOLINGS, "")


def _check_needed(keys: Keys, names: Iterable[str], needed: str) -> None:
    """Raise an error if a file has one of these tensors, but not the tensor that they require."""
    tensors = keys.gguf.tensors
    found = next((name for name in names if name in tensors), None)
    if found is not None and needed not in tensors:
        raise keys.error(f"tensor {found} requires {needed}, which is missing")


def _one_of(keys: Keys, key: str, known: Sequence[_Name], default: str) -> _Name:
    stated = keys.gguf.metadata.typed(key, "string", default=default)
    name = next((name for name in known if name == stated), None)
    if name is None:
        raise keys.unsupported(f"{key} {stated!r} is not supported; supported are {', '.join(known)}")
    return name


def _read_pooling(keys: Keys, suffix: str) -> Pooling | None:
    value = keys.number(suffix, default=-1)
    if value == -1:
        return None
    if value not in range(len(NUMBERED_POOLINGS)):
        known = ", ".join(f"{i} ({name})" for i, name in enumerate(NUMBERED_POOLINGS))
        raise keys.unsupported(
            f"{keys.architecture}.{suffix} {value} is not supported; supported are {known}"
        )
    return NUMBERED_POOLINGS[int(value)]


def _read_steps(keys: Keys, dim: int) -> tuple[tuple[str, ...], int]:
    """Return the steps from a pooled vector to an embedding, and its length."""
    dense = [name for name in DENSE if f"{name}.weight" in keys.gguf.tensors]
    key = f"{keys.architecture}.embedding_steps"
    stated = keys.gguf.metadata.get(key, dense)
    if not isinstance(stated, list) or not set(stated) <= set(STEPS):
        raise keys.unsupported(f"{key} is {stated!r}; supported are lists of {', '.join(STEPS)}")
    if len(set(stated) - {NORMALIZE}) < len([name for name in stated if name != NORMALIZE]):
        raise keys.error(f"{key} is {stated!r}, must name a layer once")
    for name in (*DENSE, NORM):
        _check_presence(keys, name, listed=name in stated)
    _check_needed(keys, [f"{DENSE[1]}.weight"], f"{DENSE[0]}.weight")
    width = dim
    for name in stated:
        if name in DENSE:
            rows = _layer(keys, name, width)
            for end, actual in (("out", rows), ("in", width)):
                declared = keys.positive(f"{name}_feat_{end}", default=actual)
                if declared != actual:
                    raise keys.error(
                        f"tensor {name}.weight has shape ({rows}, {width}), but {name}_feat_{end} is "
                        f"{declared}"
                    )
            width = rows
        elif name == NORM:
            for end in ("weight", "bias"):
                _check_vector(keys, f"{name}.{end}", width)
    return tuple(stated), width


def _check_presence(keys: Keys, name: str, *, listed: bool) -> None:
    """Raise an error if a layer's bias, declaration or place in the steps contradicts its presence."""
    tensors, architecture = keys.gguf.tensors, keys.architecture
    missing = f"{name}.weight" not in tensors
    declared = [keys.positive(f"{name}_feat_{end}", default=0) for end in ("out", "in")]
    if missing and any(declared):
        raise keys.error(
            f"{architecture}.{name}_feat_in and _out declare a layer of {declared[1]} to {declared[0]}, but "
            f"tensor {name}.weight is missing"
        )
    _check_needed(keys, [f"{name}.bias"], f"{name}.weight")
    if missing == listed:
        problem = "is missing" if missing else "is not listed"
        raise keys.error(f"tensor {name}.weight {problem}, unlike in {architecture}.embedding_steps")


def _layer(keys: Keys, name: str, width: int) -> int:
    """Return the number of outputs of a layer with `width` inputs; 0 if the file does not have it."""
    _check_needed(keys, [f"{name}.bias"], f"{name}.weight")
    if f"{name}.weight" not in keys.gguf.tensors:
        return 0
    rows, columns = _matrix_shape(keys, f"{name}.weight")
    if columns != width:
        raise keys.error(f"tensor {name}.weight has rows of {columns} values, its input has {width}")
    _check_vector(keys, f"{name}.bias", rows)
    return rows


def _read_labels(keys: Keys, dim: int) -> tuple[str, ...]:
    key = f"{keys.architecture}.classifier.output_labels"
    stated: list[str] = keys.gguf.metadata.typed(key, "array[string]", default=[])
    width = _layer(keys, "cls", dim) or dim
    for end in ("weight", "bias"):
        _check_vector(keys, f"cls.norm.{end}", width)
    _check_needed(keys, ["cls.norm.bias"], "cls.norm.weight")
    count = _layer(keys, "cls.output", width)
    if count == 0:
        _check_needed(keys, CLASSIFIER, "cls.output.weight")
        if stated:
            raise keys.error(f"{key} names {len(stated)} labels, but tensor cls.output.weight is missing")
        return ()
    if stated and len(stated) != count:
        raise keys.error(f"{key} names {len(stated)} labels, but cls.output.weight has {count} rows")
    return tuple(stated) if stated else tuple(map(str, range(count)))


def _matrix_shape(keys: Keys, name: str) -> tuple[int, int]:
    tensor = keys.gguf.tensors[name]
    if tensor.type not in SUPPORTED_TYPES:
        raise keys.unsupported(f"tensor {name} has type {tensor.type_name}")
    if len(tensor.shape) == 1:  # a head with one output
        return 1, tensor.shape[0]
    if len(tensor.shape) != 2:
        raise keys.error(f"tensor {name} has shape {tensor.shape}, expected a matrix")
    return tensor.shape[0], tensor.shape[1]


def _check_vector(keys: Keys, name: str, length: int) -> None:
    if name in keys.gguf.tensors:
        check_floats(keys, name, (length,))


class Prompts(NamedTuple):
    """Prompts of a file."""

    by_name: Mapping[str, str]
    default: str | None  # name of the prompt of texts without an instruction

    @classmethod
    def read(cls, gguf: GGUFFile) -> Prompts:
        """Read the prompts that a file states; raises GGUFError if one is not a string."""
        prompts = {
            key.removeprefix(PROMPT_KEYS): gguf.metadata.typed(key, "string")
            for key in gguf.metadata
            if key.startswith(PROMPT_KEYS)
        }
        default = gguf.metadata.get(DEFAULT_PROMPT_KEY)
        return cls(prompts, default if isinstance(default, str) else None)


class TextLengths(NamedTuple):
    """Maximum numbers of tokens of texts, including those at their ends; None if the context is the limit.

    sentence-transformers truncates texts to these lengths, which a converted folder sets.
    """

    text: int | None = None  # of a text that is neither a query nor a document
    # By default `text`.
    query: int | None = None
    document: int | None = None

    @classmethod
    def read(cls, gguf: GGUFFile) -> TextLengths:
        """Read the lengths that a file states; raise GGUFError if one is not a positive integer."""
        keys = (f"{LENGTH_KEYS}{name}" for name in cls._fields)
        return cls(*(gguf.metadata.integer(key, 1, MAX_INT, default=None) for key in keys))

    def longest(self, context: int) -> int:
        """Return the most tokens of any text in a context."""
        if self.text is None:
            return context
        return min(context, max(length for length in self if length is not None))
