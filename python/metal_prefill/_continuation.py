"""Tokens to text: what follows a prompt, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from metal_prefill import sampling

if TYPE_CHECKING:
    from metal_prefill.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]


def stop_strings(stop: str | Sequence[str]) -> list[str]:
    """Check strings that end a text.

    Raises
    ------
    ValueError
        If one of them is empty.
    """
    stops = [stop] if isinstance(stop, str) else list(stop)
    if any(not s for s in stops):
        raise ValueError("a stop string is empty")
    return stops


class StopFilter:
    """Passes text on up to the first stop string, holding back what could be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._pending = ""
        self.found = False

    def step(self, piece: str) -> str:
        """Take a piece and return what is certain to come before a stop string."""
        self._pending += piece
        found = [at for s in self._stops if (at := self._pending.find(s)) >= 0]
        if found:
            self.found = True
            ready, self._pending = self._pending[: min(found)], ""
            return ready
        held = max(
            (n for s in self._stops for n in range(1, len(s)) if self._pending.endswith(s[:n])), default=0
        )
        ready = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(ready) :]
        return ready

    def flush(self) -> str:
        """Return what was held back: no stop string came of it."""
        ready, self._pending = self._pending, ""
        return ready


class Continuation:
    """The text after one prompt, token by token.

    Parameters
    ----------
    tokenizer
        Of the model.
    ids
        The prompt.
    max_tokens
        Upper bound on the number of tokens made, at least 1.
    options, seed
        How tokens are chosen, see :class:`metal_prefill.sampling.Sampler`.
    stops
        Strings that end the text.

    Attributes
    ----------
    token : int
        The last token that was chosen; the next one to be computed.
    ended : str or None
        Why there is no more text; None while there may be.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: Sequence[int],
        max_tokens: int,
        options: sampling.Options,
        seed: int | None,
        stops: Sequence[str],
    ) -> None:
        self._decoder = tokenizer.decoder()
        self._stop_ids = tokenizer.stop_ids
        self._choose = sampling.Sampler(options, seed=seed, recent=[int(t) for t in ids])
        self._filter = StopFilter(stops)
        self._left = max_tokens
        self.greedy = options.is_greedy
        self.token = -1
        self.ended: FinishReason | None = None

    def take(self, result: Any) -> str:
        """Take the greedy token, or the logits where tokens are sampled, and return the text it adds."""
        self.token = int(result) if self.greedy else self._choose(result)
        if self.token in self._stop_ids:
            return self.end("stop")
        text = self._filter.step(self._decoder.step(self.token))
        self._left -= 1
        if self._filter.found:
            self.ended = "stop"
            return text
        return text + self.end("length") if self._left == 0 else text

    def end(self, reason: FinishReason) -> str:
        """End the text and return what was held back of it."""
        self.ended = reason
        return self._filter.step(self._decoder.flush()) + ("" if self._filter.found else self._filter.flush())
