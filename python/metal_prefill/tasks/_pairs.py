"""Pairs of texts that an encoder reads together, such as a query and a document."""

from typing import NamedTuple

import numpy as np

from metal_prefill.engine import Engine
from metal_prefill.errors import ContextOverflowError
from metal_prefill.tasks._embedding import check_length
from metal_prefill.tasks._prompts import PromptRules, errors_of
from metal_prefill.tasks._text_passes import Ids


def encode_part(engine: Engine, text: str, name: str, rules: PromptRules) -> list[int]:
    """Return the tokens of one text of a pair; `name` identifies it in errors."""
    with errors_of(name):
        parses = rules.parses(engine.tokenizer)
        return engine.tokenizer.encode(rules.normalized(text), add_bos=False, parse_special=parses)


class EncodedPair(NamedTuple):
    """Prompt of a pair of texts."""

    ids: Ids  # token ids
    # Whether each text lost its end.
    first_cut: bool = False
    second_cut: bool = False

    @property
    def cut(self) -> bool:
        """Whether a text lost its end."""
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
    ids = frame.pair(first[: lengths[0]], second[: lengths[1]]).ids
    check_length(engine, len(ids), name)
    return EncodedPair(np.array(ids, np.int32), lengths[0] < len(first), lengths[1] < len(second))


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
