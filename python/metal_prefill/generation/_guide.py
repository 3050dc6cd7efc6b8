"""Chooses a text's tokens among those that its constraint allows, and provides forced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from metal_prefill import _core
from metal_prefill.generation._speculation import MOST_DRAFTS

if TYPE_CHECKING:
    from metal_prefill.generation._constraint import Constraint, Step

# Maximum number of forced tokens of a text in a pass. Like drafts, they delay every text of the pass, and
# texts can be cancelled only between passes.
MOST_FORCED = MOST_DRAFTS


class Guide:
    """Guide of a sampler along a constraint."""

    def __init__(
        self,
        sampler: _core.Sampler,
        constraint: Constraint,
        stop_ids: frozenset[int],  # ids that end the text, which the constraint does not receive
        # Whether to compute forced tokens. They are not sampled, and have no log probabilities.
        forces: bool,
    ) -> None:
        self.sampler, self.constraint = sampler, constraint
        self._stop_ids, self._forces = stop_ids, forces
        self._forced: list[int] = []  # forced tokens after those of the latest pass
        self._step: Step | None = None  # the constraint's answer to the tokens of the latest pass
        self.allow()

    def allow(self, drafts: Sequence[int] = (), deadline: float | None = None) -> int:
        """Restrict the sampler to allowed tokens; return the number of allowed drafts.

        It is 0 if the constraint does not answer before the deadline; see :meth:`Constraint.ahead`.
        """
        ahead = self.constraint.ahead(drafts, deadline)
        self.sampler.allow([self.constraint.mask(), *ahead])
        return len(ahead)

    def send(self, chosen: Sequence[int], free: Sequence[int], room: int) -> None:
        """Send the request of :meth:`advance`."""
        if (request := self._request(chosen, free, room)) is not None:
            self.constraint.send(*request)

    def advance(
        self,
        # Tokens of the pass, and those among them that were not given.
        chosen: Sequence[int],
        free: Sequence[int],
        room: int,  # number of tokens that the text may still have
    ) -> None:
        """Advance the constraint by the tokens of a pass."""
        request = self._request(chosen, free, room)
        step = None if request is None else self.constraint.advance(*request)
        if free:
            self._forced = self._forced_after(chosen) or (step.forced if step is not None else [])
        self._step = step

    def _request(
        self, chosen: Sequence[int], free: Sequence[int], room: int
    ) -> tuple[list[int], int, int] | None:
        """Return arguments of :meth:`Constraint.advance`: new tokens of a pass, and forced ones.

        New forced tokens are computed once the text has taken the earlier ones.
        """
        if stops := [i for i, token in enumerate(free) if token in self._stop_ids]:
            room = min(room, stops[0])
        if not free or room <= 0:
            return None
        forced = self._forced_after(chosen)
        return [*free, *forced[:MOST_FORCED]], MOST_FORCED if self._forces and not forced else 0, room

    def _forced_after(self, chosen: Sequence[int]) -> list[int]:
        """Return the remaining forced tokens after those of a pass."""
        n = len(chosen)
        return self._forced[n:] if self._forced[:n] == list(chosen) else []

    def completes(self, token: int) -> bool:
        """Take a token of the latest answer, and return whether nothing can follow it."""
        return self._step is not None and self._step.take()

    def take_forced(self) -> list[int]:
        """Return forced tokens, at most as many as a pass may have."""
        forced, self._forced = self._forced[:MOST_FORCED], self._forced[MOST_FORCED:]
        return forced

    @property
    def met(self) -> bool:
        """Whether a text that ends now meets its constraint."""
        return self._step is not None and self._step.met
