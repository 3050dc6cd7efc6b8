"""Benchmark results and their display."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from metal_prefill.bench import _report
from metal_prefill.bench._rows import Row, Rows


class BenchResults(Rows):
    """Rows of one benchmark; a table in a terminal and in a notebook.

    Attributes
    ----------
    rows : list of Row
        By engine, ours first, then by test.
    """

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as JSON objects."""
        return [asdict(row) for row in self.rows]

    def to_json(self) -> str:
        """Return the rows as a JSON array."""
        return json.dumps(self.to_dicts(), indent=2)

    @classmethod
    def from_dicts(cls, rows: Iterable[dict[str, Any]]) -> BenchResults:
        """Read what `to_dicts` wrote."""
        return cls([Row(**(row | {"ratio": None})) for row in rows])

    def __rich__(self) -> Any:
        return _report.render(self)

    def _repr_html_(self) -> str:
        return _report.to_html(self)
