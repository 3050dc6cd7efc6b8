"""Log probabilities of answers: their number, and their memory until they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from metal_prefill.generation._stream import Stream
from metal_prefill.serve._bodies import InFlight
from metal_prefill.serve._errors import ApiError

# Of the prompts of a request: 1 + `logprobs` for each token. 8,192 tokens with the 20 best have a sixth.
MOST_PROMPT_SCORES = 1 << 20
_BYTES = 32  # of one in JSON, at most, if its token is a word


class Scores:
    """JSON lists of the log probabilities of a text, encoded as they grow.

    The objects that they are encoded from take ten times as much memory.

    Parameters
    ----------
    held
        Counts the bytes of all requests.
    """

    def __init__(self, held: InFlight) -> None:
        self._held = held
        self._chunks: dict[str, list[bytes]] = {}
        self._size = 0

    def extend(self, lists: Mapping[str, Sequence[Any]]) -> None:
        """Append items to the list of each name."""
        for name, items in lists.items():
            chunks = self._chunks.setdefault(name, [])
            if items:
                chunks.append(msgspec.json.encode(items)[1:-1])
                self._size += len(chunks[-1])
                self._held.add(len(chunks[-1]))

    def whole(self) -> dict[str, msgspec.Raw]:
        """Return the list of each name."""
        return {name: msgspec.Raw(b"[%b]" % b",".join(chunks)) for name, chunks in self._chunks.items()}

    def drop(self) -> None:
        """Release the memory."""
        self._held.add(-self._size)
        self._chunks, self._size = {}, 0


@contextmanager
def scores_of(held: InFlight, streams: Sequence[Stream], logprobs: int | None) -> Iterator[list[Scores]]:
    """Return lists for each text, whose memory is released at the end of the context.

    Memory for the log probabilities of prompts, which come fast, is reserved from the start.

    Raises
    ------
    ApiError
        The request asks for too many, or those of other requests take too much memory.
    """
    count = 0 if logprobs is None else sum(stream.scored_tokens for stream in streams) * (1 + logprobs)
    if count > MOST_PROMPT_SCORES:
        raise ApiError(
            400,
            f"logprobs: {count} log probabilities of prompts; the limit is {MOST_PROMPT_SCORES}",
            param="logprobs",
            code="too_many_logprobs",
        )
    scores = [Scores(held) for _ in streams]
    try:
        with held.holding(count * _BYTES):
            if logprobs is not None:
                held.check()
            yield scores
    finally:
        for lists in scores:
            lists.drop()
