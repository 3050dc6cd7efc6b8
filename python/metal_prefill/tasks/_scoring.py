"""Batches of prompts, whose common prefixes are computed once."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import (
    Logits,
    Progress,
    TokenIds,
    check_prompt_options,
    integer,
    length_of,
    one_of,
    token_array,
)
from metal_prefill.engine import EngineOwner
from metal_prefill.errors import ContextOverflowError
from metal_prefill.session import Session
from metal_prefill.tasks._prompts import numbered
from metal_prefill.tasks._text_passes import Ids, TextPasses

BatchOutput: TypeAlias = Literal["none", "greedy", "logits", "log_probs", "hidden", "residual"]
OutputRows: TypeAlias = int | Literal["all"] | None

PROMPT = "prompt {}".format


def _checked(
    vocab_size: int, session: Session, tokens: TokenIds, output: BatchOutput, rows: OutputRows
) -> tuple[BatchOutput, Ids, int]:
    """Check the arguments of `forward_batch` for a session; return output, token ids and number of rows."""
    kind: BatchOutput = one_of("output", output, get_args(BatchOutput))
    context, position = session.native.max_context, session.native.position
    unread = int(kind == "log_probs")
    ids = token_array(tokens, vocab_size, context=context, position=position, unread=unread)
    return kind, ids, _row_count(kind, len(ids), rows)


def _request(output: BatchOutput, ids: Ids, rows: int, session: _core.Session, reuse: bool) -> _core.Request:
    match output:
        case "none":
            return _core.Request.none(session, ids, reuse=reuse)
        case "greedy":
            return _core.Request.greedy(session, ids, rows, reuse=reuse)
        case "logits":
            return _core.Request.logits(session, ids, reuse=reuse)
        case "log_probs":
            return _core.Request.log_probs(session, ids, rows, reuse=reuse)
        case "hidden" | "residual":
            return _core.Request.hidden(session, ids, rows, normed=output == "hidden", reuse=reuse)


def _row_count(output: BatchOutput, tokens: int, rows: object) -> int:
    """Return the number of last tokens of a session whose output is requested."""
    most = tokens - 1 if output == "log_probs" else 1 if output in ("logits", "none") else tokens
    if rows is None:
        return most if output == "log_probs" else 1
    if rows == "all" and (most > 1 or tokens == 1):
        return most
    if isinstance(rows, str):
        raise ValueError(f"rows {rows!r} of output {output!r} is not known")
    return integer(f"rows of output {output!r}", rows, 1, most)


def check_prompts(prompts: Sequence[TokenIds], vocab_size: int, least: int, limit: int) -> Sequence[Ids]:
    """Convert all prompts before anything is computed; each must have `least` to `limit` tokens."""

    def ids_of(prompt: TokenIds) -> Ids:
        if length_of(prompt) > limit:
            raise ContextOverflowError(f"{length_of(prompt)} tokens exceed the limit of {limit}")
        array = token_array(prompt, vocab_size)
        if len(array) < least:
            raise ValueError(f"at least {least} tokens are needed, got {len(array)}")
        return array

    return list(numbered(map(ids_of, prompts), "prompt"))


def score_many(
    model: EngineOwner, prompts: Sequence[TokenIds], *, progress: Progress | None = None
) -> list[Logits]:
    """Return the log probabilities of many prompts' tokens, and compute common prefixes once.

    Prompts with a common prefix, such as a question before its possible answers, may be in any order. The
    default session does not change.

    Parameters
    ----------
    prompts
        Token ids of each prompt, at least two.
    progress
        Called after each pass with the number of prompts done and their total. An exception that it raises
        stops the call.

    Returns
    -------
    list of numpy.ndarray
        Result of :meth:`Model.score` for each prompt: float32, ``[n - 1]``.

    Raises
    ------
    ValueError, TypeError, ContextOverflowError
        As in :meth:`Model.score`, before any prompt is computed; the message has the prompt's index.
    """
    engine = model.engine
    limit = engine.max_context + 1  # the last token is only predicted
    checked = check_prompts(prompts, engine.config.vocab_size, least=2, limit=limit)
    passes = TextPasses(engine)
    scratch = passes.scratch()
    requests = [_core.Request.log_probs(scratch, ids, len(ids) - 1) for ids in checked]
    return passes.compute(requests, PROMPT, progress)


def score(model: EngineOwner, tokens: TokenIds, *, progress: Progress | None = None) -> Logits:
    """Return the log probability of each token, given the tokens before it, from an empty context.

    The default session does not change. See :meth:`Session.score`.
    """
    with Session(model.engine, model.engine.session()) as scratch:
        return scratch.score(tokens, progress=progress)


def forward_prompts(
    model: EngineOwner,
    prompts: Sequence[TokenIds],
    *,
    return_logits: bool = False,
    progress: Progress | None = None,
) -> npt.NDArray[np.int64] | Logits:
    """Process many independent prompts in batches, and return the greedy next token of each.

    Common prefixes are computed once. The default session does not change.

    Parameters
    ----------
    prompts
        Token ids of each prompt.
    return_logits
        Return the logits after the last token of each prompt instead of the token.
    progress
        Called after each pass with the number of prompts done and their total. An exception that it raises
        stops the call.

    Returns
    -------
    numpy.ndarray
        int64 ``[len(prompts)]``, or float32 ``[len(prompts), vocab_size]``.

    Raises
    ------
    ValueError, TypeError, ContextOverflowError
        As in :meth:`Model.forward_prompt`, before any prompt is computed; the message has the index of the
        prompt.
    """
    engine = model.engine
    vocab_size = engine.config.vocab_size
    checked = check_prompts(prompts, vocab_size, least=1, limit=engine.max_context)
    passes = TextPasses(engine)
    scratch, make = passes.scratch(), _core.Request.logits if return_logits else _core.Request.greedy
    requests = [make(scratch, ids) for ids in checked]
    results = passes.compute(requests, PROMPT, progress)
    if return_logits:
        return np.array(results, np.float32).reshape(len(checked), vocab_size)
    return np.array(results, np.int64).reshape(len(checked))


def forward_batch(
    model: EngineOwner,
    sessions: Sequence[Session],
    tokens: Sequence[TokenIds],
    *,
    output: BatchOutput | Sequence[BatchOutput] = "greedy",
    rows: OutputRows | Sequence[OutputRows] = None,
    reuse: bool = False,
    return_errors: bool = False,
    progress: Progress | None = None,
) -> list[Any]:
    """Append tokens to several sessions in one batch.

    The building block of a scheduler. Prompts and single tokens may be mixed. The result of a session
    does not depend on the others, on the CPU bit for bit.

    Parameters
    ----------
    sessions
        Sessions of this model, each at most once.
    tokens
        Token ids for each session, ``[n]``, appended at its position.
    output
        One value for all sessions, or one for each: ``"greedy"``, the id of the largest logit after the
        last token; ``"logits"``, float32 ``[vocab_size]`` after the last token; ``"log_probs"``, float32
        ``[n - 1]``, as of :meth:`Model.score`; ``"hidden"`` and ``"residual"``, the hidden state after the
        last layer, with and without the output norm, float32 ``[dim]``; ``"none"``.
    rows
        One value for all sessions, or one for each: number of last tokens to return the output of, or
        ``"all"``. Hidden states then have the shape ``[rows, dim]``, and greedy ids are int32 ``[rows]``.
        None selects the last token, and all tokens for log probabilities. Logits are returned for the
        last token only.
    reuse
        Treat `tokens` as the whole context of each session, as in :meth:`Model.forward_prompt`.
    return_errors
        Return the exception of a failed session in place of its result. If False, the first exception is
        raised after the other sessions are computed.
    progress
        Called after each pass with the number of tokens done and their total.

    Returns
    -------
    list
        Result of each session, as `output` defines it.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid. Nothing was computed.
    ContextOverflowError, KVMemoryError, NumericalError, DeviceError
        The first session that failed raised it; that session is unchanged.
    SessionBusyError
        Called from the progress callback of another call on one of the sessions.
    """
    check_prompt_options(reuse, progress)
    for i, session in enumerate(sessions):
        if not isinstance(session, Session):
            raise TypeError(f"sessions[{i}] must be a Session, got {type(session).__name__}")
    engine = model.engine
    outputs = [output] * len(sessions) if isinstance(output, str) else list(output)
    wanted = [rows] * len(sessions) if isinstance(rows, (str, int, np.integer, type(None))) else [*rows]
    if not len(sessions) == len(tokens) == len(outputs):
        raise ValueError(
            f"a batch needs tokens and an output for each session; got {len(sessions)} sessions, "
            f"{len(tokens)} lists of tokens and {len(outputs)} outputs"
        )
    if len(wanted) != len(sessions):
        raise ValueError(f"rows must be one word, or {len(sessions)}; got {len(wanted)}")
    items = zip(sessions, tokens, outputs, wanted, strict=True)
    checked = list(numbered((_checked(engine.config.vocab_size, *item) for item in items), "session"))
    # No variable holds the requests: the traceback of an exception must not keep the pages of the sessions.
    results: list[Any] = engine.core.forward_batch(
        [_request(*item, session.native, reuse) for item, session in zip(checked, sessions, strict=True)],
        progress,
    )
    for i, result in enumerate(results):
        if isinstance(result, list):
            results[i] = result[-1] if wanted[i] is None else np.array(result, np.int32)
        elif isinstance(result, np.ndarray) and outputs[i] in ("hidden", "residual") and wanted[i]:
            results[i] = result.reshape(-1, engine.config.dim)
        elif isinstance(result, Exception) and not return_errors:
            raise type(result)(f"session {i}: {result}") from result
    return results
