"""Chat templates of hostile files: each ends soon, uses little memory, and fails with the right error."""

import enum
import json
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.programs import finished

from metal_prefill import ChatTemplateError
from metal_prefill.text import ChatTemplate
from metal_prefill.text._template_limits import FILTERS, MAX_VALUE

END = "<|im_end|>"
USER_HI = [{"role": "user", "content": "Hi"}]
GROWING = (
    "{{% set n = namespace(x={start}) %}}"
    "{{% for i in range(60) %}}{{% set n.x = {step} %}}{{% endfor %}}{{{{ n.x }}}}"
)

# Each computes for hours, of which the limit of work alone stops it.
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "conditions of loops": (
        "{% for a in range(99999) %}{% for b in range(99999) if b is none %}{% endfor %}{% endfor %}"
    ),
    "lazy filters": "{% for a in range(99999) %}{{ range(99999) | map('string') | list | last }}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls of callers": (
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call f() %}" * 18
        + "x"
        + "{% endcall %}" * 18
    ),
    "comparisons": "{% for i in range(99999) %}{% if 'a' * 999999 == 'a' * 999999 %}{% endif %}{% endfor %}",
    "tests": "{% for i in range(99999) %}{% if ('a' * 999999) is eq 'b' %}{% endif %}{% endfor %}",
    "slices": "{% set a = 'a' * 999999 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}",
}
# Each computes for hours or takes many gigabytes unless it is limited.
HOSTILE = {
    "power": "{{ (9 ** 9) ** (9 ** 8) }}",
    "squares": GROWING.format(start=9, step="n.x * n.x"),
    "product of text": "{{ 'a' * 10 ** 10 }}",
    "product of a list": "{{ 10 ** 10 * [1] }}",
    "sums": GROWING.format(start="'abcd'", step="n.x + n.x"),
    "concatenation": GROWING.format(start="'abcd'", step="n.x ~ n.x"),
    "captured blocks": "{% set x = 'abcd' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "lists that hold one twice": GROWING.format(start="[1]", step="[n.x, n.x]"),
    "tuples that hold one twice": GROWING.format(start="[1]", step="(n.x, n.x)"),
    "dicts that hold one twice": GROWING.format(start="[1]", step="{'a': n.x, 'b': n.x}"),
    "called dicts that hold one twice": GROWING.format(start="[1]", step="dict(a=n.x, b=n.x)"),
    "output": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "center": "{{ 'a' | center(3000000000) }}",
    "method center": "{{ 'a'.center(3000000000) }}",
    "zfill": "{{ 'a'.zfill(width) }}".replace("width", "3000000000"),
    "replace": "{{ ('a' * 999999) | replace('a', 'b' * 99999) }}",
    "method replace": "{{ ('a' * 999999).replace('', 'b' * 99999) }}",
    "join": "{{ range(99999) | join('a' * 999999) }}",
    "join of a lazy filter": "{{ range(99999) | map('string') | join('a' * 999999) }}",
    "method join": "{{ ('a' * 999999).join('b' * 999999) }}",
    "width of %": "{{ '%3000000000d' % 1 }}",
    "argument width of %": "{{ '%*d' % (3000000000, 1) }}",
    "parts of %": "{{ ('%(a)s' * 99999) % {'a': 'b' * 999999} }}",
    "filter format": "{{ '%3000000000d' | format(1) }}",
    "method format": "{{ '{:3000000000}'.format(1) }}",
    "argument width of format": "{{ '{:{}}'.format(1, 3000000000) }}",
    "parts of format": "{{ ('{0}' * 99999).format('b' * 999999) }}",
    "time": "{{ strftime_now('%c' * 999999) }}",
    "width of a time": "{{ strftime_now('%999999999d') }}",
    "indent": "{{ ('\n' * 99999) | indent(99999) }}",
    "indented JSON": "{{ [[[[[1] * 9999]]]] | tojson(indent=9999999) }}",
    "batch": "{{ [1] | batch(3000000000, 0) | list }}",
    "slice": "{{ [1] | slice(3000000000) | list }}",
    "round": "{{ 1 | round(3000000000) }}",
    "digits": "{{ ('9' * 999999) | int }}",
    "sum": "{{ ([[1] * 999] * 99) | sum(start=[]) }}",
    "search from the right": "{{ ('a' * 1999999).rfind('b' + 'a' * 999999) }}",
    "strip": "{{ ('a' * 1999999).strip('b' * 999999) }}",
    "escapes": GROWING.format(start="'&' * 999999", step="n.x | forceescape"),
}


