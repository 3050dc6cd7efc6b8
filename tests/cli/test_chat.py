"""Conversations, and ``metal-prefill chat`` through pipes and on a terminal."""

import enum
import io
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metal_prefill import ContextOverflowError, Conversation, Model, SessionBusyError, StateError, cli
from metal_prefill.synth import synthesize

QUESTIONS = ["Who art thou?", "What is thy name?", "Where goest thou?"]


def talk(chat: Conversation, *questions: str, max_tokens: int = 24) -> list[str]:
    return ["".join(chat.answer(question, max_tokens)) for question in questions]


SYSTEM = {"role": "system", "content": "A room in the castle."}


@pytest.fixture
def chat(bundled: Model) -> Conversation:
    return Conversation(bundled, system=SYSTEM["content"])


def test_turns_continue_the_template_and_reuse_the_cache(bundled: Model, chat: Conversation) -> None:
    messages: list[dict[str, str]] = [SYSTEM]
    for question, answer in zip(QUESTIONS, talk(chat, *QUESTIONS), strict=True):
        held = bundled.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        messages.append({"role": "user", "content": question})
        with bundled.session() as fresh:
            prompt = bundled.tokenizer.apply_chat_template(messages)
            assert "".join(fresh.generate(prompt, 24, stop="\n\n")) == answer
        messages.append({"role": "assistant", "content": answer})
    assert chat.messages == messages
    # All turns but the last, except the end of an answer, whose tokens were not generated in this form.
    assert chat.session.stats()["tokens_reused"] >= len(held) - 4


def test_a_stopped_answer_stays_in_the_conversation(chat: Conversation) -> None:
    pieces = chat.answer(QUESTIONS[0], 24)
    begun = "".join(islice(pieces, 3))
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": begun}
    assert talk(chat, QUESTIONS[1])


@pytest.mark.parametrize("count", [0, 3])
def test_an_unfinished_answer_ends_where_the_next_one_begins(chat: Conversation, count: int) -> None:
    left = chat.answer(QUESTIONS[0], 24)
    begun = "".join(islice(left, count))
    (answer,) = talk(chat, QUESTIONS[1])
    turns = [(QUESTIONS[0], begun)] * bool(count) + [(QUESTIONS[1], answer)]
    pairs = [({"role": "user", "content": q}, {"role": "assistant", "content": a}) for q, a in turns]
    messages = [SYSTEM, *(message for pair in pairs for message in pair)]
    assert chat.messages == messages
    if count:
        with pytest.raises(SessionBusyError, match="this answer ended where the conversation was continued"):
            next(left)
    left.close()
    assert chat.messages == messages


def test_an_unfinished_answer_is_not_part_of_what_follows_it(chat: Conversation, tmp_path: Path) -> None:
    chat.save(tmp_path / "c.session")
    for replace in (chat.reset, lambda: chat.load(tmp_path / "c.session")):
        left = chat.answer(QUESTIONS[0], 24)
        next(left)
        replace()
        left.close()
        assert chat.messages == [SYSTEM]


def test_an_unfinished_answer_ends_where_the_conversation_is_saved_or_calls_are_answered(
    bundled: Model, chat: Conversation, tmp_path: Path
) -> None:
    begun = next(chat.answer(QUESTIONS[0], 24))
    chat.save(tmp_path / "c.session")
    messages = [SYSTEM, {"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": begun}]
    loaded = Conversation(bundled)
    loaded.load(tmp_path / "c.session")
    assert loaded.messages == chat.messages == messages
    chat.reset()
    left = chat.answer(QUESTIONS[0], 24)
    next(left)
    with pytest.raises(ValueError, match="calls no tools"):
        chat.answer_calls([])
    assert chat.messages == messages
    left.close()


def test_a_complete_answer_just_ends_after_another_one_began(chat: Conversation) -> None:
    complete = chat.stream(QUESTIONS[0], 4)
    while next(complete).finish_reason is None:
        pass
    talk(chat, QUESTIONS[1])
    assert list(complete) == []
    assert [message["role"] for message in chat.messages[1:]] == ["user", "assistant"] * 2


