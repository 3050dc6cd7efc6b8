"""Parser of tool calls in answers, in Hermes tags or as plain JSON.

A chat template describes the tools to the model (``tools`` of
:meth:`metal_prefill.text.Tokenizer.apply_chat_template`), and the model answers in one of two forms::

    <tool_call>{"name": "weather", "arguments": {"city": "Verona"}}</tool_call>
    {"name": "weather", "parameters": {"city": "Verona"}}

Both forms may also contain a list of calls. Everything else, including invalid calls, is text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# Start of JSON that may be a call, ignoring white space.
_KEYS = ("name", "arguments", "parameters", "function", "type", "id")
_BEGINNINGS = tuple(f'{bracket}"{key}"' for bracket in ("{", "[{") for key in _KEYS)
_LONGEST_BEGINNING = 64  # characters, including white space, after which JSON must match the start of a call
_MOST_SPACE = 64  # characters of white space next to a tag
LONGEST_CALL = 1 << 20  # characters from the first bracket of a call to the last; longer JSON is text
MOST_DEPTH = 64  # nesting depth of brackets, which limits how often a character is parsed
_CANDIDATE = re.compile(r"[<{\[]")
_SPACE = re.compile(r"\s*")
_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """Tool call requested by a model.

    Attributes
    ----------
    name : str
        Name of the tool.
    arguments : dict
        Arguments by name, as JSON types.
    id : str or None
        Identifier that the model assigned to the call, if any.
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None

    def as_message(self) -> dict[str, Any]:
        """Return the call as an element of ``tool_calls`` in an assistant message."""
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id, **call}

    @classmethod
    def from_message(cls, call: Mapping[str, Any]) -> ToolCall:
        """Create a call from an element of ``tool_calls``, whose arguments may be JSON text.

        Raises
        ------
        ValueError
            The element is not a valid call.
        """
        found = _call(call, tagged=True)
        if found is None:
            raise ValueError(f"not a tool call: {call!r:.200}")
        return found


class ParsedAnswer(NamedTuple):
    """Text and tool calls of an answer.

    Attributes
    ----------
    text : str
        Everything except the calls, without trailing white space if there are calls.
    calls : list of ToolCall
        Calls in the order of the answer.
    """

    text: str
    calls: list[ToolCall]


