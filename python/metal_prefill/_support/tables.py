"""Tables of text, for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


def table(title: str | None, header: Iterable[str], rows: Iterable[Iterable[str]], names: int = 1) -> Table:
    """Return a table of text cells, whose first columns name the row; narrow ones fold."""
    made = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        made.add_column(name, justify="left" if i < names else "right", overflow="fold")
    for cells in rows:
        made.add_row(*cells)
    return made
