"""Prefixes of prompts on disk, and their namespaces: a key finds no prefix of another one."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from starlette.datastructures import Headers
from support.recurrent import LARGE
from support.scheduled_texts import answer_alone
from support.servers.running_server import Running, running, serving
from support.small_models import write
from support.tools import CHATML

from metal_prefill import Model
from metal_prefill.serve import Settings
from metal_prefill.serve._endpoint import prefix_namespace
from metal_prefill.serve._prefix_store import RECENT_PROMPTS, PrefixStore

SYSTEM = "A room in the castle. Enter HAMLET, the king, and players, who speak of what they saw. " * 10


def ask(server: Running, question: str, system: str = SYSTEM) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return server.client().chat.completions.create(
        model=server.service.names[0], messages=messages, max_tokens=6, temperature=0
    )


def text_alone(model: Model, question: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return answer_alone(model, messages, 6)


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store").glob("*/*.session"))


def test_the_state_after_a_system_message_is_loaded_after_a_restart(tmp_path: Path) -> None:
    """A message may be shorter than the distance of snapshots, and end within a page."""
    path = write(tmp_path / "m.gguf", replace(LARGE["lfm2"], context=1024))
    system, computed = "word " * 30, []
    for questions in (("old", "further", "thus"), ("new", "known")):
        with (
            Model(path, device="cpu", threads=1) as model,
            patch.object(model.tokenizer, "_template_source", {"tokenizer.chat_template": CHATML}.get),
            running(model, prefix_store=tmp_path / "store") as server,
        ):
            for question in questions:
                usage = ask(server, question, system).usage
                computed.append(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)
            of_system = len(model.tokenizer.apply_chat_template([{"role": "system", "content": system}]))
    assert 64 < of_system < computed[0] < 320
    assert max(computed[1:]) < 40  # a question, and the headers of two messages


def test_a_known_system_message_is_loaded_after_a_restart(
    demo_path: Path, tmp_path: Path, cpu_model: Model
) -> None:
    with serving(demo_path, prefix_store=tmp_path / "store") as server:
        assert ask(server, "Who art thou?").usage.prompt_tokens_details.cached_tokens == 0
        ask(server, "What is thy name?")
    (stored,) = files(tmp_path)
    with serving(demo_path, prefix_store=tmp_path / "store") as server:
        answer = ask(server, "Whence comest thou?")
    n = int(stored.name.split("-")[0])
    assert n >= 128
    assert answer.usage.prompt_tokens_details.cached_tokens >= n
    assert answer.choices[0].message.content == text_alone(cpu_model, "Whence comest thou?")
    assert stored.parent.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("spoilt", ["damaged", "exchanged"])
def test_a_wrong_file_is_removed_and_its_prefix_computed(
    demo_path: Path, tmp_path: Path, cpu_model: Model, spoilt: str
) -> None:
    with serving(demo_path, prefix_store=tmp_path / "store") as server:
        for system in (SYSTEM, SYSTEM[5:]):
            ask(server, "Who art thou?", system)
            ask(server, "What is thy name?", system)
    first, second = files(tmp_path)
    contents = [bytearray(path.read_bytes()) for path in (first, second)]
    if spoilt == "exchanged":
        contents.reverse()
    else:
        for content in contents:
            content[-100] ^= 1
    for path, content in zip((first, second), contents, strict=True):
        path.write_bytes(content)
    with serving(demo_path, prefix_store=tmp_path / "store") as server:
        answer = ask(server, "Whence comest thou?")
        assert len(files(tmp_path)) == 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.choices[0].message.content == text_alone(cpu_model, "Whence comest thou?")


def test_a_conversation_that_continues_is_stored_once_when_the_server_closes(
    demo_path: Path, tmp_path: Path
) -> None:
    messages: list[Any] = [{"role": "user", "content": SYSTEM}]

    def turn(server: Running) -> Any:
        answer = server.client().chat.completions.create(
            model=server.service.names[0], messages=messages, max_tokens=4, temperature=0
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "And then?"})
        return answer.usage

    with serving(demo_path, prefix_store=tmp_path / "store") as server:
        turn(server)
        assert turn(server).prompt_tokens_details.cached_tokens > 0
        last = turn(server).prompt_tokens
        assert files(tmp_path) == []
    with serving(demo_path, prefix_store=tmp_path / "store") as server:
        ask(server, "Who art thou?")
    (stored,) = files(tmp_path)  # also not that of a single question
    n = int(stored.name.split("-")[0])
    assert last - 64 <= n < last
    with serving(demo_path, prefix_store=tmp_path / "store") as server:
        usage = turn(server)
    assert usage.prompt_tokens_details.cached_tokens == n


def test_files_beyond_the_limit_are_removed_least_recently_used_first(
    demo_path: Path, tmp_path: Path
) -> None:
    def store(server: Running, i: int) -> None:
        for question in ("Who art thou?", "What is thy name?"):
            ask(server, question, f"{i}. {SYSTEM}")

    limits: dict[str, Any] = {"prefix_store": tmp_path / "store"}
    with serving(demo_path, **limits) as server:
        store(server, 0)
    (oldest,) = files(tmp_path)
    limits["prefix_store_bytes"] = oldest.stat().st_size * 5 // 2
    with serving(demo_path, **limits) as server:
        store(server, 1)
    newer = set(files(tmp_path)) - {oldest}
    assert len(newer) == 1
    with serving(demo_path, **limits) as server:
        ask(server, "Whence?", f"0. {SYSTEM}")
        store(server, 2)
    left = set(files(tmp_path))
    assert oldest in left
    assert len(left) == 2
    assert not newer & left


PROMPT = [7 * i % 250 for i in range(200)]
KEYS = ["the first key", "the second key"]


def cached(server: Running, key: str, prompt: Any = PROMPT, **more: Any) -> int:
    """Return the tokens of a prompt that a request with this key found in the cache."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    answer = server.answer("/v1/completions", body, key)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_does_not_reuse_one_of_another_key(demo_path: Path) -> None:
    messages = [{"role": "user", "content": "Speak the speech, I pray you. " * 10}]
    body = {"messages": messages, "max_tokens": 1}
    with serving(demo_path, api_keys=KEYS) as server:
        usages = [server.answer("/v1/chat/completions", body, key)["usage"] for key in (*KEYS, KEYS[0])]
    found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert found[:2] == [0, 0]
    assert found[2] > 64


