"""Prefixes of prompts on disk: found after a restart, bounded, verified."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.chat_templates import CHATML
from support.recurrent import LARGE
from support.running_server import Running, running
from support.small_models import write

from metal_prefill import Model

SYSTEM = "A room in the castle. Enter HAMLET, the king, and players, who speak of what they saw. " * 10


def ask(server: Running, question: str, system: str = SYSTEM) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return server.client().chat.completions.create(
        model=server.service.names[0], messages=messages, max_tokens=6, temperature=0
    )


def text_alone(model: Model, question: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    with model.session() as session:
        ids = model.tokenizer.apply_chat_template(messages)
        return "".join(session.generate(ids, 6, stop=model.tokenizer.chat_stop))


@pytest.fixture
def restarted(demo_path: Path, tmp_path: Path) -> Callable[..., Any]:
    """Serve with a fresh model, as after a restart, and a persistent store."""

    def serve(**limits: Any) -> Any:
        class Served:
            def __enter__(self) -> tuple[Running, Model]:
                self.model = Model(demo_path, device="cpu")
                self.running = running(self.model, prefix_store=tmp_path / "store", **limits)
                return self.running.__enter__(), self.model

            def __exit__(self, *error: Any) -> None:
                self.running.__exit__(None, None, None)
                self.model.close()

        return Served()

    return serve


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store").glob("*/*.session"))


def test_the_state_after_a_system_message_is_loaded_after_a_restart(tmp_path: Path) -> None:
    """Also one that is shorter than the distance of snapshots, and ends within a page."""
    path = write(tmp_path / "m.gguf", replace(LARGE["lfm2"], context=1024))
    system, computed = "word " * 30, []
    for questions in (("old", "further", "thus"), ("new", "known")):
        with (
            Model(path, device="cpu", threads=1) as model,
            patch.object(model.tokenizer._templates, "_source", {"tokenizer.chat_template": CHATML}.get),
            running(model, prefix_store=tmp_path / "store") as server,
        ):
            for question in questions:
                usage = ask(server, question, system).usage
                computed.append(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)
            of_system = len(model.tokenizer.apply_chat_template([{"role": "system", "content": system}]))
    assert 64 < of_system < computed[0] < 320
    assert max(computed[1:]) < 40  # a question, and the headers of two messages


def test_a_known_system_message_is_loaded_after_a_restart(
    restarted: Callable[..., Any], tmp_path: Path, cpu_model: Model
) -> None:
    with restarted() as (server, _):
        assert ask(server, "Who art thou?").usage.prompt_tokens_details.cached_tokens == 0
        ask(server, "What is thy name?")
    (stored,) = files(tmp_path)
    with restarted() as (server, _):
        answer = ask(server, "Whence comest thou?")
    n = int(stored.name.split("-")[0])
    assert n >= 128
    assert answer.usage.prompt_tokens_details.cached_tokens >= n
    assert answer.choices[0].message.content == text_alone(cpu_model, "Whence comest thou?")
    assert stored.parent.stat().st_mode & 0o77 == 0


def test_a_damaged_file_is_removed_and_recomputed(
    restarted: Callable[..., Any], tmp_path: Path, cpu_model: Model
) -> None:
    with restarted() as (server, _):
        ask(server, "Who art thou?")
        ask(server, "What is thy name?")
    (stored,) = files(tmp_path)
    content = bytearray(stored.read_bytes())
    content[-100] ^= 1
    stored.write_bytes(content)
    with restarted() as (server, _):
        answer = ask(server, "Whence comest thou?")
        assert files(tmp_path) == []
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.choices[0].message.content == text_alone(cpu_model, "Whence comest thou?")


def test_a_file_under_a_wrong_name_is_not_used(restarted: Callable[..., Any], tmp_path: Path) -> None:
    with restarted() as (server, _):
        for system in (SYSTEM, SYSTEM[5:]):
            ask(server, "Who art thou?", system)
            ask(server, "What is thy name?", system)
    first, second = files(tmp_path)
    content = second.read_bytes()
    second.write_bytes(first.read_bytes())
    first.write_bytes(content)
    with restarted() as (server, _):
        assert ask(server, "Whence comest thou?").usage.prompt_tokens_details.cached_tokens == 0


def test_a_conversation_that_continues_is_stored_once_when_the_server_closes(
    restarted: Callable[..., Any], tmp_path: Path
) -> None:
    messages: list[Any] = [{"role": "user", "content": SYSTEM}]

    def turn(server: Running) -> Any:
        answer = server.client().chat.completions.create(
            model=server.service.names[0], messages=messages, max_tokens=4, temperature=0
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "And then?"})
        return answer.usage

    with restarted() as (server, _):
        turn(server)
        assert turn(server).prompt_tokens_details.cached_tokens > 0
        last = turn(server).prompt_tokens
        assert files(tmp_path) == []
    with restarted() as (server, _):
        ask(server, "Who art thou?")
    (stored,) = files(tmp_path)  # also not that of a single question
    n = int(stored.name.split("-")[0])
    assert last - 64 <= n < last
    with restarted() as (server, _):
        usage = turn(server)
    assert usage.prompt_tokens_details.cached_tokens == n


def test_files_beyond_the_limit_are_removed_least_recently_used_first(
    restarted: Callable[..., Any], tmp_path: Path
) -> None:
    def store(server: Running, i: int) -> None:
        for question in ("Who art thou?", "What is thy name?"):
            ask(server, question, f"{i}. {SYSTEM}")

    with restarted() as (server, _):
        store(server, 0)
    (oldest,) = files(tmp_path)
    with restarted(prefix_store_bytes=oldest.stat().st_size * 5 // 2) as (server, _):
        store(server, 1)
    newer = set(files(tmp_path)) - {oldest}
    assert len(newer) == 1
    with restarted(prefix_store_bytes=oldest.stat().st_size * 5 // 2) as (server, _):
        ask(server, "Whence?", f"0. {SYSTEM}")
        store(server, 2)
    left = set(files(tmp_path))
    assert oldest in left
    assert len(left) == 2
    assert not newer & left
