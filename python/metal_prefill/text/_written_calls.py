"""Calls that are not JSON: elements, as Qwen3.5 and GLM write them, Python, as LFM2 does, and Gemma 4's form.

`_tool_calls` shows these forms. Other models write one call in Python after another, without brackets. A
scanner finds where such calls end, in a single pass over the pieces of an answer. The text of the calls is
then parsed once, and rejected text is not examined again.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from metal_prefill.text._json_calls import read_json

MOST_DEPTH = 64  # nesting depth of brackets, which limits how often a character is parsed
STRING_MARKS = ('<|"|>', "<escape>")  # around strings in calls of Gemma 4 and FunctionGemma
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


WrittenCall: TypeAlias = tuple[str, dict[str, Any]]  # name and arguments of a call


def types_of(tool: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the JSON types of a tool's parameters, by name; none if the schema names no type."""
    parameters = tool.get("function", tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {str(name): frozenset(_schema_types(schema)) for name, schema in properties.items()}


def _schema_types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    types = schema.get("type")
    yield from (kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str))
    for key in ("anyOf", "oneOf"):
        for part in schema.get(key, ()) if isinstance(schema.get(key), list) else ():
            yield from _schema_types(part)


def _typed(text: str, types: frozenset[str]) -> Any:
    """Convert the text of a parameter to a value of one of its types, or of any type if these are unknown."""
    if types == {"string"}:
        return text
    try:
        value = _WORDS[text] if text in _WORDS else read_json(text)
    except (ValueError, RecursionError):
        return text
    kinds = {
        bool: {"boolean"},
        int: {"integer", "number"},
        float: {"number"},
        list: {"array"},
        dict: {"object"},
        type(None): {"null"},
    }.get(type(value), set())
    return value if kinds and (not types or kinds & types) else text


def _valid(calls: list[WrittenCall]) -> list[WrittenCall] | None:
    """Return calls that can be written as JSON, which lacks infinity and lone surrogates; None otherwise."""
    try:
        json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return None
    return calls


class Scanner:
    """Finds the end of calls by marks in them."""

    _LONGEST_MARK = 212

    def __init__(self, mark: re.Pattern[str]) -> None:
        self.end: int | None = None  # number of characters of the calls; None while they are open
        self.scanned = 0  # number of characters taken
        self._mark = mark
        self._rest = ""  # the last characters, which may begin a mark

    def scan(self, piece: str) -> None:
        """Take the next characters."""
        text, after = self._rest + piece, 0
        begin, self.scanned = self.scanned - len(self._rest), self.scanned + len(piece)
        for mark in self._mark.finditer(text):
            after = mark.end()
            if self._ends(mark[0]):
                self.end = begin + after
                return
        last = text.rfind("<", max(after, len(text) - self._LONGEST_MARK))
        self._rest = text[last:] if last >= 0 else ""

    def _ends(self, mark: str) -> bool:
        """Take the next mark; return whether it ends the calls."""
        raise NotImplementedError

    def calls(self, text: str) -> list[WrittenCall] | None:
        """Parse complete text; return None if it is not a call."""
        raise NotImplementedError


class Elements(NamedTuple):
    """A form of calls in elements."""

    # The beginning, with the name as its group; an argument, with its name and value.
    begin: re.Pattern[str]
    argument: re.Pattern[str]
    mark: re.Pattern[str]  # tags around a value, and the end
    end: str


