"""Parser of tool calls in answers, with or without tags.

A chat template describes the tools to the model (``tools`` of
:meth:`metal_prefill.text.Tokenizer.apply_chat_template`), and the model answers in one of these forms::

    <tool_call>{"name": "weather", "arguments": {"city": "Verona"}}</tool_call>
    {"name": "weather", "parameters": {"city": "Verona"}}
    <tool_call><function=weather><parameter=city>Verona</parameter></function></tool_call>
    <|tool_call_start|>[weather(city="Verona"), clock()]<|tool_call_end|>

Any pair of tags, or none, may enclose each of these; JSON may also be a list of calls. Other forms follow a
tag, except the last one::

    [TOOL_CALLS]weather[ARGS]{"city": "Verona"}
    <tool_calls><tool_call>weather
    ```json
    {"city": "Verona"}
    ```</tool_call></tool_calls>
    <function_calls>
    weather(city="Verona")
    clock()
    </function_calls>
    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Verona</arg_value>
    </tool_call>
    <|tool_call>call:weather{city:<|"|>Verona<|"|>}<tool_call|>
    <function=weather>{"city": "Verona"}</function>

Everything else, including invalid calls, is text.
"""

from __future__ import annotations

import itertools
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from metal_prefill.text._json_calls import MOST_DEPTH, Brackets, checked, read_json
from metal_prefill.text._written_calls import (
    GLM,
    QWEN,
    STRING_MARKS,
    ElementScanner,
    MarkedScanner,
    PythonScanner,
    Scanner,
    types_of,
)

_FENCE = "```"
_TAGS = {
    "<tool_call>": "</tool_call>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "[TOOL_CALLS]": "",
    "<tool_calls>": "</tool_calls>",
    "<function_calls>": "</function_calls>",
    f"{_FENCE}tool_code": _FENCE,
    "<|tool_call>": "<tool_call|>",
    "<start_function_call>": "<end_function_call>",
    "<|START_ACTION|>": "<|END_ACTION|>",
}
_MARKED = "call:"  # before a call with marks around its strings
_INNER_TAGS = {_MARKED: "", f"{_FENCE}python": _FENCE}  # after a tag
_CLOSE = tuple(tag for tag in _TAGS.values() if tag not in ("", _FENCE))
# Between the name of a call and its arguments.
_ID, _ARGUMENTS, _JSON = "[CALL_ID]", "[ARGS]", f"{_FENCE}json"
_ELEMENT_MARKS = ("<arg_key>", GLM.end)
_AFTER_NAME = (_ID, _ARGUMENTS, _JSON, *_ELEMENT_MARKS)
# Marks that are control tokens in some vocabularies.
MARKS = frozenset({*_TAGS, *_CLOSE, _ID, _ARGUMENTS, *STRING_MARKS})
_MOST_TAGS = 2  # one within another
# Start of JSON that may be a call, ignoring white space.
_KEYS = ("name", "arguments", "parameters", "function", "type", "id")
_BEGINNINGS = tuple(f'{bracket}"{key}"' for bracket in ("{", "[{") for key in _KEYS)
_LONGEST_BEGINNING = 64  # characters, including white space, after which JSON must match the start of a call
_MOST_SPACE = 64  # characters of white space next to a tag
LONGEST_CALL = 1 << 20  # characters from the first bracket of a call to the last; longer JSON is text
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_LONGEST_NAME = 256
_CANDIDATE = re.compile(r"[<{\[`]")
_SPACE = re.compile(r"\s*")
_IN_ELEMENTS = re.compile(rf"{_FUNCTION}([^<>\s]{{0,{_LONGEST_NAME}}})(>?)")
_IN_LIST = re.compile(rf"\[\s{{0,{_MOST_SPACE}}}([\w.-]{{0,{_LONGEST_NAME}}})\s{{0,{_MOST_SPACE}}}(\(?)")
# After a tag: the name of a call, its id, and the mark before its arguments.
_HEAD = re.compile(
    rf"([\w.-]{{1,{_LONGEST_NAME}}})(?:{re.escape(_ID)}(\w{{1,{_LONGEST_NAME}}}))?(?:{re.escape(_ARGUMENTS)})?"
    rf"\s{{0,{_MOST_SPACE}}}(?:({_JSON})\s{{0,{_MOST_SPACE}}})?"
)


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

    @property
    def with_id(self) -> ToolCall:
        """The call with an id: its own, or a new one."""
        return self if self.id is not None else replace(self, id=new_call_id())

    @classmethod
    def from_message(cls, call: Mapping[str, Any]) -> ToolCall:
        """Create a call from an element of ``tool_calls``, whose arguments may be JSON text.

        Raises
        ------
        ValueError
            The element is not a valid call.
        """
        try:
            return _call(call, tagged=True)
        except ValueError as error:
            raise ValueError(f"not a tool call: {call!r:.200}: {error}") from None


