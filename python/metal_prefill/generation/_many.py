"""Many prompts, or many texts of one, by continuous batching."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeAlias

from metal_prefill._support.arguments import MOST_ANSWERS, Progress, TokenIds, integer
from metal_prefill.engine import EngineOwner
from metal_prefill.generation._scheduler import Scheduler
from metal_prefill.generation._stream import REFUSALS, Stream
from metal_prefill.generation._text_generation import Piece

Prompt: TypeAlias = "str | TokenIds | tuple[str | TokenIds, Mapping[str, Any]]"


def generate_many(
    model: EngineOwner,
    prompts: Iterable[Prompt],
    max_tokens: int = 128,
    *,
    n: int = 1,
    max_streams: int = 32,
    errors: Literal["raise", "return"] | str = "raise",
    progress: Progress | None = None,
    **options: Any,
) -> Iterator[tuple[int, str | Exception]]:
    """Continue many prompts by continuous batching, and yield text as it is generated.

    A new prompt starts when another one ends, so that memory does not grow with the number of prompts. On
    the CPU, the text of a prompt is the one that :meth:`Session.generate` generates from it alone.

    Parameters
    ----------
    prompts
        Texts or token ids. A pair has a prompt and its own options, which override the common ones.
    max_tokens
        Maximum number of tokens of each text.
    n
        Number of texts per prompt, at most 4,096. The prompt is computed once; the random numbers of each
        text differ.
    max_streams
        Maximum number of texts that are generated at a time.
    errors
        ``"raise"``: the first error ends the iteration; its message has the index of the prompt.
        ``"return"``: an exception is yielded in place of the text of a failed prompt, and the others
        continue.
    progress
        Called with the number of texts that have ended and the number that have started.
    options
        Options of :meth:`Session.generate`, such as `temperature`, `seed` and `stop`.

    Yields
    ------
    tuple of int and str
        Index of the prompt and a piece of its text. With several texts per prompt, the number is the
        index of the prompt times `n`, plus the number of the text.
    """
    pieces = stream_many(
        model, prompts, max_tokens, n=n, max_streams=max_streams, errors=errors, progress=progress, **options
    )
    return (
        (index, piece.text if isinstance(piece, Piece) else piece)
        for index, piece in pieces
        if not isinstance(piece, Piece) or piece.text
    )


def stream_many(
    model: EngineOwner,
    prompts: Iterable[Prompt],
    max_tokens: int = 128,
    *,
    n: int = 1,
    max_streams: int = 32,
    errors: Literal["raise", "return"] | str = "raise",
    progress: Progress | None = None,
    **options: Any,
) -> Iterator[tuple[int, Piece | Exception]]:
    """Continue many prompts by continuous batching, and yield each token with its text.

    Parameters are those of :meth:`Model.generate_many`; `options` are those of :meth:`Session.stream`,
    including `logprobs`.
    """
    if errors not in ("raise", "return"):
        raise ValueError(f"errors must be 'raise' or 'return', got {errors!r}")
    if isinstance(prompts, (str, bytes)):
        raise TypeError(f"prompts must be a sequence of prompts, got one {type(prompts).__name__}")
    n = integer("n", n, 1, MOST_ANSWERS)
    scheduler = Scheduler(model, max_streams=max_streams)
    results = pieces_of(scheduler, iter(prompts), n, {"max_tokens": max_tokens, **options}, progress)
    return _named(results, n, errors)


def _named(
    results: Iterator[tuple[int, Piece | Exception]], n: int, errors: str
) -> Iterator[tuple[int, Piece | Exception]]:
    """Raise the first error, or yield errors, with the index of the prompt."""
    for index, result in results:
        if isinstance(result, Exception):
            named = _with_message(result, f"prompt {index // n}: {result}")
            if errors == "raise":
                raise named from result
            result = named
        yield index, result


def _with_message(error: Exception, message: str) -> Exception:
    """Return an exception of the class of `error`, or of its nearest base class that takes one message."""
    for kind in type(error).__mro__:
        if issubclass(kind, Exception):
            with suppress(Exception):  # some, such as UnicodeEncodeError, have more arguments
                return kind(message)
    return Exception(message)


def pieces_of(
    scheduler: Scheduler,
    prompts: Iterator[Any],
    n: int,
    common: Mapping[str, Any],
    progress: Progress | None = None,
) -> Iterator[tuple[int, Piece | Exception]]:
    """Continue prompts, each read when there is room for it, and yield tokens and errors by text.

    The last result of a text has a `finish_reason` or is an error.
    """
    indices: dict[Stream, int] = {}
    begun = ended = 0
    more = True
    while True:
        # One prompt in reserve, which enters with the pass after the end of another.
        while more and scheduler.streams <= scheduler.max_streams:
            try:
                prompt = next(prompts)
            except StopIteration:
                more = False
                break
            own: Mapping[str, Any] = {}
            if isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], Mapping):
                prompt, own = prompt
            first, begun = begun, begun + n
            try:
                streams = scheduler.submit_answers(prompt, n, **{**common, **own})
                indices.update(zip(streams, range(first, begun), strict=True))
            except REFUSALS as error:
                ended += n
                for index in range(first, begun):
                    yield index, error
        if not scheduler.streams:
            return
        for stream, piece in scheduler.step_pieces():
            yield indices[stream], piece
        for stream in [s for s in indices if s.finish_reason is not None]:
            index = indices.pop(stream)
            ended += 1
            if stream.error is not None:
                yield index, stream.error
            if progress is not None:
                progress(ended, begun)
