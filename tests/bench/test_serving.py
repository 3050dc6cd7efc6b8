"""Servers measured with many clients: requests, rows and failures."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.programs import Run
from support.servers.stand_in_server import stand_in

from metal_prefill import MissingExtraError, Model, bench
from metal_prefill.bench import ServingResults
from metal_prefill.bench._peers import servers
from metal_prefill.bench._peers.servers import SERVERS, ServerOptions, ServerProcess, server_of
from metal_prefill.bench._serving import ANSWER_TOKENS, Answer, ServingRow, ask, ask_all, prompts

OPTIONS = ServerOptions("m.gguf", threads=2, clients=4, context=468)


def test_prompts_share_300_tokens_and_differ_after_them(bundled: Model) -> None:
    made = [prompts(bundled.tokenizer, 3, round_) for round_ in range(2)]
    assert made[0] == prompts(bundled.tokenizer, 3, 0)
    every = [bundled.tokenizer.encode(prompt, add_bos=False) for prompt in made[0] + made[1]]
    shared = every[0][:290]
    assert all(ids[:290] == shared for ids in every)
    assert len({tuple(ids) for ids in every}) == 6
    assert all(335 <= len(ids) <= 350 for ids in every)


def test_servers_alternate_and_ours_has_no_ratio(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVERS, "llama-server", stand_in())
    monkeypatch.setattr(servers, "server_of", lambda name: (name, SERVERS[name]))
    results = bench.run_serving(demo_path, clients=[1, 2], compare=["llama-server"], repetitions=1)
    assert [(r.server, r.clients) for r in results.rows] == [
        ("metal_prefill", 1),
        ("metal_prefill", 2),
        ("llama-server", 1),
        ("llama-server", 2),
    ]
    for row in results.rows:
        times = list(zip(row.first_token_s, row.slowest_first_token_s, strict=True))
        assert len(row.tokens_per_second) == len(row.first_token_s) == 1
        assert all(0 < first <= slowest for first, slowest in times)
    rows = json.loads(results.to_json())["rows"]
    assert [row["clients"] for row in rows] == [1, 2, 1, 2]


def test_each_client_gets_its_own_answer_and_failures_are_named() -> None:
    server = ServerProcess("stand-in", OPTIONS, stand_in())
    try:
        seconds, answers = ask_all(server, [f"question {i}" for i in range(4)])
        assert [answer.text for answer in answers] == [str(i) * 3 for i in range(4)]
        assert all(0 < answer.first_s <= seconds for answer in answers)
    finally:
        server.close()
    server = ServerProcess("stand-in", OPTIONS, stand_in("fails"))
    try:
        with pytest.raises(bench.BenchError, match=r"stand-in: .*no"):
            ask(server, "question")
    finally:
        server.close()
    with pytest.raises(bench.BenchError, match=r"dies: its process ended with code 3: last words"):
        ServerProcess(
            "dies", OPTIONS, lambda o, p: [sys.executable, "-c", "print('last words'); raise SystemExit(3)"]
        )


def test_a_row_summarizes_its_clients_and_rounds(bundled: Model) -> None:
    texts = ["a " * n for n in (1, 2, 3, 5, 9)]
    first_s = [0.9, 0.1, 0.2, 1.5, 0.3]  # median 0.3, mean 0.6
    rounds = [1, 10, 2, 4, 3]  # slowdown of each; median 3, mean 4
    # Of ours to the peer, round by round.
    faster = [4, 2, 9, 3, 7]  # median 4, mean 5
    sooner = [5, 1, 3, 2, 9]  # median 3, mean 4
    ours, peer = ServingRow("metal_prefill", 5), ServingRow("llama-server", 5)
    tokens = sum(len(bundled.tokenizer.encode(text, add_bos=False)) for text in texts)
    for scale, slower, later in zip(rounds, faster, sooner, strict=True):
        for row, seconds, wait in ((ours, scale, scale), (peer, scale * slower, scale * later)):
            answers = [Answer(text, s * wait) for text, s in zip(texts, first_s, strict=True)]
            row.add(2 * seconds, answers, bundled.tokenizer)
    assert ours.tokens_per_second == pytest.approx([tokens / (2 * scale) for scale in rounds])
    assert ours.first_token_s == pytest.approx([0.3 * scale for scale in rounds])
    assert ours.slowest_first_token_s == pytest.approx([1.5 * scale for scale in rounds])
    shown = io.StringIO()
    Console(file=shown, width=200).print(ServingResults([ours, peer], "m.gguf", 2, "a machine"))
    line, of_peer = (
        " ".join(re.split(r"[^\w.,()-]+", text)).strip()
        for text in shown.getvalue().splitlines()
        if "metal_prefill" in text or "llama-server" in text
    )
    speed, low, high = tokens / 6, tokens / 20, tokens / 2
    assert line == f"metal_prefill 5 {speed:,.1f} ({low:,.1f}-{high:,.1f}) 900 (300-3,000) 4,500"
    assert of_peer.endswith("4.00x (2.00-9.00) 3.00x (1.00-9.00)")


def test_peers_are_started_with_documented_commands() -> None:
    for name, command in SERVERS.items():
        words = " ".join(command(OPTIONS, 8123))
        assert "m.gguf" in words, name
        assert "8123" in words, name
    # Four slots of 468 tokens each.
    assert "-np 4 -c 1872" in " ".join(SERVERS["llama-server"](OPTIONS, 1))
    assert "--interrupt_requests false" in " ".join(SERVERS["llama-cpp-python"](OPTIONS, 1))
    assert ANSWER_TOKENS == 64


def test_invalid_usage_is_reported(monkeypatch: pytest.MonkeyPatch, errors: Run) -> None:
    with pytest.raises(ValueError, match="unknown server 'x' to compare with; known are llama-cpp-python"):
        server_of("x")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingExtraError, match="not on the PATH"):
        server_of("llama-server")
    for arguments, message in (
        (["--clients", "2,2"], "numbers of clients are at least 1 and differ"),
        (["--patience", "1"], "unrecognized arguments: --patience"),
        (["--compare", "vllm"], "unknown server 'vllm'"),
    ):
        assert message in errors("bench", "serve", "--demo", *arguments)
