"""Tool calls: described by the template, found in answers, answered in conversations."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.servers.chat_families import FAMILIES
from support.tools import ASKED, CLOCK, HERMES, WEATHER

from metal_prefill import ChatTemplateError, Conversation, Model
from metal_prefill.text import (
    ChatTemplate,
    Tokenizer,
    ToolCall,
    ToolCallParser,
    _tool_calls,
    parse_tool_calls,
)
from metal_prefill.text._json_calls import read_arguments

GENERIC = "{% if tools is not none %}{{ tools | tojson }}{% endif %}" + HERMES[HERMES.index("{% for m in") :]

VERONA = ToolCall("weather", {"city": "Verona"})
TIME = ToolCall("clock", {})
# Answers, in which calls are between « and », unless they are all of it; and the calls.
ANSWERS: dict[str, tuple[str, list[ToolCall]]] = {
    "text around calls": (
        'I look.\n«<tool_call>{"name": "clock"}</tool_call>» Wait.« '
        '<tool_call>{"name": "weather", "arguments": {"city": "Verona"}}</tool_call>\n»',
        [TIME, VERONA],
    ),
    "null and empty arguments": (
        '<tool_call>{"name": "clock", "arguments": null}</tool_call>{"name": "clock", "arguments": ""}',
        [TIME, TIME],
    ),
    "a bracket too many": ('«<tool_call>{"name": "clock", "arguments": {}} }\n</tool_call>»!', [TIME]),
    "a bracket after a call": ('«<tool_call>{"name": "clock"}»} yes', [TIME]),
    "a tag that is not closed": ('<tool_call>{"name": "clock", "arguments": {}}', [TIME]),
    "json with white space": ('{ \n "parameters": {"city": "Verona"},\n "name": "weather" }', [VERONA]),
    "a list alone": ('[{"name": "clock", "arguments": {}, "id": "c1"}]', [ToolCall("clock", {}, "c1")]),
    "as a message has it": (
        '{"type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Verona\\"}"}}',
        [VERONA],
    ),
    "brackets and tags in strings": (
        '«<tool_call>{"name": "clock", "arguments": {"a": "}]</tool_call>\\"{", "b": "\\\\"}}</tool_call>»!',
        [ToolCall("clock", {"a": '}]</tool_call>"{', "b": "\\"})],
    ),
    "several elements": (
        "I look.«\n\n<tool_call>\n<function=clock>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=weather><parameter=city>Verona</parameter></function></tool_call>»",
        [TIME, VERONA],
    ),
    "elements without a tag": ("«<function=clock></function>» Wait.", [TIME]),
    "tags in a value": (
        "<tool_call><function=weather><parameter=city>\n<a>\n</function><parameter=x> \n\n</parameter>"
        "</function></tool_call>",
        [ToolCall("weather", {"city": "<a>\n</function><parameter=x> \n"})],
    ),
    "python without control tokens": ("Wait.« [clock(), weather(city='Verona')]»", [TIME, VERONA]),
    "python with values of all types": (
        "[weather(city='Verona', a=[1, -2.5e1, (True, None), ], b={\"k\": {'n': false}}, "
        'c="it\'s ]\\n\\u00e9")]',
        [
            ToolCall(
                "weather",
                {"city": "Verona", "a": [1, -25.0, [True, None]], "b": {"k": {"n": False}}, "c": "it's ]\né"},
            )
        ],
    ),
    "quotes that are not escaped": (
        "[weather(city='it's \"here\"\n(there)')]",
        [ToolCall("weather", {"city": 'it\'s "here"\n(there)'})],
    ),
    "json between control tokens": (
        '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Verona"}}]<|tool_call_end|>',
        [VERONA],
    ),
    "an unknown tool in python": (
        "<|tool_call_start|> [ other (x=1) ] <|tool_call_end|>",
        [ToolCall("other", {"x": 1})],
    ),
    "a name before the arguments": (
        'So.«[TOOL_CALLS]weather[ARGS]{"city": "Verona"}[TOOL_CALLS]clock{}»',
        [VERONA, TIME],
    ),
    "an id before the arguments": (
        '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Verona"}',
        [ToolCall("weather", {"city": "Verona"}, "a1B2c3D4e")],
    ),
    "a list after a control token": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Verona"}, "id": "a1B2c3D4e"}]',
        [ToolCall("weather", {"city": "Verona"}, "a1B2c3D4e")],
    ),
    "json in a fence": (
        '<tool_calls>\n<tool_call>weather\n```json\n{"city": "Verona"}\n```</tool_call>\n'
        "<tool_call>clock\n```json\n{}\n```</tool_call>\n</tool_calls>",
        [VERONA, TIME],
    ),
    "a list of calls in two tags": (
        '«<tool_calls>[{"name": "clock", "arguments": {}}]</tool_calls>» So.',
        [TIME],
    ),
    "python in lines": (
        'So.«\n<function_calls>\nweather(city="Verona")\nclock()\n</function_calls>»',
        [VERONA, TIME],
    ),
    "an unknown tool and an invalid call in lines": (
        "«<function_calls>other(x=null)»\nclock(1)\n</function_calls>",
        [ToolCall("other", {"x": None})],
    ),
    "python in a fence": (
        "I look.\n«```tool_code\nweather(city='Verona')\nclock()\n```»\nWait.",
        [VERONA, TIME],
    ),
    "a list in a fence": ("```tool_code\n[clock()]\n```", [TIME]),
    "json in elements": (
        '<function=weather>{"city": "</function>"}</function> <function=clock>\n{}\n</function>',
        [ToolCall("weather", {"city": "</function>"}), TIME],
    ),
    "keys and values": (
        "So.«\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Verona</arg_value>\n</tool_call>"
        "<tool_call>clock</tool_call>»",
        [VERONA, TIME],
    ),
    "keys and values in a line": (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Verona</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        [ToolCall("weather", {"city": "Verona", "days": 3})],
    ),
    "tags in a value of keys and values": (
        "<tool_call>other<arg_key>a</arg_key><arg_value></tool_call>\n<arg_value> x\n</arg_value>"
        "</tool_call>",
        [ToolCall("other", {"a": "</tool_call>\n<arg_value> x\n"})],
    ),
    "marks around strings": (
        'So.«<|tool_call>call:weather{city:<|"|>Verona<|"|>}<tool_call|><|tool_call>call:clock{}<tool_call|>»',
        [VERONA, TIME],
    ),
    "escapes around strings": (
        "<start_function_call>call:weather{city:<escape>Verona<escape>}<end_function_call>",
        [VERONA],
    ),
    "marked strings and values of all types": (
        '<|tool_call>call:weather{city:<|"|>a "quoted"} {x: 1}\\ <escape><|"|>,n:[1,-2.5e1,true,None],'
        'm:{a_b:{<|"|>c d<|"|>:<|"|><|"|>}, e : null}}<tool_call|>',
        [
            ToolCall(
                "weather",
                {
                    "city": 'a "quoted"} {x: 1}\\ <escape>',
                    "n": [1, -25.0, True, None],
                    "m": {"a_b": {"c d": ""}, "e": None},
                },
            )
        ],
    ),
    "names of tools as Command R7B writes them": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
        '"parameters": {"city": "Verona"}}\n]<|END_ACTION|>',
        [VERONA],
    ),
    "printed calls": ("```tool_code\nprint(weather(city='Verona'))\nprint( clock() )\n```", [VERONA, TIME]),
    "a fence in a tag": (
        '<|tool_call_start|>\n```python\nweather(city="Verona")\nclock()\n```\n<|tool_call_end|>',
        [VERONA, TIME],
    ),
    "an unknown tool in tags": (
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        [ToolCall("other", {})],
    ),
    "a call in a list of other values": ('[«{"name": "clock", "arguments": {}}», 5]', [TIME]),
    "a backslash before calls": (
        '\\«{"name": "clock", "arguments": {}}» \\["\\«{"name": "clock", "arguments": {}}»"]',
        [TIME, TIME],
    ),
}
# Texts that only resemble calls.
TEXTS = [
    "",
    " \n",
    "Nothing to call. \n",
    "a < b, {c}, [1, 2] and <tool_call",
    '<tool_call>weather("Verona")</tool_call>',
    '<tool_call>{"name": "clock", "arguments": {}',
    '<tool_call>{"name": 3}</tool_call>',
    '{"name": "clock"}',
    '{"name": "clock", "arguments": [1]}',
    '{"name": "clock", "arguments": {"x": NaN}}',
    '{"name": "clock", "arguments": {"x": 1e999}}',  # beyond float64: JSON has no number for infinity
    '{"name": "clock", "arguments": "{\\"x\\": -1e999}"}',
    '{"name": "clock", "arguments": "{\\"x\\": \\"\\\\ud800\\"}"}',
    '{"name": "clock", "arguments": "{\\"x\\": ' + "[" * 64 + "]" * 64 + '}"}',
    '{"name": "clock", "arguments": {"x": "\\ud800"}}',
    '{"name": "clock", "arguments": {]}',
    '{"name": "other", "arguments": {}} ',
    "{" + " " * 200 + '"name"',
    "[" * 30,
    '{"name": ' * 30,
    "<tool_call>" + " " * 65 + '{"name": "clock"}',
    '{"name": "clock", "arguments": ' + '{"a": ' * 64 + "1" + "}" * 65,
    *("[other()] and [clock] and [clock(s)] and [clock(1)] (clock(a=1))", "[clock(a=1, a=2)]"),
    *("[clock(a=b)]", "[clock(a=1e999)]", "[clock(a='\\ud800')]"),
    "[clock(a=" + "[" * 65 + "]" * 65 + ")]",
    *("[clock(a='b)] and more", "[clock(), 5]", "[clock(), other()]", "[clock()"),
    *("<function=other></function> <function=clock", "<tool_call><function=clock> x</function>"),
    "<tool_call><function=clock><parameter=a>1</parameter>",
    "<function=clock><parameter=a>1</parameter>2</function>",
    "<|tool_call_start|>" + " " * 65 + "[clock()]"[:-1],
    'clock{} and clock[ARGS]{} and ```json\nclock()\n``` and {"city": "Verona"}',
    "[TOOL_CALLS] and [TOOL_CALLS]clock[ARGS] and [TOOL_CALLS]clock[ARGS]{",
    *("[TOOL_CALLS]clock[CALL_ID]", "<tool_call>clock\n```json\n[1]\n```</tool_call>"),
    *("```tool_code\nx = clock()\n```", "```tool_code\nclock(a=b)\n```", "<function_calls>clock("),
    *("<tool_call>sorry</tool_call>", "<tool_call>clock<arg_key>a</arg_key></tool_call>"),
    "<tool_call>clock<arg_key>a</arg_key><arg_value>1</arg_value>",
    *(
        "call:clock{}",
        "<|tool_call>call:clock{a:b}<tool_call|>",
        "<|tool_call>call: {}",
        "<|tool_call>clock{",
    ),
    *('<|tool_call>call:clock{a:<escape>b<|"|>}', "<|tool_call>call:clock{a:[1}}", "<|tool_call>call"),
    '<|tool_call>call:clock{a:"b}"}',
    "<|tool_call>call:clock{a:" + "[" * 65 + "]" * 65 + "}",
    *("```python\nclock()\n```", "```tool_code\nprint(clock()\n```"),
    "```tool_code\nprint(print(clock()))\n```",
    '<function=other>{"city": "Verona"}</function>',
    "<function=clock>{]</function>",
]


def by_pieces_of(parser: ToolCallParser, text: str, size: int) -> Iterator[str | ToolCall]:
    for i in range(0, len(text), size):
        yield from parser.step(text[i : i + size])
    yield from parser.step("", last=True)


def by_pieces(text: str, size: int) -> tuple[str, list[ToolCall]]:
    """Parse a text in pieces of some size; at no time is more returned than is certain."""
    whole = parse_tool_calls(text, [WEATHER, CLOCK])
    made, calls = "", []
    for part in by_pieces_of(ToolCallParser([WEATHER, CLOCK]), text, size):
        if isinstance(part, str):
            made += part
            assert whole.text.startswith(made)
        else:
            calls.append(part)
    return made, calls


@pytest.mark.parametrize("case", ANSWERS)
def test_calls_are_found_in_any_pieces(case: str) -> None:
    marked, calls = ANSWERS[case]
    text = re.sub("[«»]", "", marked)
    around = re.sub("«.*?»", "", marked, flags=re.DOTALL) if text != marked else ""
    for size in (1, 2, 3, 5, 7, 1000):
        assert by_pieces(text, size) == (around, calls)


def test_text_that_resembles_a_call_is_text() -> None:
    for text in TEXTS:
        for size in (1, 5, 1000):
            assert by_pieces(text, size) == (text, [])


TYPED = {
    "name": "typed",
    "parameters": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "map": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
        }
    },
}


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "3", "3"),
        ("text", "true", "true"),
        ("count", "3", 3),
        ("count", "3.5", "3.5"),
        ("count", "three", "three"),
        ("ratio", "3", 3),
        ("ratio", "3.5", 3.5),
        ("ratio", "1e999", "1e999"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("flag", "1", "1"),
        ("list", '[1, "a"]', [1, "a"]),
        ("list", '{"a": 1}', '{"a": 1}'),
        ("list", "[" * 65 + "]" * 65, "[" * 65 + "]" * 65),
        ("list", "[" * 990 + "]" * 990, "[" * 990 + "]" * 990),
        ("map", '{"a": 1}', {"a": 1}),
        ("map", "None", None),
        ("either", "3", 3),
        ("either", "[3]", "[3]"),
        ("unknown", "3", 3),
        ("unknown", '"3"', '"3"'),
        ("unknown", "\n3 4\n", "\n3 4\n"),
    ],
)
def test_values_in_elements_have_the_types_of_the_parameters(name: str, written: str, value: Any) -> None:
    text = f"<function=typed><parameter={name}>\n{written}\n</parameter></function>"
    ((_, (call,)),) = [parse_tool_calls(text, [TYPED])]
    assert call.arguments == {name: value}
    assert type(call.arguments[name]) is type(value)


@pytest.mark.parametrize("name", ["lfm2.5", "qwen35", "granite4"])
def test_calls_are_found_in_what_templates_write(name: str) -> None:
    arguments = {
        "city": "Verona\n(<b>) é",
        "days": 3,
        "x": [1, "two", None, True],
        "m": {"k": [1.5]},
        "f": -0.25,
    }
    calls = [ToolCall("weather", arguments), TIME]
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "So.",
        "tool_calls": [call.as_message() for call in calls],
    }
    family = FAMILIES[name]
    template = ChatTemplate(family.template, family.special)
    written = [
        "".join(text for text, special in template.render(messages, {}) if not special or "tool" in text)
        for messages in ([*ASKED, answer], ASKED)
    ]
    made = written[0].removeprefix(written[1]).removeprefix("assistant").removesuffix("\n")
    made = made.removeprefix("\n").removeprefix("<think>\n\n</think>\n\n")
    assert parse_tool_calls(made, [WEATHER, CLOCK]) == ("So.", calls)


def test_a_call_longer_than_the_limit_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tool_calls, "LONGEST_CALL", 100)
    call = '{"name": "clock", "arguments": {"a": "%s"}}'
    longest = call % ("x" * (100 - len(call % "")))
    for size in (1, 7, 1000):
        assert by_pieces(longest, size)[1] != []
        assert by_pieces(longest.replace("x", "xx", 1), size) == (longest.replace("x", "xx", 1), [])
        text, calls = by_pieces("<tool_call>" + longest.replace("x", "xx", 1) + longest, size)
        assert (text, len(calls)) == ("<tool_call>" + longest.replace("x", "xx", 1), 1)
    for beginning in ('{"name": "', "[clock(a='", "<function="):  # no more is held back than a call may have
        parser = ToolCallParser([CLOCK])
        passed = sum(len(str(part)) for _ in range(100) for part in parser.step(beginning))
        assert passed >= 99 * len(beginning) - 100
    python = "[clock(a='" + "x" * 86 + "')]"
    for size in (1, 7, 1000):
        assert by_pieces(python, size)[1] == [ToolCall("clock", {"a": "x" * 86})]
        assert by_pieces(python.replace("x", "xxx", 1), size) == (python.replace("x", "xxx", 1), [])


def steps_of(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the lines that the parser executes, and the characters of JSON that it reads."""
    steps = 0
    folder = str(Path(_tool_calls.__file__).parent)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        steps += event == "line"
        return trace if frame.f_code.co_filename.startswith(folder) else None

    def loads(text: str) -> Any:
        nonlocal steps
        steps += len(text)
        return read(text)

    read = json.loads
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", loads)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            list(by_pieces_of(ToolCallParser([CLOCK]), text, size))
        finally:
            sys.settrace(before)
    return steps