QWEN = Elements(
    re.compile(r"<function=([^<>\s]+)>\s*"),
    re.compile(r"<parameter=([^<>\s]{1,200})>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
    re.compile(r"<parameter=[^<>\s]{1,200}>|</parameter>|</function>"),
    "</function>",
)
GLM = Elements(
    re.compile(r"([\w.-]+)\s*"),
    re.compile(r"<arg_key>([^<>\s]{1,200})</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL),
    re.compile(r"<arg_value>|</arg_value>|</tool_call>"),
    "</tool_call>",
)


class ElementScanner(Scanner):
    def __init__(
        self,
        form: Elements,  # tags of the elements
        # JSON types of the parameters of each tool. A value is text, unless these allow another type or are
        # unknown.
        types: Mapping[str, Mapping[str, frozenset[str]]],
    ) -> None:
        super().__init__(form.mark)
        self._form = form
        self._types = types
        self._inside = False  # a value

    def _ends(self, mark: str) -> bool:
        if mark == self._form.end:
            return not self._inside
        self._inside = not mark.startswith("</")
        return False

    def calls(self, text: str) -> list[WrittenCall] | None:
        begin = self._form.begin.match(text)
        if begin is None:
            return None
        arguments, at = {}, begin.end()
        types = self._types.get(begin[1], {})
        while (found := self._form.argument.match(text, at)) is not None:
            arguments[found[1]] = _typed(found[2], types.get(found[1], frozenset()))
            at = found.end()
        return _valid([(begin[1], arguments)]) if text[at:] == self._form.end else None


_MARKED_STRING = "|".join(rf"{mark}(.*?){mark}" for mark in map(re.escape, STRING_MARKS))


class MarkedScanner(Scanner):
    """Scanner of a call whose arguments are JSON with bare names and with marks around strings."""

    _MARK = re.compile(rf"{'|'.join(map(re.escape, STRING_MARKS))}|[{{}}\[\]]")
    _BEGIN = re.compile(r"[\w.-]+\s*(?={)")
    # A string; another value, or a name if there is the last group.
    _PART = re.compile(rf"{_MARKED_STRING}|([^\s{{}}\[\]:,<\"]+)(\s*:)?", re.DOTALL)

    def __init__(self) -> None:
        super().__init__(self._MARK)
        self._quote = ""  # around the string that is open
        self._depth = self._most_depth = 0

    def _ends(self, mark: str) -> bool:
        if mark in STRING_MARKS:
            self._quote = mark if not self._quote else "" if mark == self._quote else self._quote
        elif not self._quote:
            self._depth += 1 if mark in "{[" else -1
            self._most_depth = max(self._depth, self._most_depth)
            return self._depth == 0
        return False

    def calls(self, text: str) -> list[WrittenCall] | None:
        name = self._BEGIN.match(text)
        if name is None or self._most_depth > MOST_DEPTH:
            return None
        try:
            arguments = read_json(self._PART.sub(_as_json, text[name.end() :]))
        except ValueError:
            return None
        return _valid([(name[0].rstrip(), arguments)])


def _as_json(part: re.Match[str]) -> str:
    """Return a string, name or value of a call with marks as JSON."""
    *strings, word, colon = part.groups()
    if word is None:
        return json.dumps(next(string for string in strings if string is not None), ensure_ascii=False)
    if colon is not None:
        return json.dumps(word, ensure_ascii=False) + colon
    return json.dumps(_WORDS[word]) if word in _WORDS else word


_OUTSIDE = re.compile(r"[\"'()\[\]{}]")
_WITHIN = {quote: re.compile(rf"\\|{quote}") for quote in "\"'"}
_AFTER_STRING = ",:)]}"


class PythonScanner(Scanner):
    """Finds the end of a list of calls in Python's syntax, or of one call.

    Templates may write text between quotes as it is. A quote therefore ends a string only if a comma, a colon
    or a closing bracket follows it.
    """

    def __init__(self) -> None:
        super().__init__(_OUTSIDE)
        self._depth = 0
        self._quote = ""  # of the string that is open
        self._begin = 0  # of that string, after its quote
        self._escaped = False  # the next character follows a backslash
        self._last_quote: int | None = None  # position of a quote after which nothing but space has arrived
        self._strings: dict[int, int] = {}  # first and last position of each string, without quotes

    def scan(self, piece: str) -> None:
        base, at = self.scanned, 0
        self.scanned += len(piece)
        while at < len(piece):
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._last_quote is not None:
                if piece[at].isspace():
                    at += 1
                    continue
                if piece[at] in _AFTER_STRING:
                    self._strings[self._begin] = self._last_quote
                    self._quote = ""
                self._last_quote = None
            elif (found := (_WITHIN[self._quote] if self._quote else self._mark).search(piece, at)) is None:
                return
            else:
                at = found.end()
                self._take(found[0], base + found.start())
                if self.end is not None:
                    return

    def _take(self, character: str, position: int) -> None:
        """Take a quote, a bracket, or a backslash in a string."""
        if self._quote:
            if character == "\\":
                self._escaped = True
            else:
                self._last_quote = position
        elif character in "\"'":
            self._quote, self._begin = character, position + 1
        else:
            self._depth += 1 if character in "([{" else -1
            if self._depth == 0:
                self.end = position + 1

    def calls(self, text: str) -> list[WrittenCall] | None:
        """Parse complete text; return None if it is not a call, or list of calls, with named arguments."""
        try:
            return _valid(_PythonReader(text, self._strings).calls())
        except ValueError:
            return None


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{c: c for c in "\\\"'/"}}
_CLOSING = {"[": "]", "(": ")"}


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    return chr(int(code, 16)) if code else _ESCAPED.get(match[3], match[0])


class _PythonReader:
    """Recursive descent over a call, or a list of calls; `ValueError` ends it."""

    _SPACE = re.compile(r"\s*")
    _NAME = re.compile(r"[A-Za-z_][\w.-]*")
    _PRINT = re.compile(r"\s*print\s*\(\s*(?=[A-Za-z_][\w.-]*\s*\()")
    _NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")

    def __init__(self, text: str, strings: Mapping[int, int]) -> None:
        self._text = text
        self._strings = strings
        self._at = 0

    def calls(self) -> list[WrittenCall]:
        is_list = self._text.startswith("[")
        calls = [self._call() for _ in self._items("[", "]")] if is_list else [self._call()]
        if self._at != len(self._text) or not calls:
            raise ValueError("text after the calls, or no call")
        return calls

    def _call(self) -> WrittenCall:
        """Take a call, which may be the argument of ``print``."""
        printed = self._PRINT.match(self._text, self._at)
        if printed is not None:
            self._at = printed.end()
        call = self._plain_call()
        if printed is not None:
            self._expect(")")
        return call

    def _plain_call(self) -> WrittenCall:
        name = self._word()
        arguments: dict[str, Any] = {}
        for _ in self._items("(", ")"):
            key = self._word()
            self._expect("=")
            if key in arguments:
                raise ValueError(f"{key} is repeated")
            arguments[key] = self._value(1)
        return name, arguments

    def _value(self, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise ValueError("nested too deeply")
        self._skip_space()
        character = self._text[self._at : self._at + 1]
        if character == "{":
            return self._mapping(depth)
        if character in _CLOSING:
            return [self._value(depth + 1) for _ in self._items(character, _CLOSING[character])]
        if character in ("'", '"'):
            return self._string()
        if (number := self._NUMBER.match(self._text, self._at)) is not None:
            self._at = number.end()
            return float(number[0]) if number[1] or number[2] else int(number[0])
        word = self._word()
        if word not in _WORDS:
            raise ValueError(f"{word} is not a value")
        return _WORDS[word]

    def _mapping(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in self._items("{", "}"):
            key = self._string()
            self._expect(":")
            values[key] = self._value(depth + 1)
        return values

    def _string(self) -> str:
        begin = self._at + 1
        end = self._strings.get(begin)
        if end is None:
            raise ValueError("no string")
        self._at = end + 1
        text = _ESCAPE.sub(_unescaped, self._text[begin:end])
        return text.encode("utf-16", "surrogatepass").decode("utf-16")  # no lone surrogates

    def _word(self) -> str:
        self._skip_space()
        word = self._NAME.match(self._text, self._at)
        if word is None:
            raise ValueError("no name")
        self._at = word.end()
        return word[0]

    def _skip_space(self) -> None:
        space = self._SPACE.match(self._text, self._at)
        self._at = self._at if space is None else space.end()

    def _expect(self, character: str) -> None:
        self._skip_space()
        if not self._text.startswith(character, self._at):
            raise ValueError(f"no {character}")
        self._at += 1

    def _items(self, opening: str, closing: str) -> Iterator[None]:
        """Take an opening bracket, yield where each element begins, and take the closing bracket."""
        self._expect(opening)
        self._skip_space()
        while not self._text.startswith(closing, self._at):
            yield
            self._skip_space()
            if self._text.startswith(",", self._at):
                self._at += 1
                self._skip_space()
            elif not self._text.startswith(closing, self._at):
                raise ValueError(f"no {closing}")
        self._at += 1
