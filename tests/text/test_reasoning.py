"""Reasoning of a model before its answer, separated from it piece by piece."""

import itertools
import time

import pytest

from metal_prefill.text._reasoning import CHANNEL, THINK, ReasoningGate, ReasoningParser, Tags, begins_in

CASES = {
    "both": (
        False,
        "\n<think>\nIt is\n late.\n</think>\n\nGood\n night.\n",
        "It is\n late.",
        "Good\n night.\n",
    ),
    "begun in the prompt": (True, "\nIt is.</think>Good.", "It is.", "Good."),
    "nothing to think about": (False, "<think>\n\n</think>\n\nGood.", "", "Good."),
    "no end": (False, "<think>It is </thi", "It is </thi", ""),
    "no reasoning": (False, " Good <think>x</think>", "", " Good <think>x</think>"),
    "the start of a tag": (False, "\n<thin", "", "\n<thin"),
    "an end alone": (False, "Good.</think> night", "", "Good.</think> night"),
    "a second end": (True, "a</think>b</think>c", "a", "b</think>c"),
    "an end that breaks off": (True, "a </ </thin </think> b", "a </ </thin", "b"),
    "nothing": (False, "", "", ""),
    "white space": (True, " \n ", "", ""),
}


def with_tags(text: str, tags: Tags) -> str:
    return text.replace(THINK.begin, tags.begin).replace(THINK.end, tags.end)


def parts(begun: bool, pieces: list[str], tags: Tags = THINK) -> tuple[str, str]:
    parser = ReasoningParser(ReasoningGate(begun=begun, tags=tags))
    made = [parser.step(piece) for piece in pieces] + [parser.step("", last=True)]
    return "".join(part.reasoning for part in made), "".join(part.answer for part in made)


@pytest.mark.parametrize("tags", [THINK, CHANNEL], ids=["think", "channel"])
@pytest.mark.parametrize("name", CASES)
def test_parts_do_not_depend_on_the_division_of_the_text(name: str, tags: Tags) -> None:
    begun, *texts = CASES[name]
    text, reasoning, answer = (with_tags(part, tags) for part in texts)
    assert parts(begun, [text], tags) == parts(begun, list(text), tags) == (reasoning, answer)
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert parts(begun, [text[:first], text[first:second], text[second:]], tags) == (reasoning, answer)


def test_text_arrives_as_soon_as_it_is_decided() -> None:
    parser = ReasoningParser(ReasoningGate(begun=False))
    assert parser.step("<think>It") == ("It", "")
    assert parser.step(" is <") == (" is", "")
    assert parser.step(" late") == (" < late", "")
    assert parser.step("</think>") == ("", "")
    assert parser.step("\nGood") == ("", "Good")
    assert parser.step(" ") == ("", " ")


def test_a_prompt_may_begin_the_reasoning() -> None:
    assert begins_in("<|im_start|>assistant\n<think>\n")
    assert not begins_in("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert begins_in("<|turn>model\n<|channel>thought\n", CHANNEL)
    assert not begins_in("<|turn>model\n<|channel>thought\n<channel|>", CHANNEL)
    assert not begins_in("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n")


def test_pending_white_space_takes_linear_time() -> None:
    parser = ReasoningParser(ReasoningGate(begun=True))
    begin = time.process_time()
    for _ in range(200_000):
        parser.step(" ")
    assert parser.step("x</think>") == ("x", "")
    assert time.process_time() - begin < 5  # 0.2 s, or minutes if each step read all of it again


@pytest.mark.parametrize("tags", [THINK, CHANNEL], ids=["think", "channel"])
@pytest.mark.parametrize("name", CASES)
def test_a_gate_divides_the_text_as_it_is(name: str, tags: Tags) -> None:
    for size in [1, 3, 1000]:
        begun, *texts = CASES[name]
        text, reasoning, answer = (with_tags(part, tags) for part in texts)
        gate = ReasoningGate(begun=begun, tags=tags)
        parts = [gate.step(text[i : i + size]) for i in range(0, len(text), size)]
        thought = "".join(part for part, _ in parts)
        rest = "".join(part for _, part in parts) + gate.flush()
        assert thought + rest == text
        assert thought.strip().removeprefix(tags.begin).removesuffix(tags.end).strip() == reasoning
        assert rest.lstrip() == answer.lstrip()