@pytest.mark.parametrize(
    "parts",
    [
        ('{"name" ',),
        ('{"name": "',),
        ('<tool_call>{"a": ',),
        ('<tool_call>{"a": 1}',),
        ('\\{"name"',),
        ('[{"name": ', "1", "}]"),
        ('{"name": ', "1", "}"),
        ('{"name": [', "1", "}"),
        ("<tool_call>", " ", ""),
        ('{"name": "clock", "arguments": {}}', " ", ""),
        ("<function=clock>",),
        ("<function=clock><parameter=a>", "</parameter>", "x</function>"),
        ("<tool_call><function=clock>", " ", "</function>"),
        ("[clock(a='",),
        ("[clock(a=", "[", "]"),
        ("<|tool_call_start|>[clock(a='", "')", "]"),
        ("[clock(a='", "' ", "\\"),
        ("<tool_calls><tool_call>",),
        ("[TOOL_CALLS]clock[ARGS]",),
        ("[TOOL_CALLS]clock[CALL_ID]", "a", "{"),
        ("<function=clock>{",),
        ("<function_calls>clock()", " clock()", ""),
        ("<function_calls>clock()", " clock(", ")"),
        ("```tool_code clock(a=", "[", "]"),
        ("```tool_code print(", "print(", ")"),
        ("<tool_call>clock<arg_key>", "a</arg_key><arg_value>", "</arg_value>"),
        ("<tool_call>clock<arg_key>a</arg_key><arg_value>", "<arg_value>", "</tool_call>"),
        ("<|tool_call>call:clock{a:", "[", "]"),
        ("<|tool_call>call:clock{a:", '<|"|>', "}"),
        ("<|tool_call>call:clock{", "<escape>", "}"),
        ("<|tool_call>call:clock{a", " ", ":1}"),
    ],
    ids=lambda parts: parts[0],
)
def test_parsing_takes_linear_time(parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (5, 100_000):
        once, twice = (steps_of("".join(part * n for part in parts), size, monkeypatch) for n in (50, 100))
        assert twice < 2.2 * once


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    parser = ToolCallParser()
    assert parser.step("So ") == ["So"]
    assert parser.step("<") == []
    assert parser.step("b>, {") == [" <b>,"]
    assert parser.step('"a": 1}') == [' {"a": 1}']
    assert parser.step('{"name": "f", "argu') == []
    assert parser.step('ments": {}}') == [ToolCall("f", {})]
    assert parser.step(" and", last=True) == [" and"]


@pytest.mark.parametrize(
    ("tools", "error", "message"),
    [
        ([CLOCK, "clock"], TypeError, "tool 1 must be a mapping with a name, got str"),
        ([{"description": "?"}], ValueError, "tool 0 has no name"),
        ([{"function": {"name": ""}}], ValueError, "tool 0 has no name"),
    ],
)
def test_invalid_tools_are_rejected(tools: Any, error: type[Exception], message: str) -> None:
    for check in (lambda: ToolCallParser(tools), lambda: ChatTemplate(HERMES, []).render(ASKED, {}, tools)):
        with pytest.raises(error, match=message):
            check()


def rendered(template: str, messages: list[dict[str, Any]], *tools: Any) -> str:
    pieces = ChatTemplate(template, []).render(messages, {"add_generation_prompt": True}, list(tools))
    return "".join(text for text, _ in pieces)


def test_the_template_renders_tools_calls_and_results() -> None:
    call = {**VERONA.as_message(), "id": "c1"}
    messages: list[dict[str, Any]] = [
        *ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "rain"},
    ]
    expected = (
        f"<tools>\n{json.dumps(WEATHER)}\n{json.dumps(CLOCK)}\n</tools>\n"
        "user: How is it in Verona?\n"
        'assistant: I look.\n<tool_call>{"name": "weather", "arguments": {"city": "Verona"}}</tool_call>\n'
        "<tool_response>rain</tool_response>\nassistant: "
    )
    assert rendered(HERMES, messages, WEATHER, CLOCK) == expected
    as_json = {"name": "weather", "arguments": '{"city": "Verona"}'}
    messages[1]["tool_calls"] = [{"type": "function", "function": as_json}]
    assert rendered(HERMES, messages, WEATHER, CLOCK) == expected
    assert as_json["arguments"] == '{"city": "Verona"}', "a message of the caller was changed"


