"""Vectors of texts, as defined by the file and the card of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

import numpy as np

from metal_prefill import _core
from metal_prefill._support.arguments import Progress, integer, items_of, one_of
from metal_prefill.engine import Engine, EngineOwner
from metal_prefill.errors import ContextOverflowError, KVMemoryError
from metal_prefill.files._gguf_file import FloatArray
from metal_prefill.files._task_config import POOLINGS, Pooling, TextPooling
from metal_prefill.tasks._pooled_head import embedding_of
from metal_prefill.tasks._prompts import (
    PromptRules,
    TextRole,
    cut_notes,
    named,
    numbered,
    role_of,
    shortened,
    text_role,
    unpooled_tokens,
    warn,
)
from metal_prefill.tasks._text_passes import TEXT, Block, Ids, NameOf, TextPasses, finite, pooled_blocks

DEFAULT_RULES = PromptRules()
_CUT_THERE = "where sentence-transformers cuts texts of this model"
_NO_TOKENS = (b"", 0)  # a prompt and its expansion


def checked_texts(texts: Iterable[str], noun: str = "text") -> list[str]:
    """Copy the texts of an argument; raises TypeError if an item is not a string."""
    checked = items_of(f"{noun}s", texts)
    for i, text in enumerate(checked):
        if not isinstance(text, str):
            raise TypeError(f"{noun} {i} must be a string, got {type(text).__name__}")
    return checked


class EncodedText(NamedTuple):
    ids: list[int]  # token ids
    cut: bool = False  # whether the text lost its end
    expansion: int = 0  # number of last tokens that expand a query


class EncodedTexts(NamedTuple):
    role: TextRole
    prompts: list[Ids]  # token ids of each text
    cut: list[int]  # indices of texts that lost their ends
    expansions: list[int]  # number of last tokens of each text that expand a query
    unpooled: int = 0  # number of first tokens of each text that pooling omits

    @property
    def empty(self) -> list[int]:
        """Indices of texts without tokens."""
        return [i for i, ids in enumerate(self.prompts) if not len(ids)]

    def part(self, indices: Iterable[int]) -> EncodedTexts:
        """Return some of the texts, without notes about them."""
        chosen = list(indices)
        prompts, expansions = [self.prompts[i] for i in chosen], [self.expansions[i] for i in chosen]
        return EncodedTexts(self.role, prompts, [], expansions, self.unpooled)

    def notes(self) -> list[str]:
        """Return a message for each of `cut` and `empty` that names texts."""
        notes = cut_notes(self.cut, len(self.prompts), self.role.limit)
        if empty := self.empty:
            notes.append(
                f"{len(empty)} of {len(self.prompts)} texts have no tokens, and vectors of zeros: "
                f"{named(empty, 'text')}"
            )
        return notes


def encode_texts(
    engine: Engine,
    texts: Iterable[str],
    role: TextRole | None = None,
    rules: PromptRules = DEFAULT_RULES,
    noun: str = "text",
) -> EncodedTexts:
    """Turn texts into tokens, with those that begin and end texts in the file.

    `noun` names texts in errors, which have the index of the text.
    """
    checked = checked_texts(texts, noun)
    role = text_role(engine) if role is None else role
    frame = engine.tokenizer.frame
    begin, end = (frame.begin, frame.end) if role.framed else ((), ())
    room = _most_tokens(engine, role) - len(begin) - len(end)
    encoded: list[Sequence[int]] = []
    cut, expansions = list[int](), list[int]()
    made = numbered(role.form.tokens_of_all(engine.tokenizer, checked, rules), noun)
    for i, (text, ids) in enumerate(zip(checked, made, strict=True)):
        if len(ids) <= room:
            encoded.append((*begin, *ids, *end))
            expansions.append(0)
            continue
        found = encode_tokens(engine, ids, text, f"{noun} {i}", role, rules)
        encoded.append(found.ids)
        expansions.append(found.expansion)
        cut += [i] if found.cut else []
    # They share an array, which is faster than one for each.
    ends = list(accumulate(map(len, encoded)))
    tokens = np.fromiter(chain.from_iterable(encoded), np.int32, ends[-1] if ends else 0)
    prompts = [tokens[end - len(ids) : end] for ids, end in zip(encoded, ends, strict=True)]
    return EncodedTexts(role, prompts, cut, expansions, unpooled_tokens(engine, role.form))


def _most_tokens(engine: Engine, role: TextRole) -> int:
    """Return the number of tokens up to which texts need no check or expansion; -1 if all need one."""
    if role.expansion is not None:
        return -1
    try:
        engine.core.check_fits(role.limit)
    except KVMemoryError:
        return -1
    return role.limit


def encode_tokens(
    engine: Engine, ids: list[int], text: str, name: str, role: TextRole, rules: PromptRules = DEFAULT_RULES
) -> EncodedText:
    """Return the prompt of a text, given its tokens without those that begin and end texts.

    If the text loses its end, the tokens after it are kept. `name` identifies the text in errors.
    """
    tokenizer = engine.tokenizer
    begin, end = (tokenizer.frame.begin, tokenizer.frame.end) if role.framed else ((), ())
    room = role.limit - len(begin) - len(end)

    def encode(text: str) -> list[int]:
        return role.form.tokens(tokenizer, text, rules)

    cut = rules.truncate == "end" and len(ids) > room
    if cut and role.form.after:
        ids = encode(shortened(tokenizer, text, lambda kept: len(encode(kept)) - room))
    elif cut:
        ids = ids[: max(room, 0)]
    prompt = [*begin, *ids, *end]
    if role.limit < engine.max_context and len(prompt) > role.limit:
        raise ContextOverflowError(
            f"{name}: {len(prompt)} tokens exceed the {role.limit} of this model's {role.plural}; "
            "truncate='end' removes the rest"
        )
    added = 0 if role.expansion is None else role.expansion.added(len(prompt))
    check_length(engine, len(prompt) + added, name)  # before a file's length takes memory
    if role.expansion is not None:
        prompt += added * [role.expansion.token]
    return EncodedText(prompt, cut, added)


def check_length(engine: Engine, tokens: int, name: str) -> None:
    """Raise ContextOverflowError or KVMemoryError if tokens do not fit, even alone."""
    if tokens > engine.max_context:
        stated = engine.lengths.text is not None
        raise ContextOverflowError(
            f"{name}: {tokens} tokens exceed the context of {engine.max_context}"
            + f", {_CUT_THERE}; max_context={engine.config.context_length} allows more" * stated
        )
    try:
        engine.core.check_fits(tokens)
    except KVMemoryError as error:
        raise KVMemoryError(f"{name}: {error}") from None


def check_pooling(engine: Engine, pooling: str | None) -> Pooling:
    """Return the pooling to use; see :meth:`metal_prefill.Model.embed`."""
    stated = engine.head.pooling
    if pooling is None:
        if stated is None:
            raise ValueError(
                f"{engine.name} sets no pooling ({engine.config.architecture}.pooling_type): "
                "set `pooling`, such as 'mean' or 'last', as the model's card requires"
            )
        pooling = stated
    kind: Pooling = one_of("pooling", pooling, POOLINGS)
    if pooling == "rank":
        raise ValueError("pooling 'rank' gives scores of pairs of texts: use `rerank`, or `classify`")
    if pooling == "cls" and engine.config.causal:
        raise ValueError(
            f"pooling 'cls' takes the first token, which sees no other one in {engine.name}: "
            "its attention is causal"
        )
    return kind


def vector_width(engine: Engine, pooling: Pooling, dimensions: int | None) -> int:
    """Return the number of values of a vector; raises ValueError if it has fewer than `dimensions`."""
    head = engine.head
    width = head.width if pooling != "none" or head.per_token else engine.config.dim
    if dimensions is None:
        return width if pooling == "none" else head.dimensions
    return integer("dimensions", dimensions, 1, width)


def embed(
    model: EngineOwner,
    texts: Iterable[str],
    *,
    normalize: bool = True,
    dimensions: int | None = None,
    pooling: Literal["none"] | TextPooling | None = None,
    instruction: str | None = None,
    truncate: Literal["error", "end"] | str = "error",
    unicode: Literal["NFC"] | None = None,
    split_special_tokens: bool | None = None,
    progress: Progress | None = None,
) -> Any:
    """Compute embeddings: vectors whose inner products measure the similarity of texts.

    Texts are computed in batches, equal ones once. The vector of a text does not depend on the other
    texts, on the CPU bit for bit. The default session does not change.

    Parameters
    ----------
    texts
        Any number of texts: a list, a generator, an array or a column of a table. The tokenizer of the file
        adds tokens at their ends.
    normalize
        Divide vectors by their Euclidean norm.
    dimensions
        Number of first values to keep, as models trained with Matryoshka losses allow. Vectors are
        normalized afterwards.
    pooling
        Reduction of a text's hidden states to one vector; None selects that of the file
        (``{arch}.pooling_type``). ``"last"`` and ``"cls"`` select the state of the last and of the first
        token, ``"mean"`` computes the mean of all, ``"none"`` returns all of them, after the projection
        of a model for late interaction. ``"max"`` keeps the largest of each value, ``"weighted_mean"``
        weights tokens by their positions, from 1, and ``"mean_sqrt_len"`` divides the sum by the root of
        the number of tokens.
    instruction
        Prompt of each text. None selects the default prompt of the file; most files have none.

        ``"query"`` and ``"document"`` (or ``"passage"``) select prompts of the file, which conversion
        takes from the model's folder, or those of the model's card, if they are in ``tasks.PROMPTS``.
        Other names of the file or card, such as ``"clustering"``, work in the same way. With pooling
        ``"none"``, ``"query"`` also expands queries if the model requires it (ColBERT).

        A string that contains ``{text}`` is a template. Any other string is a description of the task. It
        is inserted into the template that the model's card has for tasks, and otherwise added before each
        text.
    truncate
        ``"error"``: a text longer than the context is an error. ``"end"``: its end is cut off, except
        for the end-of-text token and the part of the instruction after the text, and a ``UserWarning``
        counts and names such texts.
    unicode
        ``"NFC"``: normalize texts first, as transformers does for ``qwen2`` and ``qwen3``. None does not,
        like llama.cpp.
    split_special_tokens
        Encode the spelling of a special token in a text, such as ``[SEP]``, as text. None does so for
        generative models only; encoders recognize special tokens, as in transformers. Set it for texts of
        others, which may otherwise end a part of a text or hide words from the model.
    progress
        Called with the number of distinct texts done and their total.

    Returns
    -------
    numpy.ndarray
        float32 ``[texts, dimensions]``; with pooling ``"none"``, a list of arrays ``[tokens,
        dimensions]``. The vector of a text without tokens is zero; a ``UserWarning`` names such texts.

    Raises
    ------
    TypeError, ValueError
        A text is not a string, or has lone surrogates; the message has its index. Or neither the file nor
        the call sets a pooling, or the two contradict each other.
    ContextOverflowError
        A text has more tokens than the context; the message has its index. Nothing was computed.
    NumericalError, DeviceError, KVMemoryError
        Computing a text failed; the message has its index.
    """
    engine, rules = model.engine, PromptRules(truncate, unicode, split_special_tokens).checked()
    encoded = encode_texts(engine, texts, role_of(engine, check_pooling(engine, pooling), instruction), rules)
    warn(encoded.notes())
    return embed_encoded(
        TextPasses(engine),
        encoded,
        normalize=normalize,
        dimensions=dimensions,
        pooling=pooling,
        progress=progress,
    )


def embed_encoded(
    passes: TextPasses,
    encoded: EncodedTexts,
    *,
    normalize: bool = True,
    dimensions: int | None = None,
    pooling: str | None = None,
    progress: Progress | None = None,
) -> Any:
    """Turn texts that `encode_texts` made into vectors, which are 0 for texts without tokens."""
    prompts, skipped = encoded.prompts, encoded.role.skipped
    kind = check_pooling(passes.engine, pooling)
    width = dimensions = vector_width(passes.engine, kind, dimensions)

    # Texts that are the same are computed once.
    rows: dict[tuple[bytes, int], int] = {}
    keys = [(ids.tobytes(), n) for ids, n in zip(prompts, encoded.expansions, strict=True)]
    distinct: list[int] = []
    for i, key in enumerate(keys):
        if key not in rows and key != _NO_TOKENS:
            rows[key] = len(distinct)
            distinct.append(i)
    blocks = vector_blocks(
        passes,
        kind,
        [prompts[i] for i in distinct],
        [encoded.expansions[i] for i in distinct],
        normalize=normalize,
        dimensions=dimensions,
        unpooled=encoded.unpooled,
        name_of=lambda i: f"text {distinct[i]}",
    )
    # The row for texts without tokens follows the others and stays 0.
    vectors = np.zeros((0 if kind == "none" else len(prompts), width), np.float32)
    states: list[FloatArray] = []
    done = 0
    for block in blocks:
        first, done = done, done + len(block)
        if kind == "none":
            ids = (prompts[i] for i in distinct[first:done])
            states += [v[~np.isin(i, skipped)] for i, v in zip(ids, block, strict=True)] if skipped else block
        else:
            vectors[first:done] = block
        if progress is not None:
            for i in range(first, done):
                progress(i + 1, len(distinct))
    if kind == "none":
        states.append(vectors)
        return [states[rows.get(key, -1)].copy() for key in keys]
    return vectors if done == len(prompts) else vectors[[rows.get(key, done) for key in keys]]


def vector_blocks(
    passes: TextPasses,
    pooling: Pooling,
    prompts: Sequence[Ids],
    expansions: Sequence[int] = (),
    *,
    normalize: bool = True,
    dimensions: int | None = None,
    unpooled: int = 0,
    name_of: NameOf = TEXT,
) -> Iterator[Block]:
    """Yield the vectors of the prompts of each pass, or with pooling "none" those of all tokens of each.

    For `expansions`, `unpooled` and `name_of` see `pooled_blocks`.
    """
    head = passes.engine.head
    for block in pooled_blocks(passes, pooling, prompts, expansions, unpooled=unpooled, name_of=name_of):
        if head.steps and (pooling != "none" or head.per_token):
            block = [embedding_of(head, states) for states in block]
        if pooling != "none":
            block = finite(np.asarray(block), "a number of a vector")[:, :dimensions]
            yield _normalized(block) if normalize else block  # rows do not depend on each other
        else:
            block = [finite(vectors, "a number of a vector")[:, :dimensions] for vectors in block]
            yield list(map(_normalized, block)) if normalize else block


def _normalized(vectors: FloatArray) -> FloatArray:
    """Divide vectors by their lengths, in place if they are contiguous; those of length 0 stay."""
    vectors = np.ascontiguousarray(vectors)
    _core.normalize(vectors)
    return vectors
