"""Reasoning of a model before its answer, between tags."""

from typing import NamedTuple

LAST_TOKENS = 8  # of a prompt, enough for the tag and white space after it


class Tags(NamedTuple):
    """Texts around reasoning, which may begin with control tokens or be one."""

    begin: str
    end: str


THINK = Tags("<think>", "</think>")
CHANNEL = Tags("<|channel>thought", "<channel|>")  # of Gemma 4


class Parsed(NamedTuple):
    """New text of an answer."""

    reasoning: str
    answer: str


class ReasoningGate:
    """Division of a text, as it is generated, into its reasoning with both tags and the answer after it."""

    def __init__(
        self,
        *,
        begun: bool,  # whether the prompt ends within reasoning; see `begins_in`
        tags: Tags = THINK,  # texts around the reasoning
    ) -> None:
        self.tags, self.begun = tags, begun
        self.is_answer = False  # whether the answer has begun
        self._seen = ""  # text that may begin with the tag; within reasoning, its last characters

    def step(self, piece: str) -> tuple[str, str]:
        """Add a piece; return the new text of the reasoning and of the answer."""
        if self.is_answer:
            return "", piece
        if not self.begun:
            piece, self._seen = self._seen + piece, ""
            stripped = piece.lstrip()
            if self.tags.begin.startswith(stripped):
                self._seen = piece
                return "", ""
            self.begun = stripped.startswith(self.tags.begin)
            self.is_answer = not self.begun
            if self.is_answer:
                return "", piece
        text = self._seen + piece
        end = text.find(self.tags.end)
        if end < 0:
            self._seen = text[1 - len(self.tags.end) :]
            return piece, ""
        self.is_answer = True
        cut = end + len(self.tags.end) - len(self._seen)
        return piece[:cut], piece[cut:]

    def flush(self) -> str:
        """End the text, and return the pending text, which belongs to the answer."""
        return "" if self.begun or self.is_answer else self._seen


class ReasoningParser:
    r"""Incremental separation of the reasoning from the answer that follows it.

    Reasoning begins with its tag or, if a template has written that already, at once. White space next to the
    tags belongs to neither part. Without an end, all text is reasoning. The joined parts do not depend on how
    the text is divided into pieces.

    Examples
    --------
    >>> parser = ReasoningParser(ReasoningGate(begun=False))
    >>> parser.step("<think>\nIt is")
    Parsed(reasoning='It is', answer='')
    >>> parser.step(" late.\n</thi")
    Parsed(reasoning=' late.', answer='')
    >>> parser.step("nk>\n\nGood night.")
    Parsed(reasoning='', answer='Good night.')
    """

    def __init__(self, gate: ReasoningGate) -> None:
        self._gate, self.tags = gate, gate.tags
        self._begun, self._ended = gate.begun, False  # whether the tags of the reasoning are known
        self._started = False  # whether the current part has text
        self._space: list[str] = []  # white space that is part of the text only if more text follows
        self._tail = ""  # text that may be the start of the tag that ends the reasoning

    def step(self, piece: str, *, last: bool = False) -> Parsed:
        """Add a piece; return the new text of both parts, with all pending text if it is the `last` piece."""
        text, answer = self._gate.step(piece)
        if last and (pending := self._gate.flush()).lstrip() != self.tags.begin:
            answer += pending
        if text and not self._begun:
            text, self._begun = text.lstrip().removeprefix(self.tags.begin), True
        reasoning = ""
        if self._begun and not self._ended:
            text, self._ended = self._tail + text, self._gate.is_answer
            text = text.removesuffix(self.tags.end) if self._ended else text
            keep = 0 if self._ended or last else _overlap(text, self.tags.end)
            text, self._tail = text[: len(text) - keep], text[len(text) - keep :]
            reasoning = self._stripped(text)
            if self._ended:
                self._started, self._space = False, []
        if self._ended and not self._started:
            answer = answer.lstrip()
            self._started = bool(answer)
        return Parsed(reasoning, answer)

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


def _overlap(text: str, tag: str) -> int:
    """Return the number of characters at the end of a text that may begin a tag."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def begins_in(prompt: str, tags: Tags = THINK) -> bool:
    """Return whether a prompt ends within reasoning."""
    return prompt.rstrip().endswith(tags.begin)