def parse_tool_calls(text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> ParsedAnswer:
    """Parse the tool calls in a complete answer.

    Parameters
    ----------
    text
        The answer, without control tokens.
    tools
        Tools passed to the chat template. JSON without tags is a call if it names one of them; None accepts
        any name.

    Raises
    ------
    TypeError, ValueError
        A tool is not a mapping, or has no name.

    Examples
    --------
    >>> parse_tool_calls('Let me check. <tool_call>{"name": "clock", "arguments": {}}</tool_call>')
    ParsedAnswer(text='Let me check.', calls=[ToolCall(name='clock', arguments={}, id=None)])
    """
    parser = ToolCallParser(tools)
    parts = parser.step(text) + parser.flush()
    return ParsedAnswer(
        "".join(part for part in parts if isinstance(part, str)),
        [part for part in parts if isinstance(part, ToolCall)],
    )


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of tools.

    Parameters
    ----------
    tools
        JSON schemas of the form ``{"type": "function", "function": {"name": ..., "description": ...,
        "parameters": ...}}``, or the inner mapping alone.

    Raises
    ------
    TypeError, ValueError
        A tool is not a mapping, or has no name.
    """
    names = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise TypeError(f"tool {i} must be a mapping with a name, got {type(tool).__name__}")
        inner = tool.get("function", tool)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"tool {i} has no name")
        names.append(name)
    return frozenset(names)


class ToolCallParser:
    """Incremental parser of the tool calls in an answer.

    Text that may be the start of a call is held back until this is decided. The joined texts and the calls
    equal those of :func:`parse_tool_calls`, regardless of how the answer is divided into pieces.

    Parameters
    ----------
    tools
        Same as in :func:`parse_tool_calls`.

    Examples
    --------
    >>> parser = ToolCallParser()
    >>> parser.step("Let me check. <tool")
    ['Let me check.']
    >>> parser.step('_call>{"name": "clock", "arguments": {}}')
    [ToolCall(name='clock', arguments={}, id=None)]
    >>> parser.step("</tool_call>") + parser.flush()
    []
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._names = None if tools is None else tool_names(tools)
        self._text = ""  # the answer from `_position` on, without the pieces in `_arrived`
        self._at = 0  # index in `_text` of the first undecided character
        self._position = 0  # position of `_text` in the answer
        self._arrived: list[str] = []  # pieces to append to `_text` once the value may end in them
        self._value: _Value | None = None
        self._brackets = _Brackets()
        self._space: list[
            str
        ] = []  # pending white space, which is part of the text only if more text follows
        self._called = self._after_call = False

    def step(self, piece: str) -> list[str | ToolCall]:
        """Add a piece of the answer and return the texts and calls that are now decided, in order."""
        self._arrived.append(piece)
        if self._value is not None:
            self._brackets.scan(piece)
        return self._advance(final=False)

    def parts(self, pieces: Iterable[str]) -> Iterator[str | ToolCall]:
        """Yield the texts and calls of a whole answer as its pieces arrive."""
        for piece in pieces:
            yield from self.step(piece)
        yield from self.flush()

    def flush(self) -> list[str | ToolCall]:
        """End the answer and return the text and calls that were held back."""
        made = self._advance(final=True)
        if not self._called and self._space:
            made.append("".join(self._space))
        self._space = []
        return made

    def _advance(self, final: bool) -> list[str | ToolCall]:
        if self._value is not None and not final and self._is_open(self._value):
            return []
        self._text = self._text[self._at :] + "".join(self._arrived)
        self._position += self._at
        self._at, self._arrived = 0, []
        made: list[str | ToolCall] = []
        while self._at < len(self._text):
            if self._after_call:
                rest = self._after_space(self._at)
                arrived = len(self._text) - rest
                close_may_come = arrived < len(_CLOSE) and self._text.endswith(_CLOSE[:arrived])
                if not final and close_may_come and rest - self._at <= _MOST_SPACE:
                    break
                self._after_call = False
                if rest - self._at <= _MOST_SPACE and self._text.startswith(_CLOSE, rest):
                    self._at = rest + len(_CLOSE)
                continue
            value = self._value
            if value is None:
                at, value = self._opening(final)
                self._take_text(at - self._at, made)
                self._value = value
                if value is None:
                    break
                self._brackets.begin(value.start)
                self._brackets.scan(self._text[self._brackets.scanned - self._position :])
            if not final and self._is_open(value):
                break
            end = self._brackets.end(value.start)
            limit = value.start + LONGEST_CALL
            calls = None if end is None or end > limit else self._calls(value, end)
            if (end is None or end > limit) and self._brackets.scanned > limit:
                self._take_text(limit - self._position - self._at, made)
            elif end is None or calls is None:
                self._take_text(value.skipped, made)
            else:
                made += calls
                self._at = end - self._position
                self._called = self._after_call = True
            self._value = None
        return _joined(made)

    def _is_open(self, value: _Value) -> bool:
        """Return whether incomplete JSON may still become a call."""
        brackets = self._brackets
        return brackets.end(value.start) is None and brackets.scanned - value.start <= LONGEST_CALL

    def _after_space(self, at: int) -> int:
        """Return the index in `_text` of the first character at or after `at` that is not white space."""
        found = _SPACE.match(self._text, at, at + _MOST_SPACE + 1)
        return at if found is None else found.end()

    def _take_text(self, length: int, made: list[str | ToolCall]) -> None:
        """Append the next characters as text, holding trailing white space back."""
        taken = self._text[self._at : self._at + length]
        self._at += length
        text = taken.rstrip()
        if text:
            made.append("".join([*self._space, text]))
            self._space = []
        if len(text) < length:
            self._space.append(taken[len(text) :])

    def _opening(self, final: bool) -> tuple[int, _Value | None]:
        """Return the index of the next possible call, and its JSON if that has begun."""
        text = self._text
        for match in _CANDIDATE.finditer(text, self._at):
            at = match.start()
            if text.startswith(_OPEN, at):
                start = self._after_space(at + len(_OPEN))
                if start - at - len(_OPEN) > _MOST_SPACE:
                    continue
                if start == len(text):
                    if not final:
                        return at, None
                elif text[start] in "{[":
                    return at, _Value(self._position + start, len(_OPEN), tagged=True)
                continue
            squeezed = "".join(text[at : at + _LONGEST_BEGINNING].split())
            if squeezed.startswith(_BEGINNINGS):
                return at, _Value(self._position + at, 1, tagged=False)
            arrived = len(text) - at
            undecided = arrived < len(_OPEN) and _OPEN.startswith(text[at:])
            undecided |= arrived < _LONGEST_BEGINNING and any(b.startswith(squeezed) for b in _BEGINNINGS)
            if undecided and not final:
                return at, None
        return len(text), None

    def _calls(self, value: _Value, end: int) -> list[ToolCall] | None:
        """Parse complete JSON; return None if it contains no calls."""
        if self._brackets.depth(value.start) > MOST_DEPTH:
            return None
        try:
            found = _read_json(self._text[value.start - self._position : end - self._position])
        except (ValueError, RecursionError):
            return None
        calls = [_call(one, value.tagged) for one in (found if isinstance(found, list) else [found])]
        read = [call for call in calls if call is not None]
        known = value.tagged or self._names is None or all(call.name in self._names for call in read)
        return read if read and len(read) == len(calls) and known else None


def _joined(parts: list[str | ToolCall]) -> list[str | ToolCall]:
    """Join adjacent texts in a list of parts."""
    joined: list[str | ToolCall] = []
    for is_text, group in itertools.groupby(parts, lambda part: isinstance(part, str)):
        same = list(group)
        joined += ["".join(map(str, same))] if is_text else same
    return joined


class _Value(NamedTuple):
    """JSON in brackets that may be a call.

    Attributes
    ----------
    start : int
        Position of the first bracket in the answer.
    skipped : int
        Number of characters to treat as text if the JSON is not a call; the search continues after them.
    tagged : bool
        Whether a tag precedes the JSON.
    """

    start: int
    skipped: int
    tagged: bool


_Parts: TypeAlias = "list[tuple[int, int]]"


class _Brackets:
    """Pairs of matching brackets in an answer, found in a single pass.

    Whether a quote begins or ends a string depends on where the JSON begins. A text thus has two readings,
    each with its own brackets: those after an even number of quotes, and those after an odd number. A value
    that begins at a bracket contains only brackets of the same reading. Whether a quote is escaped does not
    depend on where the JSON begins.

    Attributes
    ----------
    scanned : int
        Position in the answer up to which pairs are known.
    """

    def __init__(self) -> None:
        self.scanned = 0
        self._forget()

    def _forget(self) -> None:
        self._quotes = 0  # modulo 2
        self._escape = ""  # a trailing backslash
        # For each open bracket, the entries that end with it: itself and brackets after a backslash, as
        # (position, 0), and (-1, depth) for each pair inside it. The first list belongs to no bracket.
        self._open: tuple[list[_Parts], list[_Parts]] = ([[]], [[]])
        self._pairs: dict[int, tuple[int, int]] = {}  # end and depth of the value at a position

    def begin(self, start: int) -> None:
        """Register the bracket at which a value begins."""
        if start >= self.scanned:
            self.scanned = start
            self._forget()

    def end(self, start: int) -> int | None:
        """Return the position after the value that begins at a bracket, or None if it is incomplete."""
        return self._pairs[start][0] if start in self._pairs else None

    def depth(self, start: int) -> int:
        """Return the nesting depth of the value that begins at a bracket."""
        return self._pairs[start][1]

    def scan(self, piece: str) -> None:
        """Scan the next characters of the answer, which begin at `scanned`."""
        begin = self.scanned - len(self._escape)
        text, after = self._escape + piece, 0
        for match in _STRUCTURE.finditer(text):
            after = match.end()
            found = match[0]
            if found == '"':
                self._quotes ^= 1
                continue
            opened = self._open[self._quotes]
            if found[0] == "\\":
                if found[1] in "{[":
                    opened[-1].append((begin + after - 1, 0))
            elif found in "{[":
                opened.append([(begin + match.start(), 0)])
            else:
                depth = 1
                for start, inner in reversed(opened.pop()):
                    if start < 0:
                        depth = max(depth, inner + 1)
                    else:
                        self._pairs[start] = begin + after, depth
                if opened:
                    opened[-1].append((-1, depth))
                else:
                    opened.append([])
        self._escape = "\\" if after < len(text) and text[-1] == "\\" else ""
        self.scanned += len(piece)


def _read_json(text: str) -> Any:
    """Parse JSON that can be serialized again: without NaN, numbers beyond float64 and lone surrogates."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    return value


def _call(value: Any, tagged: bool) -> ToolCall | None:
    """Return the call that a mapping describes, or None."""
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return None
    arguments = inner.get("arguments", inner.get("parameters", {} if tagged else None))
    if isinstance(arguments, str):
        try:
            arguments = _read_json(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, Mapping):
        return None
    known_as = value.get("id")
    return ToolCall(inner["name"], dict(arguments), known_as if isinstance(known_as, str) else None)


def parse_arguments(message: dict[Any, Any]) -> dict[Any, Any]:
    """Parse JSON arguments of a message's tool calls in place, because templates expect mappings."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        inner = call.get("function", call) if isinstance(call, dict) else None
        found = _call(call, tagged=True)
        if isinstance(inner, dict) and "arguments" in inner and found is not None:
            inner["arguments"] = found.arguments
    return message
