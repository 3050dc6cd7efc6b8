"""Texts that go through a model together: pairs of an encoder, and texts with their continuations."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.engine import Engine
from metal_prefill.errors import ContextOverflowError
from metal_prefill.tasks._embedding import check_length
from metal_prefill.tasks._prompts import PromptRules
from metal_prefill.tasks._text_passes import Ids, NameOf, TextPasses


class EncodedPair(NamedTuple):
    ids: Ids  # token ids
    segment: int  # number of tokens of type 0: those before the second text, if there are two
    # Whether each text lost its end.
    first_cut: bool = False
    second_cut: bool = False

    @property
    def cut(self) -> bool:
        return self.first_cut or self.second_cut


def encode_pair(
    engine: Engine, first: list[int], second: list[int], name: str, rules: PromptRules
) -> EncodedPair:
    """Return the tokens of a pair; `name` identifies it in errors.

    If it is truncated, the tokens around the texts are kept.
    """
    frame = engine.tokenizer.frame
    lengths = (len(first), len(second))
    if rules.truncate == "end":
        room = engine.max_context - frame.pair_tokens
        if sum(lengths) > room and room < len(lengths):
            raise ContextOverflowError(
                f"{name}: the context of {engine.max_context} has no room for two texts and the "
                f"{frame.pair_tokens} tokens around them"
            )
        lengths = kept_lengths(*lengths, room)
    ids, types = frame.pair(first[: lengths[0]], second[: lengths[1]])
    check_length(engine, len(ids), name)
    cut = lengths[0] < len(first), lengths[1] < len(second)
    return EncodedPair(np.array(ids, np.int32), types.count(0), *cut)


def kept_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept: the longer one loses its end first.

    As in transformers with ``truncation="longest_first"``, which is the rule of cross-encoders of
    sentence-transformers: once both texts have the same length, each loses half of the rest.
    """
    if first + second <= room:
        return first, second
    half = room // 2
    if min(first, second) > half:  # of two texts, the longer one has the odd token, or else the second
        return (half + room % 2, half) if first > second else (half, half + room % 2)
    return (first, room - first) if first <= second else (room - second, second)


def encode_continuation(
    engine: Engine, context: str, continuation: str, encode: Callable[[str], list[int]]
) -> tuple[Ids, Ids]:
    """Return the tokens of a text and of its continuation, which are encoded together and then divided.

    Spaces at the end of the text become part of the continuation, to whose first token they belong. A text
    without tokens becomes the token that begins texts, or the one that ends them.
    """
    tokenizer = engine.tokenizer
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    before = encode(context)
    whole = encode(context + continuation)
    if not before:
        start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if start is None:
            raise ValueError("there is no token before it")
        before, whole = [start], [start, *whole]
    after = whole[len(before) :]
    if not after:
        raise ValueError("it has no tokens")
    return np.array(whole[: len(before)], np.int32), np.array(after, np.int32)


def score_continuations(
    passes: TextPasses, pairs: Sequence[tuple[Ids, Ids]], name_of: NameOf
) -> list[npt.NDArray[np.float32]]:
    """Return the log probability of each token of each continuation, given its context.

    Prefixes that contexts share are computed once. The head is computed only for the rows whose next token
    belongs to a continuation.
    """
    scratch = passes.scratch()
    requests = [_core.Request.log_probs(scratch, np.concatenate(pair), rows=len(pair[1])) for pair in pairs]
    return passes.compute(requests, name_of)
