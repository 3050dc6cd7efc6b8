"""Benchmarks: prompt processing and decoding, measured separately, alone or against peers on the same file.

>>> from metal_prefill import bench
>>> results = bench.run(prompts=[32, 512], compare=["llama.cpp"])   # a table in a notebook
>>> results.row("metal_prefill", "pp512").median_ts                 # tokens per second
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from metal_prefill._support.arguments import integer
from metal_prefill._support.choices import AUTO
from metal_prefill.bench import _agents, _cases, _engines, _machine, _model_file, _serving, _worker
from metal_prefill.bench._agents import AgentResults
from metal_prefill.bench._cases import Case
from metal_prefill.bench._engines import BenchError
from metal_prefill.bench._peers import servers
from metal_prefill.bench._report import BenchResults, Row, make_row
from metal_prefill.bench._runner import Progress, Runner, no_progress
from metal_prefill.bench._serving import ServingResults
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.text._tokenizer import Tokenizer

__all__ = [
    "AgentResults", "BenchError", "BenchResults", "Row", "ServingResults", "run", "run_agents",
    "run_embeddings", "run_serving",
]  # fmt: skip


def run(
    model: str | os.PathLike[str] | None = None,
    *,
    prompts: Sequence[int] = (32, 128, 512),
    n_gen: int = 64,
    depth: int = 32,
    streams: Sequence[int] = (),
    sampled: bool = False,
    speculate: bool = False,
    repetitions: int = 5,
    threads: int | None = None,
    device: str = AUTO,
    compute: str = AUTO,
    kv_dtype: str = "f16",
    compare: Sequence[str] = (),
    patience: float = 60.0,
    progress: Progress = no_progress,
) -> BenchResults:
    """Measure this package on a model, and peers on the same file.

    Each engine runs in its own process. Engines alternate sample by sample, and the machine is calibrated
    before and after each sample; samples from a degraded machine are dropped and repeated.

    Parameters
    ----------
    model
        GGUF file. None selects a model of SmolLM-135M's shape with random weights, written and cached on
        first use.
    prompts
        Lengths of the timed prompts, in tokens.
    n_gen
        Number of tokens to decode one by one; 0 omits decoding.
    depth
        Number of tokens in the context before decoding is timed.
    streams
        Numbers of sequences that decode `n_gen` tokens in one batch, each from its own context of `depth`
        tokens (``tg64x8``). If not empty, a batch of 64 prompts of 16 tokens is also measured (``pp16x64``).
    sampled
        Also measure `n_gen` tokens that each engine chooses itself: greedy (``greedy64``) and, in
        alternation, sampled with the same settings (``sampled64``).
    speculate
        Also measure `n_gen` tokens of a copied text, without drafts (``copy64``) and with prompt-lookup
        drafts of each engine (``lookup64``). The result is meaningless if the model does not copy the text.
    repetitions
        Number of samples for each test of each engine.
    threads
        CPU threads; None selects the engine's default, or one per available core if there are peers.
    device, compute, kv_dtype
        As for `metal_prefill.Model`.
    compare
        Peers: ``"llama.cpp"`` and ``"openvino"``, which need the extra ``bench``.
    patience
        Time budget in seconds for waiting for a degraded machine and repeating samples; after that, all
        samples are accepted.
    progress
        Function called before each sample with the current activity, the number of valid samples of the test,
        and the number required.

    Raises
    ------
    ValueError
        Nothing to measure, a prompt longer than the model's context, an unknown peer.
    MissingExtraError
        A peer is not installed.
    BenchError
        An engine failed.
    GGUFError, UnsupportedModelError
        The file is not a supported model.
    """
    path = _model_file.found(model)
    if not _model_file.read_facts(path).generates:
        raise ValueError(f"{path.name} is an encoder, which does not generate text: use `run_embeddings`")
    task = len(_model_file.task_ids(path)) if speculate else 0
    tests = _cases.make_cases(prompts, n_gen, depth, streams, sampled, task)
    return _measured(
        path, tests, repetitions, threads, device, compute, kv_dtype, compare, patience, progress
    )


def run_embeddings(
    model: str | os.PathLike[str] | None = None,
    *,
    text_tokens: Sequence[int] = (),
    text_counts: Sequence[int] = (),
    repetitions: int = 5,
    threads: int | None = None,
    device: str = AUTO,
    compute: str = AUTO,
    kv_dtype: str = "f16",
    compare: Sequence[str] = (),
    patience: float = 60.0,
    progress: Progress = no_progress,
) -> BenchResults:
    """Measure the embedding of 64 texts of 8 to 512 tokens (``embed64``); errors are those of :func:`run`.

    Parameters
    ----------
    text_tokens, text_counts
        Lengths of texts in tokens, and numbers of texts in a call, by default 64. Each length is measured
        with each number (``embed16x64``), instead of texts of many lengths. Short calls are repeated within a
        sample.
    repetitions, threads, device, compute, kv_dtype, compare, patience, progress
        As for :func:`run`. Further peers are ``"transformers"`` and ``"onnxruntime"``, which need the extra
        ``bench-transformers``.
    """
    path, tests = _model_file.found(model), _cases.make_embeddings(text_tokens, text_counts)
    return _measured(
        path, tests, repetitions, threads, device, compute, kv_dtype, compare, patience, progress
    )


def _measured(
    path: Path,
    tests: list[Case],
    repetitions: int,
    threads: int | None,
    device: str,
    compute: str,
    kv_dtype: str,
    compare: Sequence[str],
    patience: float,
    progress: Progress,
) -> BenchResults:
    integer("repetitions", repetitions, 1)
    if patience < 0:
        raise ValueError(f"patience must not be negative, got {patience}")
    facts = _model_file.read_facts(path)
    names = [_engines.OURS, *dict.fromkeys(compare)]
    for name in names[1:]:
        _engines.check_peer(name, embeds=tests[0].n_texts > 0)
    longest = max(tests, key=lambda case: case.context)
    if longest.context > facts.context_length:
        raise ValueError(
            f"{longest.name} takes {longest.context} positions, but the context of {path.name} "
            f"has {facts.context_length}"
        )
    if threads is None and compare:
        threads = _machine.available_threads()
    options = _engines.Options(
        path=os.fspath(path),
        max_context=longest.context,
        max_prompt=max(max(case.n_prompt, case.n_depth) for case in tests),
        threads=threads,
        device=device,
        compute=facts.compute if compute == AUTO else compute,
        kv_dtype=kv_dtype,
    )
    with ExitStack() as stack:
        workers = []
        for name in names:
            progress(f"loading {name}", 0, 1)
            worker = _worker.WorkerProcess(name, options, facts.vocab_size)
            workers.append(stack.enter_context(closing(worker)))
        calibrator = _machine.Calibrator(threads or _machine.available_threads())
        stack.enter_context(closing(calibrator))
        runner = Runner(workers, calibrator, repetitions, progress, patience)
        runner.run(tests)
        cpu = _machine.cpu_name()
        rows = [make_row(runner, worker, case, facts, options, cpu) for worker in workers for case in tests]
    return BenchResults(rows)


def run_serving(
    model: str | os.PathLike[str] | None = None,
    *,
    clients: Sequence[int] = (1, 8, 32),
    compare: Sequence[str] = (),
    repetitions: int = 5,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> ServingResults:
    """Measure this package's server on a model, and peers on the same file.

    Each server runs in its own process and receives the same requests. Each concurrent client sends a prompt
    with a shared prefix of 300 tokens and 40 tokens of its own, and receives 64 tokens. Servers alternate
    round by round.

    Parameters
    ----------
    model
        As for :func:`run`.
    clients
        Numbers of concurrent clients.
    compare
        Peers: ``"llama-cpp-python"`` and ``"llama-server"``.
    repetitions
        Number of measured rounds, after one warm-up round.
    threads
        CPU threads of each server; by default one per available core.
    progress
        As for :func:`run`.

    Raises
    ------
    ValueError
        A number is below 1, or a peer is unknown.
    MissingExtraError
        A server is not installed.
    BenchError
        A server failed.
    """
    integer("repetitions", repetitions, 1)
    counts = _cases.distinct("numbers of clients", clients)
    if not counts:
        raise ValueError("there is nothing to measure: no number of clients")
    found = [servers.server_of(name) for name in (_engines.OURS, *dict.fromkeys(compare))]
    path = _model_file.found(model)
    tokenizer = Tokenizer(GGUFFile(path))
    options = servers.ServerOptions(
        path=os.fspath(path),
        threads=threads or _machine.available_threads(),
        clients=max(counts),
        # The number of tokens may differ at the boundary between the two texts.
        context=_serving.SHARED_TOKENS + _serving.OWN_TOKENS + _serving.ANSWER_TOKENS + 64,
    )
    with ExitStack() as stack:
        running = []
        for name, command in found:
            progress(f"starting {name}", 0, 1)
            server = servers.ServerProcess(name, options, command)
            running.append(stack.enter_context(closing(server)))
        rows = _serving.measure(running, counts, repetitions, tokenizer, progress)
    return ServingResults(rows, path.name, options.threads, _machine.cpu_name())


def run_agents(
    model: str | os.PathLike[str] | None = None,
    *,
    compare: Sequence[str] = (),
    threads: int | None = None,
    progress: Progress = no_progress,
) -> AgentResults:
    """Replay sessions of agents on this package's server, and on peers with the same file.

    Parameters and errors are those of :func:`run_serving`. A peer must report the tokens of prompts that it
    computed, as llama-server does, or those that it found in its cache.
    """
    path = _model_file.found(model)
    threads = threads or _machine.available_threads()
    options = servers.ServerOptions(os.fspath(path), threads, clients=1, context=4096)
    turns: list[_agents.Turn] = []
    for given in (_engines.OURS, *dict.fromkeys(compare)):
        name, command = servers.server_of(given)
        shapes = [s for s in _agents.SHAPES if name == _engines.OURS or _agents.SHAPES[s].memory_of is None]
        for i, shape in enumerate(shapes):
            progress(f"{name}, {shape}", i, len(shapes))
            turns += _agents.measured(name, options, command, shape)
    return AgentResults(turns, path.name, _machine.cpu_name())
