"""Methods of a model that generate text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from metal_prefill._support.arguments import MOST_ANSWERS, Progress, TokenIds, integer
from metal_prefill._support.cached_property import cached_property
from metal_prefill.engine import Engine
from metal_prefill.generation._engine_loop import EngineLoop
from metal_prefill.generation._scheduler import Scheduler
from metal_prefill.generation._stream import REFUSALS, Stream
from metal_prefill.generation._text_generation import Piece
from metal_prefill.session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from metal_prefill.generation._text_generation import TextOptions


class GenerationMethods:
    """Text generation, over an engine and a default session."""

    @property
    def engine(self) -> Engine:
        """The engine handle."""
        raise NotImplementedError

    def _default_session(self) -> Session:
        raise NotImplementedError

    @overload
    def generate(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[str]: ...

    @overload
    def generate(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: int,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[tuple[int, str]]: ...

    def generate(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: int | None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[str] | Iterator[tuple[int, str]]:
        """See :meth:`Session.generate`; with `n`, generate several answers to the prompt in one batch.

        Parameters
        ----------
        prompt, max_tokens, progress, options
            As in :meth:`Session.generate`; `max_tokens` applies to each answer.
        n
            Number of answers, at most 4,096. The prompt is computed once, and answers share its pages. The
            random numbers of answer i depend on `seed` and i; those of answer 0 are the same as without `n`.
            The default session does not change.

        Yields
        ------
        str, or tuple of int and str
            Pieces of text; with `n`, together with the number of their answer, from 0.
        """
        if n is None:
            return self._default_session().generate(prompt, max_tokens, progress=progress, **options)
        pieces = self.stream(prompt, max_tokens, n=n, progress=progress, **options)
        return ((answer, piece.text) for answer, piece in pieces if piece.text)

    @overload
    def stream(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: None = None,
        logprobs: int | None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[Piece]: ...

    @overload
    def stream(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: int,
        logprobs: int | None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[tuple[int, Piece]]: ...

    def stream(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: int | None = None,
        logprobs: int | None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[Piece] | Iterator[tuple[int, Piece]]:
        """See :meth:`Session.stream`, and for several answers (`n`) :meth:`generate`.

        Yields
        ------
        Piece, or tuple of int and Piece
            One for each token; with `n`, together with the number of its answer, from 0.
        """
        if n is None:
            return self._default_session().stream(
                prompt, max_tokens, logprobs=logprobs, progress=progress, **options
            )
        scheduler = Scheduler(self, max_streams=integer("n", n, 1, MOST_ANSWERS))
        streams = scheduler.submit_answers(prompt, n, max_tokens, logprobs=logprobs, **options)
        return _stream_answers(scheduler, streams, progress)

    def generate_many(
        self,
        prompts: Iterable[str | TokenIds | tuple[str | TokenIds, Mapping[str, Any]]],
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
        pieces = self.stream_many(
            prompts, max_tokens, n=n, max_streams=max_streams, errors=errors, progress=progress, **options
        )
        return (
            (index, piece.text if isinstance(piece, Piece) else piece)
            for index, piece in pieces
            if not isinstance(piece, Piece) or piece.text
        )

    def stream_many(
        self,
        prompts: Iterable[str | TokenIds | tuple[str | TokenIds, Mapping[str, Any]]],
        max_tokens: int = 128,
        *,
        n: int = 1,
        max_streams: int = 32,
        errors: Literal["raise", "return"] | str = "raise",
        progress: Progress | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Piece | Exception]]:
        """Continue many prompts by continuous batching, and yield each token with its text.

        Parameters are those of :meth:`generate_many`; `options` are those of :meth:`Session.stream`,
        including `logprobs`.
        """
        if errors not in ("raise", "return"):
            raise ValueError(f"errors must be 'raise' or 'return', got {errors!r}")
        n = integer("n", n, 1, MOST_ANSWERS)
        scheduler = Scheduler(self, max_streams=max_streams)
        return _stream_many(
            scheduler, iter(prompts), n, {"max_tokens": max_tokens, **options}, errors, progress
        )

    async def generate_async(
        self, prompt: str | TokenIds, max_tokens: int = 128, **options: Any
    ) -> AsyncIterator[str]:
        """Continue a prompt in one batch with those of other tasks, and yield text as it is generated.

        All tasks of all event loops share one engine loop, which runs in its own thread while there is work.
        The text is cancelled when the iteration over it ends early.

        Parameters
        ----------
        prompt, max_tokens, options
            As in :meth:`generate_many`.

        Yields
        ------
        str
            Pieces of text.
        """
        async for piece in self._engine_loop.generate(prompt, max_tokens, **options):
            yield piece

    @cached_property
    def _engine_loop(self) -> EngineLoop:
        return EngineLoop(self)


def _stream_answers(
    scheduler: Scheduler, streams: list[Stream], progress: Progress | None
) -> Iterator[tuple[int, Piece]]:
    numbers = {stream: i for i, stream in enumerate(streams)}
    first, reported = streams[0], 0
    while scheduler.streams:
        pieces = scheduler.step_pieces()
        if progress is not None and first.ready_tokens > reported:
            reported = first.ready_tokens
            progress(reported, first.prompt_tokens)
        for stream, piece in pieces:
            yield numbers[stream], piece
        for stream, i in numbers.items():
            if stream.error is not None:
                raise type(stream.error)(f"answer {i}: {stream.error}") from stream.error


def _stream_many(
    scheduler: Scheduler,
    prompts: Iterator[Any],
    n: int,
    common: dict[str, Any],
    errors: str,
    progress: Progress | None,
) -> Iterator[tuple[int, Piece | Exception]]:
    indices: dict[Stream, int] = {}
    begun = ended = 0
    more = True
    while True:
        # One prompt more than there is room for: the next one enters with the pass after the one that ends.
        while more and scheduler.streams <= scheduler.max_streams:
            try:
                prompt = next(prompts)
            except StopIteration:
                more = False
                break
            own: Mapping[str, Any] = {}
            if isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], Mapping):
                prompt, own = prompt
            try:
                streams = scheduler.submit_answers(prompt, n, **{**common, **own})
                indices.update(zip(streams, range(begun, begun + n), strict=True))
            except REFUSALS as error:
                named = type(error)(f"prompt {begun // n}: {error}")
                if errors == "raise":
                    raise named from None
                ended += n
                yield from ((index, named) for index in range(begun, begun + n))
            begun += n
        if not scheduler.streams:
            return
        for stream, piece in scheduler.step_pieces():
            yield indices[stream], piece
        for stream in [s for s in indices if s.finish_reason is not None]:
            index = indices.pop(stream)
            ended += 1
            if stream.error is not None:
                failure = type(stream.error)(f"prompt {index // n}: {stream.error}")
                if errors == "raise":
                    raise failure from stream.error
                yield index, failure
            if progress is not None:
                progress(ended, begun)