@pytest.mark.parametrize("threads", [0, 1], ids=["callback", "thread"])
def test_a_conversation_is_busy_while_an_answer_is_computed(
    chat: Conversation, tmp_path: Path, threads: int
) -> None:
    path = tmp_path / "c.session"
    chat.save(path)
    changes: list[Callable[[], object]] = [
        lambda: next(chat.answer(QUESTIONS[1])),
        lambda: chat.answer_calls([]),
        lambda: chat.save(path),
        lambda: chat.load(path),
        chat.reset,
    ]
    rejected = []

    def change() -> None:
        for changed in changes:
            with pytest.raises(SessionBusyError, match="an answer of this conversation is being computed"):
                changed()
            rejected.append(changed)

    def progress(done: int, total: int) -> None:
        if threads:
            with ThreadPoolExecutor(threads) as pool:
                pool.submit(change).result()
        else:
            change()

    answer = "".join(chat.answer(QUESTIONS[0], 8, progress=progress))
    assert rejected[: len(changes)] == changes
    said = {"role": "user", "content": QUESTIONS[0]}
    assert chat.messages == [SYSTEM, said, {"role": "assistant", "content": answer}]


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize(
    ("question", "options", "error", "message"),
    [
        (QUESTIONS[1], {"progress": interrupt}, KeyboardInterrupt, None),
        (QUESTIONS[1], {"temperature": -1.0}, ValueError, "temperature"),
        ("word " * 1000, {}, ContextOverflowError, "exceeds the context of 1024"),
    ],
    ids=["interrupted", "refused", "too long"],
)
def test_a_failed_answer_leaves_the_conversation_unchanged(
    chat: Conversation,
    turns: int,
    question: str,
    options: dict[str, Any],
    error: type[BaseException],
    message: str | None,
) -> None:
    talk(chat, *QUESTIONS[:turns])
    before = list(chat.messages)
    with pytest.raises(error, match=message):
        list(chat.answer(question, **options))
    assert chat.messages == before
    assert talk(chat, QUESTIONS[1])


def test_the_oldest_turns_are_dropped_when_the_context_is_full(bundled: Model) -> None:
    chat = Conversation(bundled, system="A room.", max_context=96)
    forgotten = 0
    for i in range(12):
        talk(chat, f"Question the {i}th?", max_tokens=8)
        forgotten += chat.forgotten
        assert chat.session.position <= 96
        assert chat.messages[0]["content"] == "A room."
        assert [m["role"] for m in chat.messages[1:]] == ["user", "assistant"] * (
            (len(chat.messages) - 1) // 2
        )
        assert chat.messages[-2]["content"] == f"Question the {i}th?"
    assert forgotten == 2 * 12 - (len(chat.messages) - 1) > 0


def test_an_error_restores_the_turns_that_were_dropped_for_it(bundled: Model) -> None:
    chat = Conversation(bundled, max_context=96)
    while not chat.forgotten:
        talk(chat, "Who art thou?", max_tokens=8)
    before = list(chat.messages), chat.forgotten
    with pytest.raises(ContextOverflowError):
        list(chat.answer("and " * 200))
    assert (chat.messages, chat.forgotten) == before


def test_a_saved_conversation_continues(bundled: Model, chat: Conversation, tmp_path: Path) -> None:
    talk(chat, QUESTIONS[0])
    chat.save(tmp_path / "talk.session")
    expected = talk(chat, QUESTIONS[1])
    other = Conversation(bundled)
    talk(other, "Something else.")
    other.load(tmp_path / "talk.session")
    assert talk(other, QUESTIONS[1]) == expected
    assert other.messages == chat.messages
    assert other.session.stats()["tokens_reused"] > 20