def new_call_id() -> str:
    """Return a random id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


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
        The answer, without control tokens or with those of calls.
    tools
        Tools passed to the chat template. A call without tags must name one of them, and the values of a call
        in elements have the types of its parameters. None accepts any name, but no Python without tags.

    Raises
    ------
    TypeError, ValueError
        A tool is not a mapping, or has no name.

    Examples
    --------
    >>> parse_tool_calls('Let me check. <tool_call>{"name": "clock", "arguments": {}}</tool_call>')
    ParsedAnswer(text='Let me check.', calls=[ToolCall(name='clock', arguments={}, id=None)])
    """
    parts = ToolCallParser(tools).step(text, last=True)
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
    >>> parser.step("</tool_call>", last=True)
    []
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._names = None if tools is None else tool_names(tools)
        self._types = {name: types_of(tool) for tool in tools or () for name in tool_names([tool])}
        self._text = ""  # the answer from `_position` on, without the pieces in `_arrived`
        self._at = 0  # index in `_text` of the first undecided character
        self._position = 0  # position of `_text` in the answer
        self._arrived: list[str] = []  # pieces to append to `_text` once the value may end in them
        self._value: _Value | None = None
        self._brackets = Brackets()
        # Pending white space, which is part of the text only if more text follows.
        self._space: list[str] = []
        self._called = self._after_call = False
        self._closing: tuple[str, ...] = ()  # texts that end the last call, in addition to tags
        self._in_lines = False  # the last call is in Python without brackets, and may be followed by others

    def step(self, piece: str, *, last: bool = False) -> list[str | ToolCall]:
        """Add a piece of the answer and return the texts and calls that are now decided, in order.

        With the `last` piece, the rest is decided, too.
        """
        self._arrived.append(piece)
        if self._value is not None:
            self._scan(self._value, piece)
        made = self._advance(last)
        if last and self._space and not self._called:
            made.append("".join(self._space))
        return made

    def _advance(self, final: bool) -> list[str | ToolCall]:
        if self._value is not None and not final and self._is_open(self._value):
            return []
        self._text = self._text[self._at :] + "".join(self._arrived)
        self._position += self._at
        self._at, self._arrived = 0, []
        made: list[str | ToolCall] = []
        while self._at < len(self._text):
            if self._after_call and not self._end_call(final):
                break
            value = self._value
            if value is None:
                at, value = self._opening(final)
                self._take_text(at - self._at, made)
                self._value = value
                if value is None:
                    break
                self._begin(value)
            if not final and self._is_open(value):
                break
            length, calls = self._read(value)
            if calls is None:
                self._take_text(length, made)
            else:
                made += calls
                self._at += length
                self._called = self._after_call = True
                self._closing = value.closing
                self._in_lines = value.in_lines
            self._value = None
        return _joined(made)

    def _end_call(self, final: bool) -> bool:
        """Take the text that closes the last call; return False while that is undecided.

        The value of a call that follows without a tag is begun.
        """
        closings = (*_CLOSE, *self._closing)
        while self._after_call:
            begin = rest = self._after_space(self._at)
            if self._text[rest : rest + 1] == "}":  # small models close one bracket too many
                rest = self._after_space(rest + 1)
            near = rest - self._at <= 2 * _MOST_SPACE
            arrived = self._text[rest : rest + max(map(len, closings))]
            if not final and near and any(c.startswith(arrived) and c != arrived for c in closings):
                return False
            closing = next((c for c in closings if arrived.startswith(c)), "")
            if near and closing:
                self._at = rest + len(closing)
                continue
            value = self._headed(begin, 0, self._closing) if near and self._in_lines else None
            if value is _UNDECIDED and not final:
                return False
            self._after_call = False
            if isinstance(value, _Value) and value.scanner is not None:
                self._value = value
                self._begin(value)
        return True

    def _begin(self, value: _Value) -> None:
        """Scan the part of a value that has arrived."""
        first = value.start
        if value.scanner is None:
            if first >= self._brackets.scanned:
                self._brackets = Brackets(first)
            first = self._brackets.scanned
        self._scan(value, self._text[first - self._position :])

    def _scan(self, value: _Value, piece: str) -> None:
        """Take the next characters of a value; those of a call that is not JSON up to the limit."""
        if value.scanner is None:
            self._brackets.scan(piece)
        elif value.scanner.end is None:
            value.scanner.scan(piece[: LONGEST_CALL - value.scanner.scanned])

    def _is_open(self, value: _Value) -> bool:
        """Return whether an incomplete value may still become a call."""
        if value.scanner is not None:
            return value.scanner.end is None and value.scanner.scanned < LONGEST_CALL
        scanned = self._brackets.scanned - value.start
        return value.start not in self._brackets.pairs and scanned <= LONGEST_CALL

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
        """Return the index of the next possible call, and its value if that has begun."""
        for match in _CANDIDATE.finditer(self._text, self._at):
            value = self._begun(match.start())
            if value is _UNDECIDED and not final:
                return match.start(), None
            if isinstance(value, _Value):
                return match.start(), value
        return len(self._text), None

    def _begun(self, at: int) -> _Value | object | None:
        """Return the value that begins at an index, after a tag or without one; None, or `_UNDECIDED`."""
        text, start, tags = self._text, at, list[str]()
        possible = _TAGS
        while len(tags) < _MOST_TAGS and (
            tag := next((t for t in possible if text.startswith(t, start)), "")
        ):
            tags.append(tag)
            possible = _TAGS | _INNER_TAGS
            start = self._after_space(end := start + len(tag))
            if start - end > _MOST_SPACE:
                return None
        arrived = text[start : start + _LONGEST_BEGINNING]
        if not arrived or any(tag.startswith(arrived) for tag in possible):
            return _UNDECIDED
        closing = (_FENCE,) if any(possible[tag] == _FENCE for tag in tags) else ()
        written = self._written(start, at, bool(tags), closing)
        if written is not None:
            return written
        if tags and arrived[0] in "{[":
            return _Value(self._position + start, True, closing, skipped=start - at)
        if tags:
            return self._headed(start, start - at, closing, marked=_MARKED in tags)
        squeezed = "".join(arrived.split())
        if squeezed.startswith(_BEGINNINGS):
            return _Value(self._position + at, tagged=False)
        undecided = len(arrived) < _LONGEST_BEGINNING and any(b.startswith(squeezed) for b in _BEGINNINGS)
        return _UNDECIDED if undecided else None

    def _headed(
        self, start: int, skipped: int, closing: tuple[str, ...], marked: bool = False
    ) -> _Value | object | None:
        """Return the call that begins with its name after a tag or another call; None, or `_UNDECIDED`."""
        head = _HEAD.match(self._text, start)
        if head is None:
            return None
        rest = self._text[head.end() : head.end() + max(map(len, _AFTER_NAME))]
        if rest.startswith(_ELEMENT_MARKS):
            has_arguments = not rest.startswith(GLM.end)
            if has_arguments or self._names is None or head[1] in self._names:
                return _Value(self._position + start, True, closing, ElementScanner(GLM, self._types))
        elif not rest or any(mark.startswith(rest) for mark in _AFTER_NAME):
            return _UNDECIDED
        if rest[0] == "{" and marked:
            return _Value(self._position + start, True, closing, MarkedScanner())
        if rest[0] == "(":
            return _Value(self._position + start, True, closing, PythonScanner(), in_lines=True)
        if rest[0] != "{":
            return None
        closing = (*closing, *([_FENCE] if head[3] else []))
        skipped += head.end() - start
        return _Value(self._position + head.end(), True, closing, skipped=skipped, name=head[1], id=head[2])

    def _written(self, start: int, at: int, tagged: bool, closing: tuple[str, ...]) -> _Value | object | None:
        """Return the call in elements, or list in Python, that begins at an index; None, or `_UNDECIDED`.

        `at` is the index of the tag, if there is one.
        """
        text = self._text
        elements = text.startswith("<", start)
        arrived = text[start : start + len(_FUNCTION)]
        if elements and arrived != _FUNCTION and _FUNCTION.startswith(arrived):
            return _UNDECIDED
        found = (_IN_ELEMENTS if elements else _IN_LIST).match(text, start)
        if found is None:
            return None
        name, is_whole = found[1], bool(found[2])
        if tagged or (elements and self._names is None):
            known = bool(name) or not is_whole
        elif is_whole:
            known = name in (self._names or ())
        else:
            known = any(other.startswith(name) for other in self._names or ())
        if not known or (not is_whole and found.end() < len(text)):
            return None
        inner = self._after_space(found.end())
        if not is_whole or (elements and inner == len(text)):
            return _UNDECIDED
        if elements and text[inner] == "{":
            closing = (*closing, _END_FUNCTION)
            return _Value(self._position + inner, tagged, closing, skipped=inner - at, name=name)
        scanner = ElementScanner(QWEN, self._types) if elements else PythonScanner()
        return _Value(self._position + start, tagged, closing, scanner)

    def _read(self, value: _Value) -> tuple[int, list[ToolCall] | None]:
        """Return the number of characters to take, and the calls in them; None if they are text."""
        if value.scanner is not None:
            return self._read_written(value, value.scanner)
        limit = value.start + LONGEST_CALL
        end, depth = self._brackets.pairs.get(value.start, (limit + 1, 0))
        if end > limit and self._brackets.scanned > limit:
            return limit - self._position - self._at, None
        if end > limit or depth > MOST_DEPTH:
            return value.skipped, None
        try:
            found = read_json(self._text[value.start - self._position : end - self._position])
            if value.name is not None:
                found = {"name": value.name, "arguments": found, "id": value.id}
            calls = [_call(one, value.tagged) for one in (found if isinstance(found, list) else [found])]
        except ValueError:
            return value.skipped, None
        if not calls or not self._knows(value, calls):
            return value.skipped, None
        return end - self._position - self._at, calls

    def _read_written(self, value: _Value, scanner: Scanner) -> tuple[int, list[ToolCall] | None]:
        begin, end = value.start - self._position, scanner.end
        if end is None:
            return begin + scanner.scanned - self._at, None
        try:
            written = scanner.calls(self._text[begin : begin + end])
            calls = [ToolCall(name, checked(arguments)) for name, arguments in written]
        except (ValueError, RecursionError):
            return begin + end - self._at, None
        return begin + end - self._at, calls if self._knows(value, calls) else None

    def _knows(self, value: _Value, calls: list[ToolCall]) -> bool:
        """Return whether calls may be these: without a tag, they must be of known tools, if any are known."""
        return value.tagged or self._names is None or all(call.name in self._names for call in calls)


