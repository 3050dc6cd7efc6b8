"""Log probabilities of texts that continue others, such as labels and answers."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.engine import Engine
from metal_prefill.tasks._text_passes import Ids, TextPasses


def encode_continuation(
    engine: Engine, context: str, continuation: str, encode: Callable[[str], list[int]] | None = None
) -> tuple[Ids, Ids]:
    """Return the tokens of a text and of its continuation, which are encoded together and then divided.

    Spaces at the end of the text become part of the continuation, to whose first token they belong. A text
    without tokens becomes the token that begins texts, or the one that ends them.
    """
    tokenizer = engine.tokenizer
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    encode = tokenizer.encode if encode is None else encode
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
    passes: TextPasses, pairs: Sequence[tuple[Ids, Ids]], names: Sequence[str]
) -> list[npt.NDArray[np.float32]]:
    """Return the log probability of each token of each continuation, given its context.

    Prefixes that contexts share are computed once. The head is computed only for the rows whose next token
    belongs to a continuation.
    """
    scratch = passes.scratch()
    requests = [_core.Request.log_probs(scratch, np.concatenate(pair), rows=len(pair[1])) for pair in pairs]
    return passes.compute(requests, names)
