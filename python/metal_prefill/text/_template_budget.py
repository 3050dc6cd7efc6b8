"""The work budget of a chat template, and the cost of each filter and method."""

import re
from collections.abc import Callable, Mapping, Sized
from contextvars import ContextVar
from string import Formatter
from typing import TypeAlias, TypeVar

import jinja2

MAX_VALUE = 4 << 20  # characters in a value, in addition to the size of the messages
MAX_WORK = 40_000_000  # units, of which a processor executes about 20 to 100 million per second
WORK_PER_SIZE = 1000  # additional units per character of the messages
MAX_DEPTH = 200
MAX_INT_BITS = 4096
MAX_DIGITS = 1000  # in a string converted to a number, which takes quadratic time in Python

NODE = 8  # units per evaluated expression, and per list element

Value = TypeVar("Value")


class TemplateLimitError(jinja2.TemplateError):
    """A template exceeds a limit."""


class Budget:
    """Work budget of one rendering, in units; reading or producing a character costs one."""

    def __init__(self, messages: object) -> None:
        self.max_value = MAX_VALUE
        size, _ = self.measure(messages, limit=False)
        self.max_value += 4 * size
        self.left = self.total = MAX_WORK + WORK_PER_SIZE * size

    def charge(self, units: int) -> None:
        """Subtract `units`; raise if the budget is exhausted."""
        self.left -= units
        if self.left < 0:
            raise TemplateLimitError(f"more than {self.total} units of work")

    def measure(self, value: object, limit: bool = True) -> tuple[int, int]:
        """Return the size of a value in characters, including its elements, and its nesting depth.

        An element that is contained twice counts twice, as when printed. Values that double by containing
        the previous value twice therefore reach the limit early.
        """
        size, depth, level = 0, 0, [value]
        while level:
            depth += 1
            if depth > MAX_DEPTH:
                raise TemplateLimitError(f"a value is nested more than {MAX_DEPTH} levels deep")
            below: list[object] = []
            for item in level:
                size += NODE
                if isinstance(item, str):
                    size += len(item)
                elif isinstance(item, int):
                    size += item.bit_length() // 8
                elif isinstance(item, Mapping):
                    below += [*item.keys(), *item.values()]
                elif isinstance(item, (list, tuple, set, frozenset)):
                    below += item
                elif isinstance(item, (range, *_VIEWS)):
                    size += NODE * len(item)
                    below += item if not isinstance(item, range) else ()
                if limit and size + NODE * len(below) > self.max_value:
                    raise TemplateLimitError(f"a value has more than {self.max_value} characters")
            level = below
        return size, depth

    def checked(self, value: Value) -> Value:
        """Charge the size of a value, and return the value."""
        self.charge(self.measure(value)[0])
        return value

    def room_for(self, size: int) -> None:
        """Charge `size` characters that are about to be produced."""
        if size > self.max_value:
            raise TemplateLimitError(f"a value has more than {self.max_value} characters")
        self.charge(max(size, 0))


_NOTHING: dict[str, str] = {}
_VIEWS = (type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items()))
budget_of_call: ContextVar[Budget] = ContextVar("budget")

Guard: TypeAlias = Callable[..., None]


# Guards: each takes the arguments of a filter or method, and charges costs beyond the argument sizes.


def size_of(value: object) -> int:
    return budget_of_call.get().measure(value)[0]


def _guard_width(value: object, width: object = 0, *_: object, **named: object) -> None:
    for number in (width, *named.values()):
        if isinstance(number, int):
            budget_of_call.get().room_for(number)


def _guard_replace(value: object, old: object = "", new: object = "", *_: object, **named: object) -> None:
    old, new = named.get("old", old), named.get("new", new)
    found = len(str(value)) // max(len(str(old)), 1) + 1
    budget_of_call.get().room_for(found * len(str(new)))


def _guard_join(value: object, separator: object = "", *_: object, **named: object) -> None:
    separator = named.get("d", separator)
    count = len(value) if isinstance(value, Sized) else budget_of_call.get().max_value // NODE
    budget_of_call.get().room_for(count * len(str(separator)) + (size_of(value) if count else 0))


def _guard_indent(value: object, width: object = 4, *_: object, **named: object) -> None:
    width = named.get("width", width)
    lines = str(value).count("\n") + 1
    budget_of_call.get().room_for(lines * (len(width) if isinstance(width, str) else int(str(width))))


