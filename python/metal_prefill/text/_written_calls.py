"""Calls that are not JSON: elements, as Qwen3.5 and GLM write them, Python, as LFM2 does, and Gemma 4's form.

`_tool_calls` shows these forms. Other models write one call in Python after another, without brackets. A
scanner finds where such calls end, in a single pass over the pieces of an answer. The text of the calls is
then parsed once, and rejected text is not examined again.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from metal_prefill.text._json_calls import read_json

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
    except ValueError:
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

    def calls(self, text: str) -> list[WrittenCall]:
        """Parse complete text; raises ValueError or RecursionError if it is not a call."""
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

    def calls(self, text: str) -> list[WrittenCall]:
        begin = self._form.begin.match(text)
        if begin is None:
            raise ValueError("no name")
        arguments, at = {}, begin.end()
        types = self._types.get(begin[1], {})
        while (found := self._form.argument.match(text, at)) is not None:
            arguments[found[1]] = _typed(found[2], types.get(found[1], frozenset()))
            at = found.end()
        if text[at:] != self._form.end:
            raise ValueError("text after the arguments")
        return [(begin[1], arguments)]


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
        self._depth = 0

    def _ends(self, mark: str) -> bool:
        if mark in STRING_MARKS:
            self._quote = mark if not self._quote else "" if mark == self._quote else self._quote
        elif not self._quote:
            self._depth += 1 if mark in "{[" else -1
            return self._depth == 0
        return False

    def calls(self, text: str) -> list[WrittenCall]:
        name = self._BEGIN.match(text)
        if name is None:
            raise ValueError("no name")
        return [(name[0].rstrip(), read_json(self._PART.sub(_as_json, text[name.end() :])))]


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

    def calls(self, text: str) -> list[WrittenCall]:
        """Parse a call with named arguments, or a list of such calls."""
        return _PythonReader(text, self._strings).calls()


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{c: c for c in "\\\"'/"}}
_CLOSING = {"{": "}", "[": "]", "(": ")"}


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    return chr(int(code, 16)) if code else _ESCAPED.get(match[3], match[0])


class _PythonReader:
    """Recursive descent over a call, or a list of calls; `ValueError` ends it."""

    _SPACE = re.compile(r"\s*")
    _NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)")
    _PRINT = re.compile(r"\s*print\s*\(\s*(?=[A-Za-z_][\w.-]*\s*\()")
    _NUMBER = re.compile(r"\s*[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")

    def __init__(self, text: str, strings: Mapping[int, int]) -> None:
        self._text = text
        self._strings = strings
        self._at = 0

    def calls(self) -> list[WrittenCall]:
        is_list = self._text.startswith("[")
        calls = [self._call() for _ in self._items("[")] if is_list else [self._call()]
        if self._at != len(self._text) or not calls:
            raise ValueError("text after the calls, or no call")
        return calls

    def _call(self) -> WrittenCall:
        """Take a call, which may be the argument of ``print``."""
        printed = self._taken(self._PRINT.match)
        name = self._word()
        arguments: dict[str, Any] = {}
        for _ in self._items("("):
            key = self._word()
            self._expect("=")
            if key in arguments:
                raise ValueError(f"{key} is repeated")
            arguments[key] = self._value()
        if printed is not None:
            self._expect(")")
        return name, arguments

    def _value(self) -> Any:
        character = self._next()
        if character == "{":
            return {self._key(): self._value() for _ in self._items("{")}
        if character in _CLOSING:
            return [self._value() for _ in self._items(character)]
        if character in ("'", '"'):
            return self._string()
        if (number := self._taken(self._NUMBER.match)) is not None:
            return float(number[0]) if number[1] or number[2] else int(number[0])
        word = self._word()
        if word not in _WORDS:
            raise ValueError(f"{word} is not a value")
        return _WORDS[word]

    def _key(self) -> str:
        key = self._string()
        self._expect(":")
        return key

    def _string(self) -> str:
        begin = self._at + 1
        end = self._strings.get(begin)
        if end is None:
            raise ValueError("no string")
        self._at = end + 1
        text = _ESCAPE.sub(_unescaped, self._text[begin:end])
        return text.encode("utf-16", "surrogatepass").decode("utf-16")  # no lone surrogates

    def _word(self) -> str:
        word = self._taken(self._NAME.match)
        if word is None:
            raise ValueError("no name")
        return word[1]

    def _items(self, opening: str) -> Iterator[None]:
        """Take an opening bracket, yield where each element begins, and take the closing bracket."""
        self._expect(opening)
        while self._next() != _CLOSING[opening]:
            yield
            if self._next() == ",":
                self._at += 1
            elif self._next() != _CLOSING[opening]:
                raise ValueError(f"{opening} is not closed")
        self._at += 1

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise ValueError(f"no {character}")
        self._at += 1

    def _next(self) -> str:
        """Take white space, and return the character after it; empty at the end."""
        self._taken(self._SPACE.match)
        return self._text[self._at : self._at + 1]

    def _taken(self, match: Callable[[str, int], re.Match[str] | None]) -> re.Match[str] | None:
        """Take text that matches; return None if it does not."""
        found = match(self._text, self._at)
        self._at = self._at if found is None else found.end()
        return found
