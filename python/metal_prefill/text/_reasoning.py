"""Reasoning of a model before its answer, between tags."""

from typing import NamedTuple

LAST_TOKENS = 8  # of a prompt, enough for the tag and white space after it


class Tags(NamedTuple):
    """Texts around reasoning, which may begin with control tokens or be one."""

    begin: str
    end: str


THINK = Tags("<think>", "</think>")
CHANNEL = Tags("<|channel>thought", "<channel|>")  # of Gemma 4


def tags_in(template: str) -> Tags | None:
    """Return the tags whose end a chat template names, to remove the reasoning of earlier answers."""
    return next((tags for tags in (THINK, CHANNEL) if tags.end in template), None)


class Parsed(NamedTuple):
    """New text of an answer."""

    reasoning: str
    answer: str


class ReasoningParser:
    r"""Incremental separation of the reasoning from the answer that follows it.

    Reasoning begins with its tag or, if a template has written that already, at once. White space next to the
    tags belongs to neither part. Without an end, all text is reasoning. The joined parts do not depend on how
    the text is divided into pieces.

    Examples
    --------
    >>> parser = ReasoningParser(begun=False)
    >>> parser.step("<think>\nIt is")
    Parsed(reasoning='It is', answer='')
    >>> parser.step(" late.\n</thi")
    Parsed(reasoning=' late.', answer='')
    >>> parser.step("nk>\n\nGood night.")
    Parsed(reasoning='', answer='Good night.')
    """

    def __init__(
        self,
        *,
        begun: bool,  # whether the prompt ends within reasoning; see `begins_in`
        tags: Tags = THINK,  # texts around the reasoning
    ) -> None:
        self.tags = tags
        self._tag = tags.end if begun else tags.begin  # the next one
        self._is_answer = False
        self._started = False  # whether the current part has text
        self._space: list[str] = []  # white space that is part of the text only if more text follows
        self._tail = ""  # text that may be the start of the next tag

    def step(self, piece: str, *, last: bool = False) -> Parsed:
        """Add a piece; return the new text of both parts, with all pending text if it is the `last` piece."""
        reasoning = ""
        text = self._tail + piece
        if not self._is_answer and self._tag == self.tags.begin:
            text = self._after_begin(text, last)
        if not self._is_answer and self._tag == self.tags.end:
            body, found, rest = text.partition(self.tags.end)
            keep = 0 if found or last else _overlap(body, self.tags.end)
            self._tail = body[len(body) - keep :]
            reasoning = self._stripped(body[: len(body) - keep])
            if found:
                self._is_answer, self._started, self._space, self._tail = True, False, [], ""
            text = rest
        if not self._is_answer:
            return Parsed(reasoning, "")
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        return Parsed(reasoning, text)

    def _after_begin(self, text: str, last: bool) -> str:
        """Look for the first tag, which only white space may precede; return the text after it."""
        stripped = text.lstrip()
        self._space.append(text[: len(text) - len(stripped)])
        if stripped.startswith(self.tags.begin):
            self._tag, self._space = self.tags.end, []
            return stripped[len(self.tags.begin) :]
        if self.tags.begin.startswith(stripped) and not last:
            self._tail = stripped
            return ""
        self._is_answer = self._started = True
        self._tail = ""
        return "".join(self._space) + stripped

    def _stripped(self, body: str) -> str:
        """Return a piece of the reasoning with the pending white space before it, not that after it."""
        body = body if self._started else body.lstrip()
        text = body.rstrip()
        if not text:
            self._space.append(body)
            return ""
        made = "".join(self._space) + text if self._started else text
        self._started, self._space = True, [body[len(text) :]]
        return made


class ReasoningGate:
    """Division of a text, as it is generated, into its reasoning with both tags and the answer after it."""

    def __init__(
        self,
        *,
        begun: bool,  # whether the prompt ends within reasoning; see `begins_in`
        tags: Tags = THINK,  # texts around the reasoning
    ) -> None:
        self._tags = tags
        self._begun = begun
        self._is_answer = False
        self._seen = ""  # text that may begin with the tag; within reasoning, its last characters

    def step(self, piece: str) -> tuple[str, str]:
        """Add a piece; return the new text of the reasoning and of the answer."""
        if self._is_answer:
            return "", piece
        if not self._begun:
            piece, self._seen = self._seen + piece, ""
            stripped = piece.lstrip()
            if self._tags.begin.startswith(stripped):
                self._seen = piece
                return "", ""
            self._begun = stripped.startswith(self._tags.begin)
            self._is_answer = not self._begun
            if self._is_answer:
                return "", piece
        text = self._seen + piece
        end = text.find(self._tags.end)
        if end < 0:
            self._seen = text[1 - len(self._tags.end) :]
            return piece, ""
        self._is_answer = True
        cut = end + len(self._tags.end) - len(self._seen)
        return piece[:cut], piece[cut:]

    def flush(self) -> str:
        """End the text, and return the pending text, which belongs to the answer."""
        return "" if self._begun or self._is_answer else self._seen


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may be the start of a tag."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def begins_in(prompt: str, tags: Tags = THINK) -> bool:
    """Return whether a prompt ends within reasoning."""
    return prompt.rstrip().endswith(tags.begin)
