"""The head of GLiNER (arXiv:2311.08526) in a file: layers that compare parts of a text with labels."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from metal_prefill.files._metadata_keys import ENTITY_KEYS, LABEL_ENCODER, MAX_INT, Keys

# Items compared with a label: each part of a text up to a number of words, or each word as the first, the
# last or any word of an entity.
EntityMode: TypeAlias = Literal["spans", "words"]
MODES: tuple[EntityMode, ...] = get_args(EntityMode)

PROJECTION = "entities.projection"
# Layers of the recurrence: of the input and of the previous state, in each direction.
DIRECTIONS = ("forward", "backward")
RECURRENCE = tuple(f"entities.{direction}.{part}" for direction in DIRECTIONS for part in ("input", "state"))
_LABEL, _START, _END, _SPAN, _SCORE = (
    tuple(f"entities.{name}.{i}" for i in range(2)) for name in ("label", "start", "end", "span", "score")
)
LAYERS: dict[EntityMode, tuple[str, ...]] = {
    "spans": (*_START, *_END, *_SPAN, *_LABEL),
    "words": ("entities.word", "entities.label", *_SCORE),
}
ENTITY_TENSORS = frozenset(
    f"{layer}.{end}"
    for layer in (PROJECTION, *RECURRENCE, *LAYERS["spans"], *LAYERS["words"])
    for end in ("weight", "bias")
)


@dataclass(frozen=True)
class EntityHead:
    mode: EntityMode
    width: int  # number of values of a word
    most_words: int  # maximum number of words of a text
    span_words: int  # maximum number of words of an entity with the mode ``"spans"``
    # Tokens before each label, and between the last one and the text; None if another encoder reads labels.
    label_tokens: tuple[int, int] | None
    # Whether the state of a label's first token represents it, rather than that of the token before it.
    reads_names: bool
    # Whether states are projected, and whether words have a recurrence.
    projected: bool
    recurrent: bool

    def layers(self) -> tuple[str, ...]:
        projection = (PROJECTION,) if self.projected else ()
        return (*projection, *(RECURRENCE if self.recurrent else ()), *LAYERS[self.mode])


def read_entity_head(keys: Keys, dim: int) -> EntityHead:
    """Read and check the head of a file that has one."""
    tensors, metadata = keys.gguf.tensors, keys.gguf.metadata
    key = f"{ENTITY_KEYS}mode"
    mode = next((known for known in MODES if known == metadata[key]), None)
    if mode is None:
        raise keys.unsupported(f"{key} is {metadata[key]!r}; supported: {', '.join(MODES)}")
    projection, table = (tensors.get(f"{name}.weight") for name in (PROJECTION, "token_embd"))
    last = (MAX_INT if table is None else table.shape[0]) - 1
    separate = any(name.startswith(LABEL_ENCODER) for name in tensors)

    def token(name: str) -> int:
        return int(metadata.integer(f"{ENTITY_KEYS}{name}", 0, last))

    head = EntityHead(
        mode,
        dim if projection is None else projection.shape[0],
        metadata.integer(f"{ENTITY_KEYS}most_words", 1, MAX_INT),
        metadata.integer(f"{ENTITY_KEYS}span_words", 1, MAX_INT) if mode == "spans" else 0,
        None if separate else (token("label_token"), token("separator")),
        bool(metadata.get(f"{ENTITY_KEYS}reads_names", False)),
        projection is not None,
        f"{RECURRENCE[0]}.weight" in tensors,
    )
    for name, shape in _shapes(head, dim):
        check_floats(keys, name, shape)
    return head


def check_floats(keys: Keys, name: str, shape: tuple[int, ...]) -> None:
    """Raise an error unless a file has a tensor of float32 of a shape."""
    tensor = keys.gguf.tensors.get(name)
    if tensor is None:
        raise keys.error(f"tensor {name} is missing")
    if tensor.shape != shape or tensor.type_name != "F32":
        raise keys.error(
            f"tensor {name} has shape {tensor.shape} and type {tensor.type_name}, expected {shape} and F32"
        )


def _shapes(head: EntityHead, dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = head.width
    sizes = {
        PROJECTION: (width, dim),
        "entities.word": (2 * width, width),
        "entities.label": (2 * width, width),
    }
    for name in RECURRENCE:
        sizes[name] = (2 * width, width if name.endswith("input") else width // 2)
    for first, last in (_START, _END, _LABEL):
        sizes |= {first: (4 * width, width), last: (width, 4 * width)}
    sizes |= {_SPAN[0]: (4 * width, 2 * width), _SPAN[1]: (width, 4 * width)}
    sizes |= {_SCORE[0]: (4 * width, 3 * width), _SCORE[1]: (3, 4 * width)}
    for name in head.layers():
        yield f"{name}.weight", sizes[name]
        yield f"{name}.bias", sizes[name][:1]
