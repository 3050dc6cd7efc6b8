"""Calls of tools in an answer, as models write them: Hermes tags, or JSON alone.

Models are told of tools by their chat template (``tools`` of
:meth:`metal_prefill.tokenizer.Tokenizer.apply_chat_template`), and answer in one of two ways::

    <tool_call>{"name": "weather", "arguments": {"city": "Verona"}}</tool_call>
    {"name": "weather", "parameters": {"city": "Verona"}}

Both are read, also as a list of calls. What is around calls is text, and so is what only looks like a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# How JSON begins that may be a call; white space does not count.
_KEYS = ("name", "arguments", "parameters", "function", "type", "id")
_BEGINNINGS = tuple(f'{bracket}"{key}"' for bracket in ("{", "[{") for key in _KEYS)
_LONGEST_BEGINNING = 64  # characters, white space included, by which JSON has shown whether it may be a call
_CANDIDATE = re.compile(r"[<{\[]")
_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that a model asks for.

    Attributes
    ----------
    name : str
        Of the tool.
    arguments : dict
        By name, of JSON's types.
    id : str or None
        What the model calls this call, where it does.
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None

    def as_message(self) -> dict[str, Any]:
        """Return the call as an element of ``tool_calls`` in an assistant's message."""
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id, **call}

    @classmethod
    def from_message(cls, call: Mapping[str, Any]) -> ToolCall:
        """Read an element of ``tool_calls``; its arguments may be JSON.

        Raises
        ------
        ValueError
            It is not a call.
        """
        found = _call(call, tagged=True)
        if found is None:
            raise ValueError(f"not a call of a tool: {call!r:.200}")
        return found


class ParsedAnswer(NamedTuple):
    """An answer, taken apart.

    Attributes
    ----------
    text : str
        All that is not a call, without white space at the end if there are calls.
    calls : list of ToolCall
        In the order of the answer.
    """

    text: str
    calls: list[ToolCall]


