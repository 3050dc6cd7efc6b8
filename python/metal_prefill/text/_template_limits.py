"""Time and memory limits for chat templates, which are untrusted parts of model files.

Jinja's sandbox denies a template access to Python internals, but limits neither time nor memory. Here every
operation is charged to a `Budget` before it runs: each loop iteration, and each call, operator and filter by
the size of its input and of its largest possible output. Filters and methods of unknown cost are not
available. A value that exceeds a limit is rejected when it is created, so that later operations on it, such
as printing and comparing, take bounded time.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from functools import update_wrapper, wraps
from string import Formatter
from typing import Any, TypeAlias, TypeVar, cast

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

MAX_SOURCE = 1 << 17  # characters; the longest templates of published models have about 30,000
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
        self.max_value = sys.maxsize
        size, _ = self.measure(messages)
        self.max_value = MAX_VALUE + 4 * size
        self.left = self.total = MAX_WORK + WORK_PER_SIZE * size

    def charge(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise TemplateLimitError(f"more than {self.total} units of work")

    def measure(self, value: object) -> tuple[int, int]:
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
                if size + NODE * len(below) > self.max_value:
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

# A guard takes the arguments of a filter or method, and returns the number of characters that it may produce,
# as far as its input does not bound them. It raises an error for arguments that are too large.
Guard: TypeAlias = Callable[..., int]


def size_of(value: object) -> int:
    return budget_of_call.get().measure(value)[0]


def _units(size: int) -> Guard:
    """Return the guard of a function whose second argument counts parts, of `size`, of its result."""
    return lambda value, count=0, *_, **named: sum(
        size * max(n, 0) for n in (count, *named.values()) if isinstance(n, int)
    )


def _replaced(value: object, old: object = "", new: object = "", *_: object, **__: object) -> int:
    return (len(str(value)) // max(len(str(old)), 1) + 1) * len(str(new))


def _joined(value: object, d: object = "", *_: object, **__: object) -> int:
    count = len(value) if isinstance(value, Sized) else budget_of_call.get().max_value // NODE
    return count * len(str(d)) + (size_of(value) if count else 0)


def _width(stated: object) -> int:
    return len(stated) if isinstance(stated, str) else int(str(stated))


def _indented(value: object, width: object = 4, *_: object, **__: object) -> int:
    return (str(value).count("\n") + 1) * _width(width)


def _json(
    value: object, ensure_ascii: object = False, indent: object = None, *_: object, **__: object
) -> int:
    if indent is None:
        return 0
    size, depth = budget_of_call.get().measure(value)
    return size // NODE * depth * _width(indent)


def _number(value: object, *_: object, **__: object) -> int:
    if isinstance(value, str) and len(value) > MAX_DIGITS:
        raise TemplateLimitError(f"a number has {len(value)} digits, more than {MAX_DIGITS}")
    return 0


def _rounded(value: object, precision: object = 0, *_: object, **__: object) -> int:
    if isinstance(precision, int) and abs(precision) > 300:
        raise TemplateLimitError(f"rounding to {precision} digits, more than 300")
    return 0


def _summed(value: object, attribute: object = None, start: object = 0) -> int:
    if not isinstance(start, (int, float)):
        raise TemplateLimitError("sum supports only numbers")
    return 0


def _formatted(fields: int, wide: object, arguments: object) -> int:
    if wide:
        raise TemplateLimitError("a width in a format has more than 3 digits")
    return fields * (1000 + size_of(arguments))


def _percent(value: object, *arguments: object, **named: object) -> int:
    if not isinstance(value, str):
        return 0
    return _formatted(value.count("%"), re.search(r"\*|\d{4}", value), [arguments, named])


def _format(value: object, *arguments: object, **named: object) -> int:
    specs = [spec or "" for _, _, spec, _ in Formatter().parse(str(value))]
    wide = any(re.search(r"\{|\d{4}", spec) for spec in specs)
    return _formatted(len(specs), wide, [arguments, named])


def _searched(value: object, sought: object = "", *_: object, **__: object) -> int:
    # Searching from the right, and stripping, can compare every pair of characters.
    if isinstance(sought, str):
        budget_of_call.get().charge(len(str(value)) * len(sought) // 16)
    return 0


def no_guard(*_: object, **__: object) -> int:
    return 0


def _guarded(guard: Guard, names: str) -> dict[str, Guard]:
    return dict.fromkeys(names.split(), guard)


# The available filters and methods. Without a guard, they produce no more than their input.
FILTERS: dict[str, Guard] = {
    **_guarded(
        no_guard,
        """
        abs attr capitalize count d default dictsort e escape filesizeformat first forceescape groupby
        items last length list lower map max min reject rejectattr reverse safe select selectattr sort
        string title truncate unique upper urlencode wordcount
        """,
    ),
    **_guarded(_number, "float int"),
    **_guarded(_units(NODE), "batch slice"),
    "center": _units(1),
    "format": _percent,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "sum": _summed,
    "tojson": _json,
    "trim": _searched,
}
STR_METHODS: dict[str, Guard] = {
    **_guarded(
        no_guard,
        """
        capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit
        isidentifier islower isnumeric isprintable isspace istitle isupper lower partition removeprefix
        removesuffix split splitlines startswith swapcase title upper
        """,
    ),
    **_guarded(_units(1), "center ljust rjust zfill"),
    **_guarded(_searched, "lstrip rfind rindex rpartition rsplit rstrip strip"),
    "format": _format,
    "join": lambda separator, values=(): _joined(values, separator),
    "replace": _replaced,
}
_METHODS: tuple[tuple[type | tuple[type, ...], dict[str, Guard]], ...] = (
    (str, STR_METHODS),
    (Mapping, _guarded(no_guard, "get items keys values")),
    ((list, tuple, range), _guarded(no_guard, "count index")),
    ((int, float, bytes, *_VIEWS), {}),
)


def methods_of(value: object) -> dict[str, Guard] | None:
    """Return the methods that a template may call, by name; None for values of other than built-in types."""
    return next((names for kind, names in _METHODS if isinstance(value, kind)), None)


_MIN_BODY = 8  # expressions charged for an iteration of an empty loop
_CALL = 16 * NODE

_Function: TypeAlias = Callable[..., Any]


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    budget = budget_of_call.get()
    for value in values:
        budget.charge(NODE)
        yield value


def _metered(function: _Function, guard: Guard) -> _Function:
    """Wrap a filter or test so that each call is charged for its input, its guard and its output."""
    needs_context = hasattr(function, "jinja_pass_arg")  # Jinja passes it as the first argument

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        budget, own = budget_of_call.get(), arguments[needs_context:]
        budget.charge(_CALL + size_of([own, named]))
        budget.room_for(guard(*own, **named))
        result = function(*arguments, **named)
        return _counted(result) if isinstance(result, Iterator) else budget.checked(result)

    return call


def _checked(value: Any) -> Any:
    return budget_of_call.get().checked(value)


def _tick(expressions: int) -> str:
    budget_of_call.get().charge(NODE * expressions)
    return ""


def _iterated(values: Any, expressions: int) -> Any:
    """Charge the selection of a loop's elements, before its body runs."""
    if isinstance(values, Sized):
        budget_of_call.get().charge(NODE * expressions * len(values))
        return values
    return _counted(values)


