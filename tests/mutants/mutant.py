"""An error that tests must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes
    ----------
    file : str
        Path from the root of the repository.
    old : str
        A text that occurs in the file exactly once.
    new : str
        Its replacement.
    reason : str
        The error, in a line.
    tests : tuple of str
        Tests that notice it, as arguments of pytest.
    """

    file: str
    old: str
    new: str
    reason: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the text of the file with the error."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {count} times")
        return text.replace(self.old, self.new)
