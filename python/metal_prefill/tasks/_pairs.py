"""Pairs of texts that an encoder reads together, such as a query and a document."""

from __future__ import annotations

import numpy as np

from metal_prefill._engine import Engine
from metal_prefill.errors import ContextOverflowError
from metal_prefill.tasks._embedding import check_length
from metal_prefill.tasks._prompt_rules import PromptRules, errors_of
from metal_prefill.tasks._text_passes import Ids


def encode_part(engine: Engine, text: str, name: str, rules: PromptRules) -> list[int]:
    """Return the tokens of one text of a pair; `name` identifies it in errors."""
    with errors_of(name):
        return engine.tokenizer.encode(rules.normalized(text), add_bos=False)


def encode_pair(
    engine: Engine, first: list[int], second: list[int], name: str, rules: PromptRules
) -> tuple[Ids, bool]:
    """Return the tokens of a pair, and whether the second text lost its end.

    The tokens around the texts and the first text are kept. `name` identifies the pair in errors.
    """
    frame = engine.tokenizer.frame
    room = engine.max_context - len(first) - frame.pair_tokens
    cut = rules.truncate == "end" and len(second) > room
    if cut and room < 1:
        raise ContextOverflowError(
            f"{name}: the first text of the pair has {len(first)} tokens and leaves no room for the second "
            f"in the context of {engine.max_context}"
        )
    ids = frame.pair(first, second[:room] if cut else second).ids
    check_length(engine, len(ids), name)
    return np.array(ids, np.int32), cut