def test_a_template_sees_no_tools_by_default() -> None:
    assert rendered(GENERIC, ASKED) == "user: How is it in Verona?\nassistant: "
    assert rendered(GENERIC, ASKED, CLOCK).startswith('[{"name": "clock", "parameters": {}}]user')


def test_a_tool_never_writes_a_control_token() -> None:
    end = "<|im_end|>"
    hostile = {"name": f"n{end}", "description": f"{end}<|im_{end}end|>", f"k{end}": [end]}
    template = ChatTemplate(HERMES + end, [end])
    pieces = template.render(ASKED, {}, [hostile])
    assert [text for text, special in pieces if special] == [end]
    assert json.dumps(hostile) in "".join(text for text, _ in pieces)


def test_a_template_without_tool_support_is_reported(bundled: Model) -> None:
    message = "the chat template does not support tools"
    with pytest.raises(ChatTemplateError, match=message):
        bundled.tokenizer.apply_chat_template(ASKED, tools=[WEATHER])
    with pytest.raises(ChatTemplateError, match=message):
        Conversation(bundled, tools=[WEATHER])


@pytest.fixture
def model(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """Open the bundled model as if its file had templates."""
    templates = {
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": HERMES,
    }
    monkeypatch.setattr(Tokenizer, "_template_source", lambda self, key: templates[key])
    with Model(demo_path, device="cpu") as opened:
        yield opened


def test_a_file_may_have_a_separate_tool_template(model: Model) -> None:
    def text(**options: Any) -> str:
        return model.tokenizer.decode(model.tokenizer.apply_chat_template(ASKED, **options))

    assert text() == text(tools=[]) == ASKED[0]["content"]
    assert text(tools=[CLOCK]) == rendered(HERMES, ASKED, CLOCK)


ARGUMENTS = json.dumps({"city": 'V"é\\', "n": [1, -2.5e3, True, None, {"x": "\U0001f600"}], "t": False})
CALLING = r'I look\.\n<tool_call>\{"name": "weather", "arguments": \{"city": "[a-z]{1,3}"\}\}</tool_call>'


def test_a_conversation_calls_tools_and_receives_results(model: Model, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="a constraint lets the bundled model call tools")
    chat = Conversation(model, tools=[WEATHER])
    assert "".join(chat.answer(ASKED[0]["content"], regex=CALLING)) == "I look."
    (call,) = chat.calls
    assert (call.name, list(call.arguments)) == ("weather", ["city"])
    assert re.fullmatch("[a-zA-Z0-9]{9}", call.id or "")
    called = {"role": "assistant", "content": "I look.", "tool_calls": [call.as_message()]}
    assert chat.messages == [*ASKED, called]
    chat.save(tmp_path / "talk.session")

    assert chat.finish_reason == "stop"
    with pytest.raises(ValueError, match="the last answer has 1 calls, got 2 results"):
        chat.answer_calls(["rain", "sun"])
    answer = "".join(chat.answer_calls([{"sky": "é"}], regex="Rain, [a-z]{3}"))
    result = {"role": "tool", "name": "weather", "tool_call_id": call.id, "content": '{"sky": "é"}'}
    assert chat.messages == [*ASKED, called, result, {"role": "assistant", "content": answer}]
    assert chat.session.stats()["tokens_reused"] > 100  # tools, question and most of the call
    with pytest.raises(ValueError, match="the last answer calls no tools"):
        chat.answer_calls([])

    chat.load(tmp_path / "talk.session")
    assert chat.calls == [call]


def test_a_saved_conversation_is_loaded_as_it_was(model: Model, tmp_path: Path) -> None:
    chat, other = Conversation(model), Conversation(model)
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
    chat.messages = [
        *ASKED,
        {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "sunny"},
    ]
    chat.save(tmp_path / "talk.session")
    other.load(tmp_path / "talk.session")
    assert other.messages == chat.messages


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [('{"a"', "Expecting ':' delimiter"), ("[" * 99 + "]" * 99, "nested too deeply"), ([1], "not an object")],
)
def test_an_error_of_a_call_shows_it(arguments: Any, reason: str) -> None:
    call = {"function": {"name": "clock", "arguments": arguments}}
    with pytest.raises(ValueError, match=r"^not a tool call: \{'function': \{'name': 'clock', .*" + reason):
        ToolCall.from_message(call)


