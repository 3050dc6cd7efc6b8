"""Tokens that may follow a text, and those that must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from metal_prefill import _core
from metal_prefill.generation._speculation import MOST_DRAFTS

if TYPE_CHECKING:
    from concurrent.futures import Future

    from metal_prefill.generation._constraint import Constraint, Step

# Maximum number of forced tokens of a text in a pass. Like drafts, they delay every text of the pass, and
# texts can be cancelled only between passes.
MOST_FORCED = MOST_DRAFTS


class _AdvanceRequest(TypedDict):
    """Arguments of :meth:`Constraint.advance`."""

    tokens: list[int]
    most_forced: int
    room: int


class Choosing:
    """Choice of tokens by a sampler among those that a constraint allows."""

    def __init__(
        self,
        # None if the engine's argmax chooses tokens; there is no constraint then.
        sampler: _core.Sampler | None,
        constraint: Constraint | None,  # of the text, if any
        stop_ids: frozenset[int],  # ids that end the text, which the constraint does not receive
        # Whether to compute forced tokens. They are not sampled, and have no log probabilities.
        forces: bool,
    ) -> None:
        self.sampler, self.constraint = sampler, constraint
        self._stop_ids, self._forces = stop_ids, forces
        self._forced: list[int] = []  # tokens that must follow those of the latest pass
        self._step: Step | None = None  # the constraint's answer to those of the latest pass
        self.allow()

    def allow(self, drafts: Sequence[int] = ()) -> int:
        """Let the sampler choose what the constraint allows, also after the drafts that it allows.

        Returns
        -------
        int
            How many of the drafts it allows.
        """
        if self.constraint is None or self.sampler is None:
            return len(drafts)
        ahead = self.constraint.ahead(drafts)
        self.sampler.allow_bits([self.constraint.mask(), *ahead])
        return len(ahead)

    def send(self, chosen: Sequence[int], free: Sequence[int], room: int) -> None:
        """Send what :meth:`advance` waits for."""
        request = self._request(chosen, free, room)
        if request is not None and self.constraint is not None:
            self.constraint.send_advance(**request)

    def advance(
        self,
        # Tokens of the pass, and those of them that were not given.
        chosen: Sequence[int],
        free: Sequence[int],
        room: int,  # number of tokens that the text may still have
    ) -> None:
        """Advance the constraint by the tokens of a pass.

        Raises
        ------
        ConstraintPending
            The constraint has not answered yet, and nothing has changed.
        """
        request, step = self._request(chosen, free, room), None
        if request is not None and self.constraint is not None:
            step = self.constraint.advance(**request)
        if self.constraint is not None and free:
            self._forced = self._forced_after(chosen) or (step.forced if step is not None else [])
        self._step = step

    def _request(self, chosen: Sequence[int], free: Sequence[int], room: int) -> _AdvanceRequest | None:
        """Return what to advance the constraint by: tokens of a pass that were not given, and forced ones.

        New forced tokens are computed once the text has taken the earlier ones.
        """
        if self.constraint is None or not free:
            return None
        if stops := [i for i, token in enumerate(free) if token in self._stop_ids]:
            room = min(room, stops[0])
        if room <= 0:
            return None
        forced = self._forced_after(chosen)
        return {
            "tokens": [*free, *forced[:MOST_FORCED]],
            "most_forced": MOST_FORCED if self._forces and not forced else 0,
            "room": room,
        }

    def _forced_after(self, chosen: Sequence[int]) -> list[int]:
        """Return the forced tokens that are left after those of a pass."""
        n = len(chosen)
        return self._forced[n:] if self._forced[:n] == list(chosen) else []

    def completes(self, token: int) -> bool:
        """Take a token of the latest answer, and return whether nothing can follow it."""
        return self._step is not None and self._step.take()

    def take_forced(self) -> list[int]:
        """Return the tokens that must follow, as many as a pass may have."""
        forced, self._forced = self._forced[:MOST_FORCED], self._forced[MOST_FORCED:]
        return forced

    @property
    def unmet(self) -> bool:
        """Whether a text that ends now does not meet its constraint."""
        return self.constraint is not None and not (self._step is not None and self._step.met)

    def wait_until(self, deadline: float) -> None:
        """Wait for the constraint until then, see `Constraint`."""
        if self.constraint is not None:
            self.constraint.deadline = deadline

    @property
    def pending(self) -> Future[Any] | None:
        """The answer of the constraint that the text waits for."""
        return None if self.constraint is None else self.constraint.pending

    def close(self) -> None:
        """Release the resources of the constraint in other processes."""
        if self.constraint is not None:
            self.constraint.close()