@pytest.mark.parametrize("limits", [{}, {"api_keys": KEYS}, {"api_keys": KEYS, "share_prefixes": True}])
def test_keys_of_the_server_and_of_the_cache_separate_requests(
    demo_path: Path, limits: dict[str, Any]
) -> None:
    with serving(demo_path, **limits) as server:
        for cache_key in ("one", "two"):
            assert cached(server, KEYS[0], prompt_cache_key=cache_key) == 0
        assert cached(server, KEYS[0]) == 0
        for more in ({"prompt_cache_key": "one"}, {"prompt_cache_key": "two"}, {}):
            assert cached(server, KEYS[0], **more) == len(PROMPT) - 1
        separate = limits == {"api_keys": KEYS}
        assert cached(server, KEYS[1]) == (0 if separate else len(PROMPT) - 1)


def namespace(key: str, cache_key: str | None, **limits: Any) -> str:
    headers = Headers({"Authorization": f"Bearer {key}"})
    return prefix_namespace(Settings(**{"api_keys": KEYS, **limits}), headers, cache_key)


def test_namespaces_of_distinct_key_pairs_differ() -> None:
    pairs = [("", None), ("a", None), ("b", None), ("", "a"), ("a", "a"), ("a", "b"), ("ab", ""), ("a", "ab")]
    namespaces = [namespace(*pair) for pair in pairs]
    assert len(set(namespaces)) == len(pairs)
    assert namespaces[0] == namespace("a", None, api_keys=()) == namespace("a", "", share_prefixes=True) == ""
    assert namespace("secret", None) == namespace("  secret ", "")
    assert all("secret" not in namespace("secret", word) for word in (None, "secret"))


def store_prefix(server: Running, key: str) -> None:
    """Send two prompts with a common prefix, which is then stored."""
    for end in (1, 2):
        cached(server, key, [*PROMPT, end])


def test_a_stored_prefix_is_found_after_a_restart_with_its_own_key_only(
    demo_path: Path, tmp_path: Path
) -> None:
    limits: dict[str, Any] = {"api_keys": KEYS, "prefix_store": tmp_path}
    with serving(demo_path, **limits) as server:
        for key, end in zip(KEYS, (1, 2), strict=True):  # which share nothing
            cached(server, key, [*PROMPT[50:], end])
        store_prefix(server, KEYS[0])
    (stored,) = tmp_path.glob("*/*.session")
    assert KEYS[0].encode() not in stored.read_bytes()
    with serving(demo_path, **limits) as server:
        assert cached(server, KEYS[1], [*PROMPT, 3]) == 0
        assert cached(server, KEYS[0], [*PROMPT, 3]) == 192
    # Without a namespace, the name of a file is the number of tokens and the digest of their ids.
    with serving(demo_path, **{**limits, "share_prefixes": True}) as server:
        assert cached(server, KEYS[0], [*PROMPT, 3]) == 0
        store_prefix(server, KEYS[1])
    (plain,) = set(tmp_path.glob("*/*.session")) - {stored}
    digest = hashlib.blake2b(np.array(PROMPT[:192], "<i4").tobytes(), digest_size=16).hexdigest()
    assert plain.name == f"192-{digest}.session"


def test_prompts_of_a_namespace_are_not_displaced_by_those_of_another(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated prompt is stored, however many prompts another key sends in between."""
    ids = np.arange(200, dtype=np.int32)
    saved: list[str] = []
    with Model(demo_path, device="cpu") as model:
        store = PrefixStore(model.engine, tmp_path, 1 << 20)
        monkeypatch.setattr(store, "_save", lambda ids, n, digest, namespace: saved.append(namespace))
        store.note(ids, "one")
        for i in range(3 * RECENT_PROMPTS):
            store.note(np.full(100, i, np.int32), "two")
        assert sum(map(len, store._recent.values())) == RECENT_PROMPTS
        store.note(ids, "one")
        store.close()
    assert saved == ["one"]