def _joined(parts: list[str | ToolCall]) -> list[str | ToolCall]:
    joined: list[str | ToolCall] = []
    for is_text, group in itertools.groupby(parts, lambda part: isinstance(part, str)):
        same = list(group)
        joined += ["".join(map(str, same))] if is_text else same
    return joined


class _Value(NamedTuple):
    """Text that may be calls."""

    start: int  # position of its first character in the answer
    tagged: bool  # whether a tag precedes it
    closing: tuple[str, ...] = ()  # texts that end the call, in addition to tags
    scanner: Scanner | None = None  # finds the end; None for JSON, whose brackets do
    # Of JSON, the number of characters to treat as text if it is not a call; the search continues after them.
    skipped: int = 1
    # Name and id of a call whose arguments are the JSON.
    name: str | None = None
    id: str | None = None
    in_lines: bool = False  # whether this is one call in Python without brackets


_UNDECIDED = object()


def _call(value: Any, tagged: bool) -> ToolCall:
    """Return a call in JSON; raises ValueError for another value."""
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    if isinstance(inner, Mapping):
        name = inner.get("name", inner.get("tool_name"))  # the latter in answers of Command R7B
        given = [inner[key] for key in ("arguments", "parameters") if key in inner]
        arguments = (given[0] or {}) if given else ({} if tagged else None)
        arguments = read_json(arguments) if isinstance(arguments, str) else arguments
        if isinstance(name, str) and isinstance(arguments, Mapping):
            known_as = value.get("id")
            return ToolCall(name, dict(arguments), known_as if isinstance(known_as, str) else None)
    raise ValueError("its name is not a string, or its arguments are not an object")