def test_arguments_that_end_too_early_are_completed() -> None:
    """Those that are complete before the end are as they are."""
    whole = json.loads(ARGUMENTS)
    for cut in range(len(ARGUMENTS) + 1):
        found = read_arguments(ARGUMENTS[:cut])
        assert list(found) == list(whole)[: len(found)]
        assert [found[key] for key in list(found)[:-1]] == [whole[key] for key in list(found)[:-1]]


@pytest.mark.parametrize("text", ["hello", "[1", "{} x", "{'a': 1", '{"a": 1}}', '{"a": NaN', "5"])
def test_what_begins_no_arguments_is_not_completed(text: str) -> None:
    assert not isinstance(read_arguments(text), dict)


def test_turns_with_calls_are_dropped_together(model: Model) -> None:
    pytest.importorskip("llguidance", reason="a constraint lets the bundled model call tools")
    chat = Conversation(model, tools=[CLOCK], max_context=250)
    forgotten = 0
    for _ in range(4):
        list(chat.answer("How?", 60, regex=r'<tool_call>\{"name": "clock"\}</tool_call>'))
        forgotten += chat.forgotten
        list(chat.answer_calls(["noon"], 8, regex="[a-z]{4}"))
        forgotten += chat.forgotten
        roles = [m["role"] for m in chat.messages]
        assert roles == ["user", "assistant", "tool", "assistant"] * (len(roles) // 4)
    assert forgotten > 0