def parse_tool_calls(text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> ParsedAnswer:
    """Find the calls in a finished answer.

    Parameters
    ----------
    text
        The answer, without control tokens.
    tools
        Those that the template was given. JSON without tags is a call if it names one of them; None: any.

    Raises
    ------
    TypeError, ValueError
        A tool is not a mapping, or has no name.

    Examples
    --------
    >>> parse_tool_calls('I look. <tool_call>{"name": "clock", "arguments": {}}</tool_call>')
    ParsedAnswer(text='I look.', calls=[ToolCall(name='clock', arguments={}, id=None)])
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
        Each as JSON schema: ``{"type": "function", "function": {"name": ..., "description": ...,
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
    """Finds calls in an answer while it is made.

    Text that may be the beginning of a call is held back until that is clear. However an answer is cut into
    pieces, the texts together and the calls are those of :func:`parse_tool_calls`.

    Parameters
    ----------
    tools
        As for :func:`parse_tool_calls`.

    Examples
    --------
    >>> parser = ToolCallParser()
    >>> parser.step("I look. <tool")
    ['I look.']
    >>> parser.step('_call>{"name": "clock", "arguments": {}}')
    [ToolCall(name='clock', arguments={}, id=None)]
    >>> parser.step("</tool_call>") + parser.flush()
    []
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._names = None if tools is None else tool_names(tools)
        self._pending = ""  # not yet text or call; where `_value` is set, it begins like a call
        self._value: _Value | None = None
        self._space = ""  # white space that stands before the next text, if there is any
        self._called = self._after_call = False

    def step(self, piece: str) -> list[str | ToolCall]:
        """Take a piece of the answer and return, in order, what is certain now: texts and calls."""
        self._pending += piece
        return self._advance(final=False)

    def parts(self, pieces: Iterable[str]) -> Iterator[str | ToolCall]:
        """Yield texts and calls of a whole answer, as its pieces come."""
        for piece in pieces:
            yield from self.step(piece)
        yield from self.flush()

    def flush(self) -> list[str | ToolCall]:
        """End the answer and return what was held back: no call comes of it any more."""
        made = self._advance(final=True)
        if not self._called and self._space:
            made.append(self._space)
        self._space = ""
        return made

    def _advance(self, final: bool) -> list[str | ToolCall]:
        made: list[str | ToolCall] = []
        while self._pending:
            if self._after_call:
                rest = self._pending.lstrip()
                if not final and len(rest) < len(_CLOSE) and _CLOSE.startswith(rest):
                    break
                self._after_call = False
                if rest.startswith(_CLOSE):
                    self._pending = rest[len(_CLOSE) :]
                continue
            value = self._value
            if value is None:
                at, value = self._opening(final)
                self._take_text(at, made)
                self._value = value
                if value is None:
                    break
            end = value.end(self._pending)
            if end is None and not final:
                break
            calls = None if end is None else self._calls(value, end)
            if calls is None:
                self._take_text(value.skipped, made)
            else:
                made += calls
                self._pending = self._pending[end:]
                self._called = self._after_call = True
            self._value = None
        return made

    def _take_text(self, length: int, made: list[str | ToolCall]) -> None:
        """Make text of what is pending, but for white space at its end."""
        taken, self._pending = self._pending[:length], self._pending[length:]
        text = taken.rstrip()
        if text:
            text, self._space = self._space + text, ""
            if made and isinstance(made[-1], str):
                made[-1] += text
            else:
                made.append(text)
        self._space += taken[len(taken.rstrip()) :]

    def _opening(self, final: bool) -> tuple[int, _Value | None]:
        """Return where something begins that is or may become a call, and its JSON if that has begun."""
        for match in _CANDIDATE.finditer(self._pending):
            at = match.start()
            rest = self._pending[at:]
            tagged = rest.startswith(_OPEN)
            value = rest[len(_OPEN) :].lstrip() if tagged else rest
            if tagged and value:
                if value[0] in "{[":
                    return at, _Value(len(rest) - len(value), len(_OPEN))
                continue
            squeezed = "".join(rest[:_LONGEST_BEGINNING].split())
            if not tagged and squeezed.startswith(_BEGINNINGS):
                return at, _Value(0, 1)
            undecided = tagged or _OPEN.startswith(rest)
            undecided |= len(rest) < _LONGEST_BEGINNING and any(b.startswith(squeezed) for b in _BEGINNINGS)
            if undecided and not final:
                return at, None
        return len(self._pending), None

    def _calls(self, value: _Value, end: int) -> list[ToolCall] | None:
        """Read JSON that has ended; None if it holds no calls."""
        try:
            found = json.loads(self._pending[value.start : end], parse_constant=_refuse)
            json.dumps(found, ensure_ascii=False).encode("utf-8")  # lone surrogates are not text
        except (ValueError, RecursionError):
            return None
        tagged = value.start > 0
        calls = [_call(one, tagged) for one in (found if isinstance(found, list) else [found])]
        read = [call for call in calls if call is not None]
        known = tagged or self._names is None or all(call.name in self._names for call in read)
        return read if read and len(read) == len(calls) and known else None


class _Value:
    """JSON in brackets that arrives in pieces.

    Attributes
    ----------
    start : int
        Where its first bracket is.
    skipped : int
        Characters that are text for certain, if it is not a call: the search continues after them.
    """

    def __init__(self, start: int, skipped: int) -> None:
        self.start, self.skipped = start, skipped
        self._scanned, self._depth, self._in_string = start, 0, False

    def end(self, text: str) -> int | None:
        """Return where its last bracket ends, or None if that has not come."""
        for match in _STRUCTURE.finditer(text, self._scanned):
            self._scanned = match.end()
            if match[0] == '"':
                self._in_string = not self._in_string
            elif self._in_string or match[0][0] == "\\":
                continue
            elif match[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return self._scanned
        self._scanned = max(self._scanned, len(text) - 1)  # a backslash there may escape what comes next
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _call(value: Any, tagged: bool) -> ToolCall | None:
    """Return the call that a mapping describes, if it does."""
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return None
    arguments = inner.get("arguments", inner.get("parameters", {} if tagged else None))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, Mapping):
        return None
    known_as = value.get("id")
    return ToolCall(inner["name"], dict(arguments), known_as if isinstance(known_as, str) else None)


def parse_arguments(message: dict[Any, Any]) -> dict[Any, Any]:
    """Make mappings of a message's arguments where they are JSON, in place: templates expect mappings."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        inner = call.get("function", call) if isinstance(call, dict) else None
        found = _call(call, tagged=True)
        if isinstance(inner, dict) and "arguments" in inner and found is not None:
            inner["arguments"] = found.arguments
    return message
