"""Unusual chat templates: random trees of Jinja's statements and expressions."""

from collections.abc import Callable
from random import Random

from metal_prefill.text._template_limits import FILTERS, STR_METHODS

NAMES = [
    "messages", "m", "x", "ns", "ns.x", "loop", "loop.index", "bos_token", "nothing", "caller", "f", "range",
]  # fmt: skip
LITERALS = [
    "0", "1", "-1", "3", "99999", "3000000000", "1e300", "''", "'a'", "'<|im_end|>'", "none", "true", "[]",
    "{}",
]  # fmt: skip
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or"]
TESTS = [
    "defined", "none", "string", "mapping", "iterable", "eq(1)", "in([1])", "divisibleby(2)", "sameas(x)",
]  # fmt: skip


def write_template(random: Random) -> str:
    """Return a template, which may be valid or not."""
    source = "{% set ns = namespace(x='ab') %}" + "".join(
        _statement(random, 3) for _ in range(random.randrange(1, 5))
    )
    if random.random() < 0.1:
        at = random.randrange(len(source))
        source = source[:at] + random.choice(("", "{%", "}}", "\ud800", "\0", "(", "'")) + source[at + 1 :]
    return source


def _statement(random: Random, depth: int) -> str:
    def inner() -> str:
        return _statement(random, depth - 1)

    def value() -> str:
        return _expression(random, 3)

    if depth == 0:
        return random.choice(("text", "{{ " + value() + " }}", "{% break %}", "{% continue %}", "{# #}"))
    kinds: list[Callable[[], tuple[str, ...]]] = [
        lambda: ("{{ ", value(), " }}"),
        lambda: ("{% for x in ", value(), " %}", inner(), "{% else %}", inner(), "{% endfor %}"),
        lambda: ("{% for m in messages if ", value(), " %}", inner(), inner(), "{% endfor %}"),
        lambda: ("{% for x in range(99999) %}", inner(), "{% endfor %}"),
        lambda: ("{% if ", value(), " %}", inner(), "{% elif ", value(), " %}", inner(), "{% endif %}"),
        lambda: ("{% set ns.x = ", value(), " %}", inner()),
        lambda: ("{% set x = ", value(), " %}", inner()),
        lambda: ("{% set x %}", inner(), "{% endset %}"),
        lambda: ("{% macro f(x) %}", inner(), "{% endmacro %}{{ f(", value(), ") }}"),
        lambda: ("{% call f(", value(), ") %}", inner(), "{% endcall %}"),
        lambda: ("{% filter ", random.choice(list(FILTERS)), " %}", inner(), "{% endfilter %}"),
        lambda: ("{% generation %}", inner(), "{% endgeneration %}"),
        lambda: ("{% block b", str(random.randrange(9)), " %}", inner(), "{% endblock %}"),
    ]
    return "".join(random.choice(kinds)())


def _expression(random: Random, depth: int) -> str:
    def inner() -> str:
        return _expression(random, depth - 1)

    if depth == 0:
        return random.choice(NAMES if random.random() < 0.6 else LITERALS)
    arguments = ", ".join(inner() for _ in range(random.randrange(3)))
    kinds: list[Callable[[], str]] = [
        inner,
        lambda: f"({inner()} {random.choice(OPERATORS)} {inner()})",
        lambda: f"({inner()} | {random.choice(list(FILTERS))}({arguments}))",
        lambda: f"({inner()}).{random.choice(list(STR_METHODS))}({arguments})",
        lambda: f"({inner()} is {random.choice(TESTS)})",
        lambda: f"[{inner()}, {inner()}]",
        lambda: f"({inner()}, {inner()})",
        lambda: f"{{'a': {inner()}, 'b': {inner()}}}",
        lambda: f"{inner()}[{inner()}]",
        lambda: f"{inner()}[{inner()}:{inner()}]",
        lambda: f"({inner()} if {inner()} else {inner()})",
        lambda: f"dict(a={inner()}, b={inner()})",
        lambda: f"range({inner()})",
    ]
    return random.choice(kinds)()
