"""Log probabilities of answers: their number, and their memory until they are sent."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from metal_prefill.generation._stream import Stream
from metal_prefill.serve._bodies import InFlight
from metal_prefill.serve._errors import ApiError

# Of a request: 1 + `logprobs` for each token of its prompts, if they are scored, and of its answers.
# 8,192 tokens with the 20 best have a sixth.
MOST_SCORES = 1 << 20
_BYTES = 32  # of one in JSON, at most, if its token is a word


def most_tokens(texts: int, logprobs: int) -> int:
    """Return how many tokens each text may have if the prompts are not scored."""
    return max(MOST_SCORES // (texts * (1 + logprobs)), 1)


class _Account:
    """Bytes of the log probabilities of one request."""

    def __init__(self, held: InFlight, size: int) -> None:
        self._held = held
        self._size = size

    def add(self, size: int) -> None:
        """Count further bytes; raise `ApiError` if too many are held, of which this request has its share."""
        self._size += size
        self._held.add(size)
        if self._size >= self._held.fair_share:
            self._held.check()

    def remove(self, size: int) -> None:
        """Count fewer bytes."""
        self._size -= size
        self._held.add(-size)


class Scores:
    """JSON lists of the log probabilities of a text, encoded as they grow.

    The objects that they are encoded from take ten times as much memory.
    """

    def __init__(self, account: _Account) -> None:
        self._account = account
        self._chunks: dict[str, list[bytes]] = {}
        self._size = 0

    def extend(self, lists: Mapping[str, Sequence[Any]]) -> None:
        """Append items to the list of each name."""
        for name, items in lists.items():
            chunks = self._chunks.setdefault(name, [])
            if items:
                chunks.append(msgspec.json.encode(items)[1:-1])
                self._size += len(chunks[-1])
                self._account.add(len(chunks[-1]))

    def whole(self) -> dict[str, msgspec.Raw]:
        """Return the list of each name, and release the chunks."""
        chunks, self._chunks = self._chunks, {}
        return {name: msgspec.Raw(b"[%b]" % b",".join(chunks.pop(name))) for name in list(chunks)}

    def drop(self) -> None:
        """Release the memory."""
        self._account.remove(self._size)
        self._chunks, self._size = {}, 0


@contextmanager
def scores_of(held: InFlight, streams: Sequence[Stream], logprobs: int | None) -> Iterator[list[Scores]]:
    """Return lists for each text, whose memory is released at the end of the context.

    Memory for the log probabilities of prompts, which come fast, is reserved from the start.
    """
    if logprobs is None:
        yield [Scores(_Account(held, 0)) for _ in streams]
        return
    count = sum(stream.most_pieces for stream in streams) * (1 + logprobs)
    if count > MOST_SCORES:
        raise ApiError(
            f"logprobs: up to {count} log probabilities of prompts and answers; the limit is {MOST_SCORES}",
            param="logprobs",
            code="too_many_logprobs",
        )
    reserved = sum(stream.scored_tokens for stream in streams) * (1 + logprobs) * _BYTES
    with held.holding(reserved):
        held.check()
        account = _Account(held, reserved)
        scores = [Scores(account) for _ in streams]
        try:
            yield scores
        finally:
            for lists in scores:
                lists.drop()
