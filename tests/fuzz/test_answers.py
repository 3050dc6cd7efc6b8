"""Random answers with calls of tools in them: the parser takes them in any pieces.

The texts and calls do not depend on where an answer is cut, each call can be written as JSON, and the text is
the answer without its calls.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

from support.fuzzing import fuzz

from metal_prefill.text import ToolCall, ToolCallParser, parse_tool_calls

TOOLS: list[dict[str, Any]] = [
    {"name": "clock"},
    {"name": "weather", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}},
]
CALL = '{"name": "clock", "arguments": {}}'
PARTS = (
    *"<>{}[]\",:\\ \n\u00e9\u2003()=',",
    *('\\"', "\\ud800", '"\\ud800"', "1e999", "NaN", CALL, f"<tool_call>{CALL}</tool_call>"),
    *("<tool_call>", "</tool_call>", '{"name": "clock"', '{"name": "weather", "parameters": ', '[{"name'),
    *('"arguments": ', '"arguments": "{\\"a\\": 1}"', '"function": '),
    *("<function=clock>", "<function=weather>", "<parameter=a>", "<parameter=b>\n", "\n</parameter>"),
    *("</function>", "<function=clock></function>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("[clock(", "[clock()]", "weather(a=", "'it's'", "[TOOL_CALLS]", "clock", "[ARGS]", "{}"),
    *("```json", "```", "```tool_code", "print(", "a=", "<tool_calls>", "</tool_calls>"),
    *("<function_calls>", "</function_calls>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_call>", "<tool_call|>", "call:", '<|"|>', "<escape>", "a:"),
)


def write_answer(random: Random) -> str:
    """Return parts of calls in any order, nested, repeated, or with a few characters changed."""
    kind = random.random()
    parts = random.choices(PARTS, k=random.randrange(1, 25))
    if kind < 0.2:
        depth = random.choice((3, 30, 63, 64, 65, 300, 3000))
        opening, closing = random.choice((('{"name": ', "}"), ("[", "]"), ('{"a": [', "]}")))
        nested = opening * depth + random.choice(("1", CALL, "")) + closing * (depth - random.randrange(2))
        call = random.choice((f'{{"name": "clock", "arguments": {nested}}}', f"[clock(a={nested})]"))
        parts.insert(random.randrange(len(parts)), call)
    elif kind < 0.4:
        at = random.randrange(len(parts))
        parts[at : at + 3] = ["".join(parts[at : at + 3]) * random.choice((10, 100, 1000))]
    text = "".join(parts)
    for _ in range(random.choice((0, 0, 1, 3))):
        at = random.randrange(len(text))
        text = text[:at] + random.choice(PARTS) + text[at + random.randrange(3) :]
    return text


def in_pieces(text: str, random: Random) -> tuple[str, list[ToolCall]]:
    """Parse an answer that is split at random, and check each part."""
    parser = ToolCallParser(TOOLS)
    largest = random.choice((1, 3, 20, 1000))
    parts: list[str | ToolCall] = []
    at, end = 0, len(text) + random.choice((0, 1))  # the last piece may be empty
    while at < end:
        size = random.randint(1, largest)
        parts += parser.step(text[at : at + size], last=at + size >= end)
        at += size
    assert "" not in parts
    calls = [part for part in parts if isinstance(part, ToolCall)]
    for call in calls:
        json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()
    return "".join(part for part in parts if isinstance(part, str)), calls


def test_answers_with_calls() -> None:
    def run(path: Path, random: Random) -> None:
        text = path.read_bytes().decode()
        whole = parse_tool_calls(text, TOOLS)
        assert in_pieces(text, random) == whole
        rest = iter(text)
        assert all(character in rest for character in whole.text)  # in this order
        if not whole.calls:
            assert whole.text == text

    fuzz("answer", 200, lambda random: write_answer(random).encode(), run)
