"""Time and memory limits for chat templates, which are untrusted parts of model files.

Jinja's sandbox denies a template access to Python internals, but limits neither time nor memory. Here every
operation is charged to a `Budget` before it runs: each loop iteration, and each call, operator and filter by
the size of its input and of its largest possible output. Filters and methods of unknown cost are not
available. A value that exceeds a limit is rejected when it is created, so that later operations on it, such
as printing and comparing, take bounded time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import update_wrapper
from typing import Any, TypeAlias, cast

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from metal_prefill.text._template_budget import (
    FILTERS,
    MAX_INT_BITS,
    NODE,
    Budget,
    Guard,
    TemplateLimitError,
    budget_of_call,
    guard_format,
    guard_percent,
    methods_of,
    no_guard,
    size_of,
)

MAX_SOURCE = 1 << 17  # characters; the longest templates of published models have about 30,000

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
    passes = getattr(function, "jinja_pass_arg", None)

    def call(context: Context, *arguments: Any, **named: Any) -> Any:
        budget = budget_of_call.get()
        budget.charge(_CALL + size_of([arguments, named]))
        guard(*arguments, **named)
        if passes is None:
            result = function(*arguments, **named)
        else:
            first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
            result = function(first[passes.name], *arguments, **named)
        return _counted(result) if isinstance(result, Iterator) else budget.checked(result)

    # Functions that need a context are not called during compilation, when there is no budget.
    return pass_context(call)


@pass_context
def _checked(_: Context, value: Any) -> Any:
    return budget_of_call.get().checked(value)


@pass_context
def _tick(_: Context, expressions: int) -> str:
    budget_of_call.get().charge(NODE * expressions)
    return ""


@pass_context
def _iterated(_: Context, values: Any, expressions: int) -> Any:
    """Charge the selection of a loop's elements, before its body runs."""
    if isinstance(values, Sized):
        budget_of_call.get().charge(NODE * expressions * len(values))
        return values
    return _counted(values)


def _finalize(value: Any) -> Any:
    budget = budget_of_call.get(None)  # none during compilation, which finalizes constant text
    return value if budget is None else budget.checked(value)


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
        return (
            "<Namespace>"  # its contents could be namespaces that contain others twice, of exponential size
        )


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Sandboxed environment whose templates are rendered with a budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, optimized=False, **options)
        self.globals.pop("lipsum")  # produces any number of paragraphs
        self.globals["namespace"] = _Namespace

    def limit(self) -> None:
        """Wrap all filters and tests; call once, after adding custom ones."""
        self.filters = {
            name: _metered(cast(_Function, self.filters[name]), guard) for name, guard in FILTERS.items()
        }
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
        """Charge ``str.format``, which bypasses `call`."""
        inner = super().wrap_str_format(value)
        if inner is None or value.__name__ != "format":
            return inner and self._refuse_format_map

        def call(*arguments: Any, **named: Any) -> str:
            guard_format(value.__self__, *arguments, **named)
            return inner(*arguments, **named)

        return update_wrapper(call, value)

    @staticmethod
    def _refuse_format_map(*_: object) -> str:
        raise TemplateLimitError("format_map is not supported")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Charge a call for its input, the guard of its method and its output."""
        budget = budget_of_call.get()
        owner = getattr(__obj, "__self__", None)
        known = methods_of(owner) if isinstance(owner, _OWNERS) else None
        measured = kwargs if "_loop_vars" not in kwargs else {k: v for k, v in kwargs.items() if k[0] != "_"}
        budget.charge(_CALL + budget.measure([owner if known else None, args, measured])[0])
        if known is not None:
            known.get(getattr(__obj, "__name__", ""), no_guard)(owner, *args, **measured)
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
            guard_percent(left, right)
        return budget.checked(super().call_binop(context, operator, left, right))


_OWNERS = (str, Mapping, list, tuple, range)


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