# Without a context, Jinja would compute constant output during compilation, when there is no budget.
@pass_context
def _finalize(_: Context, value: Any) -> Any:
    return _checked(value)


def _weight(body: Iterable[nodes.Node]) -> int:
    return _MIN_BODY + sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)


def _call_inserted(name: str, value: nodes.Expr, *arguments: int) -> nodes.Expr:
    # The name contains a space, so that templates cannot refer to it.
    return nodes.Filter(
        value, f" {name}", [nodes.Const(a) for a in arguments], [], None, None, lineno=value.lineno
    )


def _insert_charges(node: nodes.Node) -> nodes.Node:
    """Return a syntax tree that charges loops, macros, literals, comparisons and slices."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_insert_charges(v) if isinstance(v, nodes.Node) else v for v in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _insert_charges(value))
    if isinstance(node, nodes.For):
        chosen = _weight([node.test]) if node.test is not None else 1
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _call_inserted("iterated", node.iter, chosen)
    if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block, nodes.Template)):
        count = nodes.Const(_weight(node.body), lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_call_inserted("tick", count), lineno=node.lineno))
    if isinstance(node, nodes.Compare):
        node.expr = _call_inserted("checked", node.expr)
        for operand in node.ops:
            operand.expr = _call_inserted("checked", operand.expr)
    if isinstance(node, nodes.Concat):
        # As in a filter block, `Environment.concat` joins the parts.
        joined = nodes.Const("", lineno=node.lineno)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [joined], [], None, None, lineno=node.lineno)
    if isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and getattr(node, "ctx", "load") == "load":
        return _call_inserted("checked", node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _call_inserted("checked", node)
    return node


class _Namespace(Namespace):
    def __repr__(self) -> str:
        # Its contents could be namespaces that contain others twice, of exponential size.
        return "<Namespace>"


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Sandboxed environment whose templates are rendered with a budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(
        self,
        filters: Mapping[str, _Function],  # with names in `FILTERS`, in place of Jinja's
        functions: Mapping[str, _Function],  # global functions
        **options: Any,
    ) -> None:
        super().__init__(finalize=_finalize, optimized=False, **options)
        self.globals.pop("lipsum")  # produces any number of paragraphs
        self.globals.update(functions, namespace=_Namespace)
        known: dict[str, Any] = {**self.filters, **filters}
        self.filters = {name: _metered(known[name], guard) for name, guard in FILTERS.items()}
        self.filters |= {" checked": _checked, " tick": _tick, " iterated": _iterated}
        self.tests = {name: _metered(cast(_Function, test), no_guard) for name, test in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _insert_charges(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        return tree

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        budget, pieces, size = budget_of_call.get(), [], 0
        for part in parts:
            size += len(part)
            budget.charge(NODE)
            if size > budget.max_value:
                raise TemplateLimitError(f"output of more than {budget.max_value} characters")
            pieces.append(part)
        budget.charge(size)
        return "".join(pieces)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow the methods of strings, lists and mappings that have a known cost."""
        methods = methods_of(obj)
        return super().is_safe_attribute(obj, attr, value) and (methods is None or attr in methods)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Charge ``str.format``, which bypasses `call`; ``format_map`` is not among the safe attributes."""
        inner = super().wrap_str_format(value)
        if inner is None or value.__name__ != "format":
            return None

        def call(*arguments: Any, **named: Any) -> str:
            budget_of_call.get().room_for(_format(value.__self__, *arguments, **named))
            return inner(*arguments, **named)

        return update_wrapper(call, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Charge a call for its input, the guard of its method and its output."""
        budget = budget_of_call.get()
        owner = getattr(__obj, "__self__", None)
        known = methods_of(owner)
        measured = kwargs if "_loop_vars" not in kwargs else {k: v for k, v in kwargs.items() if k[0] != "_"}
        budget.charge(_CALL + budget.measure([owner if known else None, args, measured])[0])
        if known is not None:
            guard = known.get(getattr(__obj, "__name__", ""), no_guard)
            budget.room_for(guard(owner, *args, **measured))
        result = super().call(__context, __obj, *args, **kwargs)
        return _counted(result) if isinstance(result, Iterator) else budget.checked(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge an operator, before its result can be large."""
        budget = budget_of_call.get()
        budget.charge(2 * NODE)
        if isinstance(left, int) and isinstance(right, int):
            _check_integers(operator, left, right)
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    budget.room_for((budget.measure(many)[0] - NODE) * max(times, 0))
        elif operator == "%":
            budget.room_for(_percent(left, right))
        return budget.checked(super().call_binop(context, operator, left, right))


def _check_integers(operator: str, left: int, right: int) -> None:
    bits = {"**": left.bit_length() * max(right, 1), "*": left.bit_length() + right.bit_length()}.get(
        operator, max(left.bit_length(), right.bit_length())
    )
    if bits > MAX_INT_BITS:
        raise TemplateLimitError(f"a number has {bits} bits, more than {MAX_INT_BITS}")


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render a template of a `LimitedEnvironment` with a budget that depends on the size of its messages."""
    token = budget_of_call.set(Budget(dict(variables)))
    try:
        return template.render(**variables)
    finally:
        budget_of_call.reset(token)