def test_files_without_a_conversation_are_rejected(
    bundled: Model, chat: Conversation, tmp_path: Path
) -> None:
    talk(chat, QUESTIONS[0])
    before = list(chat.messages)
    call = '[{"role": "assistant", "content": "", "tool_calls": [{"name": 3}]}]'
    for i, notes in enumerate(["", "no json", "3", '["text"]', '[{"role": "user"}]', call, "[" * 100_000]):
        path = tmp_path / f"{i}.session"
        with bundled.session() as session:
            session.notes = notes
            session.save(path)
        with pytest.raises(StateError, match="no conversation"):
            chat.load(path)
    with pytest.raises(FileNotFoundError):
        chat.load(tmp_path / "absent")
    assert chat.messages == before
    assert talk(chat, QUESTIONS[1])


def test_answers_accept_text_options(bundled: Model, chat: Conversation) -> None:
    prompt = bundled.tokenizer.apply_chat_template([SYSTEM, {"role": "user", "content": QUESTIONS[0]}])
    comma = bundled.tokenizer.encode(",", add_bos=False)[0]
    cases: list[dict[str, Any]] = [
        {"stop": "e"},
        {"stop": [comma, "\n"], "min_tokens": 3},
        {"stop": np.int64(comma), "speculate": "lookup"},
        {"logit_bias": {comma: -float("inf")}, "temperature": 1.0, "seed": 2},
    ]
    for options in cases:
        given = options.get("stop", [])
        stop = ["\n\n", *(given if isinstance(given, list) else [given])]
        with bundled.session() as fresh:
            expected = list(fresh.stream(prompt, 24, logprobs=1, **{**options, "stop": stop}))
        text = "".join(chat.answer(QUESTIONS[0], 24, **options))
        assert text == "".join(piece.text for piece in expected)
        assert chat.finish_reason == expected[-1].finish_reason
        chat.reset()
        assert list(chat.stream(QUESTIONS[0], 24, logprobs=1, **options)) == expected
        assert chat.messages[-1] == {"role": "assistant", "content": text}
        chat.reset()
    with pytest.raises(ValueError, match="echo is not supported in a conversation"):
        list(chat.answer(QUESTIONS[0], echo=True))
    assert chat.messages == [SYSTEM]