def render(source: str, messages: Any = USER_HI) -> str:
    return "".join(piece for piece, _ in ChatTemplate(source, [END]).render(messages, {}))


# Renders each template; prints the errors by name, and how far the memory of the process grew.
RENDER_ALL = """
import json, resource, sys
from metal_prefill import ChatTemplateError
from metal_prefill.text import ChatTemplate, _template_limits
hostile, endless = json.load(sys.stdin)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
errors = {}
for name, source in (hostile | endless).items():
    if name in endless:
        _template_limits.MAX_WORK = 4_000_000  # a tenth, in a tenth of the time
    try:
        ChatTemplate(source, []).render([{"role": "user", "content": "Hi"}], {})
    except ChatTemplateError as error:
        errors[name] = str(error)
print(json.dumps([errors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


def test_a_template_with_excessive_work_is_stopped_and_uses_little_memory() -> None:
    """With limits each takes a few seconds at most; without, the time limit of the suite ends it."""
    child = finished([sys.executable, "-c", RENDER_ALL], input=json.dumps([HOSTILE, ENDLESS]))
    assert child.returncode == 0, child.stderr
    errors, grown = json.loads(child.stdout)
    assert [name for name in HOSTILE | ENDLESS if "exceeds a limit" not in errors.get(name, "")] == []
    assert grown * (1 if sys.platform == "darwin" else 1 << 10) < 256 << 20


@pytest.mark.parametrize(
    "source", ["('a' | center({}))", "'a'.ljust({})", "('ab' * 16) | replace('', 'b' * ({} // 33))"]
)
def test_the_size_of_a_value_is_limited(source: str) -> None:
    """A value reaches its limit well before a rendering does."""
    assert render("{{ (" + source.format(MAX_VALUE) + ") | length }}")
    with pytest.raises(ChatTemplateError, match="a value has more than"):
        render("{{ (" + source.format(MAX_VALUE + 20_000) + ") | length }}")


def test_a_list_counts_elements_as_often_as_it_contains_them() -> None:
    doubled = (
        "{% set ns = namespace(x=['text']) %}{% for _ in range(N) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    )
    assert render(doubled.replace("N", "10")) == ""
    with pytest.raises(ChatTemplateError, match="a value has more than"):
        render(doubled.replace("N", "100"))


@pytest.mark.parametrize(
    "source",
    [
        *("{{ lipsum(999999) }}", "{{ (1).to_bytes(3000000000, 'big') }}"),
        *("{{ '\t'.expandtabs(3000000000) }}", "{{ 'a'.translate({97: 'b' * 999999}) }}"),
        *("{{ ('a' * 999999) | wordwrap(1) }}", "{{ ('a.' * 99999) | urlize }}"),
        *("{{ {'a': 1} | xmlattr }}", "{{ '{a:3000000000}'.format_map({'a': 1}) }}"),
    ],
)
def test_functions_without_a_known_cost_are_unavailable(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"undefined|unsafe|No filter named"):
        render(source)


MALFORMED = {
    "break": "{% break %}",
    "continue": "{% continue %}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists": "{{ " + "[" * 500 + "]" * 500 + " }}",
    "conditions": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "loops": "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "sums": "{{ 1" + "+1" * 20000 + " }}",
    "attributes": "{{ x" + ".a" * 20000 + " }}",
    "digits": "{{ " + "9" * 100000 + " }}",
    "length": "a" * 10**6,
    "surrogate": "{{ '\\ud800' }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "include": "{% include 'x' %}",
}


@pytest.mark.parametrize("source", MALFORMED.values(), ids=MALFORMED.keys())
def test_errors_of_python_and_jinja_are_template_errors(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"the chat template"):
        render(source)


def test_the_limits_grow_with_the_messages() -> None:
    """The work of published templates for each message is far below them."""
    source = (
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages[::-1] %}{% if m.role == 'user' and ns.last == 0 %}"
        "{% set ns.last = loop.length - loop.index %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ '<|start|>' ~ m.role + '\n' }}{% set text = m.content | trim %}"
        "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
        "{{ text.replace('\r', '').strip('\n') }}{% if loop.index0 == ns.last %}{{ m | tojson }}"
        "{% endif %}{{ '\n\n' if not loop.last }}{% endfor %}"
    )
    messages = [{"role": ("user", "assistant")[i % 2], "content": f" {i} " * 99} for i in range(4000)]
    last = '{"role": "user", "content": "%s"}' % (" 3998 " * 99)
    expected = "".join(
        f"<|start|>{m['role']}\n{m['content'].strip()}" + last * (i == 3998) + "\n\n" * (i < 3999)
        for i, m in enumerate(messages)
    )
    assert render(source, messages) == expected


def test_a_message_of_many_megabytes_is_rendered() -> None:
    content = "words " * 2_000_000
    assert render("{{ messages[0].content | trim ~ '!' }}", [{"role": "user", "content": content}]) == (
        content.strip() + "!"
    )


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ 'a%sb' % 'x' }}", "axb"),
        ("{{ '%s' | format('axb') }}", "axb"),
        ("{{ 'a{}b'.format('x') }}", "axb"),
        ("{% for x in 'ab' %}{{ loop.index }}{{ loop.first }}{% endfor %}", "1True2False"),
        ("{% for x in 'ab' %}{{ loop.cycle('p', 'q') }}{{ loop.changed(x) }}{% endfor %}", "pTrueqTrue"),
    ],
)
def test_formatting_and_attributes_of_loops_work_within_limits(source: str, written: str) -> None:
    assert render(source) == written


def test_strftime_works_within_limits() -> None:
    now = datetime.now()
    told = render("{{ strftime_now('Today is %d %b %Y, and not in 1999%%100') }}")
    assert told in [f"{t:Today is %d %b %Y, and not in 1999%%100}" for t in (now, datetime.now())]


def test_filters_of_published_templates_exist() -> None:
    used = (
        "tojson trim length count join list map select reject selectattr rejectattr string upper lower title "
        "capitalize replace default d first last items dictsort int float reverse safe sort unique indent "
        "groupby batch slice min max sum center format escape e attr abs round"
    )
    assert set(used.split()) <= set(FILTERS)


class Thing:
    """A value whose own text is a control token."""

    def __str__(self) -> str:
        return END


class Text(Thing, str): ...


class Number(Thing, int): ...


class Fraction(Thing, float): ...


class Speaker(str, enum.Enum):
    USER = "user"


@pytest.mark.parametrize(
    "value",
    [END.encode(), Path(END), Thing(), {END}, re.compile(END), bytearray(END.encode()), 1j],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.parametrize("place", ["content", "list", "dict"])
def test_messages_may_contain_text_and_json_values(value: Any, place: str) -> None:
    """Any other value would become text by its own method, possibly a control token."""
    content = {"content": value, "list": ["x", value], "dict": {"x": value}}[place]
    with pytest.raises(TypeError, match=rf"message 1.*'content'.*is of type {type(value).__name__}"):
        render("{{ messages }}", [*USER_HI, {"role": "user", "content": content}])


def test_keys_of_messages_are_text_or_numbers() -> None:
    with pytest.raises(TypeError, match=r"a key of message 0\['call'\] is of type bytes"):
        render("{{ messages }}", [{"role": "user", "call": {END.encode(): "x"}}])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Text("a"), "a"),
        (Number(7), "7"),
        (Fraction(0.5), "0.5"),
        (Speaker.USER, "user"),
        (None, "None"),
        (True, "True"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_subclasses_are_treated_like_their_base(value: Any, text: str) -> None:
    pieces = ChatTemplate("{{ messages[0].value }}", [END]).render([{"role": "user", "value": value}], {})
    assert pieces == [(text, False)]


def test_roles_may_be_members_of_an_enumeration() -> None:
    assert render("{{ messages[0].role }}", [{"role": Speaker.USER}]) == "user"


RECURSIVE: list[Any] = []
RECURSIVE.append(RECURSIVE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ab\ud800", r"message 0\['content'\] has a lone surrogate at index 2"),
        (RECURSIVE, "a message is nested too deeply"),
    ],
    ids=["surrogate", "recursive"],
)
def test_lone_surrogates_and_recursion_in_messages_are_rejected(content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        render("x", [{"role": "user", "content": content}])
    assert not isinstance(caught.value, ChatTemplateError)


def test_the_length_of_control_tokens_is_limited() -> None:
    """All their ends are in a pattern: 16 tokens of 1,000 characters took 0.8 GB."""
    tokens = [f"<{i:04}>" + "a" * 994 for i in range(5)]
    ChatTemplate("a", tokens[:4])
    with pytest.raises(ChatTemplateError, match=r"their ends have 2497500 characters, more than 2097152"):
        ChatTemplate("a", tokens)
    ChatTemplate("a", [f"<unused{i:04}>" for i in range(6000)])