def _guard_groups(value: object, count: object = 1, *_: object, **named: object) -> None:
    for number in (count, *named.values()):
        if isinstance(number, int):
            budget_of_call.get().room_for(NODE * number)


def _guard_number(value: object, *_: object, **__: object) -> None:
    if isinstance(value, str) and len(value) > MAX_DIGITS:
        raise TemplateLimitError(f"a number has {len(value)} digits, more than {MAX_DIGITS}")


def _guard_round(value: object, precision: object = 0, *_: object, **named: object) -> None:
    precision = named.get("precision", precision)
    if isinstance(precision, int) and abs(precision) > 300:
        raise TemplateLimitError(f"rounding to {precision} digits, more than 300")


def _guard_sum(value: object, attribute: object = None, start: object = 0) -> None:
    if not isinstance(start, (int, float)):
        raise TemplateLimitError("sum supports only numbers")


def _guard_json(
    value: object, ensure_ascii: object = False, indent: object = None, *_: object, **__: object
) -> None:
    if indent is None:
        return
    budget = budget_of_call.get()
    size, depth = budget.measure(value)
    budget.room_for(size // NODE * depth * (len(indent) if isinstance(indent, str) else int(str(indent))))


def guard_percent(value: object, *arguments: object, **named: object) -> None:
    if not isinstance(value, str):
        return
    if "*" in value or re.search(r"\d{4}", value):
        raise TemplateLimitError("a width in a format has more than 3 digits")
    budget_of_call.get().room_for(value.count("%") * (1000 + size_of([arguments, named])))


def guard_format(value: object, *arguments: object, **named: object) -> None:
    fields = list(Formatter().parse(str(value)))
    for _, _, spec, _ in fields:
        if spec and ("{" in spec or re.search(r"\d{4}", spec)):
            raise TemplateLimitError("a width in a format has more than 3 digits")
    budget_of_call.get().room_for(len(fields) * (1000 + size_of([arguments, named])))


def _guard_search(value: object, sought: object = "", *_: object, **__: object) -> None:
    # Searching from the right, and stripping, can compare every pair of characters.
    if isinstance(sought, str):
        budget_of_call.get().charge(len(str(value)) * len(sought) // 16)


def no_guard(*_: object, **__: object) -> None:
    pass


def _words(text: str) -> list[str]:
    return text.split()


# The available filters and methods. Those without a guard produce no more than their input.
FILTERS: dict[str, Guard] = dict.fromkeys(
    _words(
        """
        abs attr capitalize count d default dictsort e escape filesizeformat first forceescape groupby
        items last length list lower map max min reject rejectattr reverse safe select selectattr sort
        string title truncate unique upper urlencode wordcount
        """
    ),
    no_guard,
) | {
    "batch": _guard_groups,
    "center": _guard_width,
    "float": _guard_number,
    "format": guard_percent,
    "indent": _guard_indent,
    "int": _guard_number,
    "join": _guard_join,
    "replace": _guard_replace,
    "round": _guard_round,
    "slice": _guard_groups,
    "sum": _guard_sum,
    "tojson": _guard_json,
    "trim": _guard_search,
}
STR_METHODS: dict[str, Guard] = dict.fromkeys(
    _words(
        """
        capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit
        isidentifier islower isnumeric isprintable isspace istitle isupper lower partition removeprefix
        removesuffix split splitlines startswith swapcase title upper
        """
    ),
    no_guard,
) | {
    "center": _guard_width,
    "format": guard_format,
    "join": lambda separator, values=(): _guard_join(values, separator),
    "ljust": _guard_width,
    "lstrip": _guard_search,
    "replace": _guard_replace,
    "rfind": _guard_search,
    "rindex": _guard_search,
    "rjust": _guard_width,
    "rpartition": _guard_search,
    "rsplit": _guard_search,
    "rstrip": _guard_search,
    "strip": _guard_search,
    "zfill": _guard_width,
}
_METHODS: tuple[tuple[type | tuple[type, ...], dict[str, Guard]], ...] = (
    (str, STR_METHODS),
    (Mapping, dict.fromkeys(("get", "items", "keys", "values"), no_guard)),
    ((list, tuple, range), dict.fromkeys(("count", "index"), no_guard)),
    ((int, float, bytes, *_VIEWS), {}),
)


def methods_of(value: object) -> dict[str, Guard] | None:
    """Return the methods that a template may call, by name; None for values of other than built-in types."""
    return next((names for kind, names in _METHODS if isinstance(value, kind)), None)