def test_decoding_runs_no_python_inside_numpy(bundled: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing a NumPy integer with an enumeration does, and NumPy swallows a Ctrl-C that arrives there."""
    decoder = bundled.tokenizer.decoder()
    calls: list[str] = []

    def look_up(cls: type, name: str) -> None:
        calls.append(name)
        raise AttributeError(name)

    monkeypatch.setattr(enum.EnumMeta, "__getattr__", look_up, raising=False)
    for token in range(0, bundled.config.vocab_size, 7):
        decoder.step(token)
    assert calls == []


Piped = Callable[..., tuple[int, str, str]]


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Piped:
    """Run the command with a text as its input; return the exit code, the output and the errors."""

    def run(text: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = cli.main(["chat", "--device", "cpu", *options])
        return code, *capsys.readouterr()

    return run


def test_a_conversation_works_through_pipes(piped: Piped, bundled: Model, tmp_path: Path) -> None:
    expected = talk(Conversation(bundled, system="A room."), *QUESTIONS)
    lines = [QUESTIONS[0], "", f"/save {tmp_path}/talk.session", *QUESTIONS[1:], "/quit", "unheard"]
    code, out, err = piped("\n".join(lines), "--system", "A room.", "-n", "24", "--stats")
    assert (code, out) == (0, "".join(answer + "\n" for answer in expected)), err
    assert "has no chat template, so it continues texts rather than answers" in err
    assert "-m smollm2" in err
    stats = re.findall(r"\[prompt: (\d+) tokens, (\d+) reused", err)
    assert len(stats) == 3
    assert int(stats[0][1]) == 0
    for (before, _), (_, reused) in pairwise(stats):
        assert int(reused) >= int(before)
    _, out, _ = piped(QUESTIONS[1], "--load", f"{tmp_path}/talk.session", "-n", "24")
    assert out == expected[1] + "\n"


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("/nonsense", 2, "unknown command /nonsense; /help lists the commands"),
        ("/save", 2, "name a file"),
        ("/load /absent/file", 1, "/absent/file: No such file or directory"),
    ],
)
def test_an_error_ends_a_piped_conversation(piped: Piped, line: str, code: int, message: str) -> None:
    ended, out, err = piped(f"{line}\n{QUESTIONS[0]}\n")
    assert (ended, out) == (code, "")
    assert message in err


def test_help_and_reset_work_through_a_pipe(piped: Piped) -> None:
    asked = f"{QUESTIONS[0]}\n"
    _, out, err = piped(f"{2 * asked}/reset\n/help\n{asked}", "-n", "12", "--stats")
    first, _, last = out.splitlines()
    assert first == last
    prompts = [int(n) for n in re.findall(r"\[prompt: (\d+) tokens", err)]
    assert prompts[0] == prompts[2] < prompts[1]
    for command in ("/reset", "/save", "/load", "/help", "/quit"):
        assert command in err


# Makes the terminal on stdin the controlling one, whose Ctrl-C reaches the process, as a shell does.
ON_TERMINAL = (
    "import fcntl, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "from metal_prefill.cli import main\n"
    "sys.exit(main(['chat', '--device', 'cpu', *sys.argv[1:]]))"
)


class Terminal:
    """A person at a terminal that runs the command."""

    def __init__(self, *options: str) -> None:
        self._master, slave = os.openpty()
        self._seen = ""
        self._child = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *options],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)

    def wait_for(self, pattern: str) -> str:
        """Read until a pattern matches; return the text up to its end.

        Carriage returns are left out: a read may end between one and its line feed.
        """
        end = time.monotonic() + 60
        while (found := re.search(pattern, self._seen)) is None:
            ready, _, _ = select.select([self._master], [], [], max(end - time.monotonic(), 0))
            assert ready, f"waited for {pattern!r}, saw {self._seen[-500:]!r}"
            try:
                self._seen += os.read(self._master, 4096).decode(errors="replace").replace("\r", "")
            except OSError:  # Linux's error when the other side is closed
                pytest.fail(f"the command ended; waited for {pattern!r}, saw {self._seen[-500:]!r}")
        read, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return read

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self, pattern: str) -> None:
        """Press Ctrl-C at the prompt, repeatedly if nothing happens.

        CPython's `input` misses a signal that arrives between printing the prompt and waiting for a key.
        """
        for _ in range(5):
            self.type("\x03")
            if select.select([self._master], [], [], 5)[0]:
                break
        self.wait_for(pattern)

    def exit_code(self) -> int:
        code = self._child.wait(30)
        os.close(self._master)
        return code

    def close(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()


def test_a_conversation_works_in_a_terminal(bundled: Model) -> None:
    expected = talk(Conversation(bundled), *QUESTIONS[:2])
    with closing(Terminal("-n", "24")) as terminal:
        assert "/help lists the commands" in terminal.wait_for("> ")
        for question, answer in zip(QUESTIONS, expected, strict=False):
            terminal.type(question + "\n")
            assert answer in terminal.wait_for("\n> ")
        terminal.type("/nonsense\n")
        terminal.wait_for("error: unknown command /nonsense.*\n> ")
        terminal.interrupt("/quit or Ctrl-D ends the conversation\n> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    """A random model with a long context talks until it is stopped."""
    synthesize(tmp_path / "endless.gguf", preset="tiny", context=200_000)
    with closing(Terminal("-m", f"{tmp_path}/endless.gguf", "-n", "150000")) as terminal:
        terminal.wait_for("> ")
        terminal.type("Hello\n")
        terminal.wait_for(r"Hello\n.{40}")
        terminal.type("\x03")
        terminal.wait_for(r"\[stopped\]\n+> ")
        terminal.type(f"/save {tmp_path}/talk.session\n")
        terminal.wait_for("> ")
        terminal.type("/quit\n")
        assert terminal.exit_code() == 0
    with Model(tmp_path / "endless.gguf", device="cpu") as model:
        messages = json.loads(model.load_session(tmp_path / "talk.session").notes)
    assert [m["role"] for m in messages] == ["user", "assistant"]
    assert len(messages[1]["content"]) >= 20
