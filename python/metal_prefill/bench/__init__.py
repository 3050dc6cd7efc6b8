"""Benchmarks: prompt processing and decoding, measured separately, alone or against peers on the same file.

>>> from metal_prefill import bench
>>> results = bench.run(prompts=[32, 512], compare=["llama.cpp"])   # a table in a notebook
>>> results.row("metal_prefill", "pp512").median_ts                 # tokens per second
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from metal_prefill._bench.errors import BenchError
from metal_prefill._bench.results import BenchResults
from metal_prefill._bench.rows import Row

if TYPE_CHECKING:
    from metal_prefill._bench.cases import Case
    from metal_prefill._bench.client import WorkerFactory
    from metal_prefill._bench.runner import Progress

__all__ = ["BenchError", "BenchResults", "Row", "run"]


def _note(engine: str, case: Case, unlimited: str) -> str:
    from metal_prefill._bench.engines import OURS, why_not

    if reason := why_not(engine, case):
        return f"not measured: {reason}"
    return unlimited if engine == OURS and case.n_prompt else ""


def run(
    model: str | os.PathLike[str] | None = None,
    *,
    prompts: Sequence[int] = (32, 128, 512),
    n_gen: int = 64,
    depth: int = 32,
    streams: Sequence[int] = (),
    embed: bool = False,
    repetitions: int = 5,
    threads: int | None = None,
    device: str = "auto",
    compute: str = "int8",
    kv_dtype: str = "f16",
    compare: Sequence[str] = (),
    patience: float = 60.0,
    progress: Progress | None = None,
    make_worker: WorkerFactory | None = None,
) -> BenchResults:
    """Measure this package on a model, and peers on the same file.

    Each engine runs in a process of its own. They take turns sample by sample, and the machine is calibrated
    before and after each: samples taken in a degraded state are dropped and repeated.

    Parameters
    ----------
    model
        GGUF file. None stands for a model of SmolLM-135M's shape with random weights, written and cached on
        first use.
    prompts
        Lengths of the timed prompts, in tokens.
    n_gen
        Tokens that are decoded one by one; 0 leaves decoding out.
    depth
        Tokens in the context before decoding is timed.
    streams
        Numbers of sequences that decode `n_gen` tokens together, each from a context of `depth` tokens of its
        own (``tg64x8``). With any, 64 prompts of 16 tokens are also processed together (``pp16x64``).
    embed
        Measure the vectors of 64 texts of 8 to 512 tokens (``embed64``), and nothing else.
    repetitions
        Samples that count, of each test of each engine.
    threads
        CPU threads; None for the engine's default alone, one per available core when there are peers.
    device, compute, kv_dtype
        As for `metal_prefill.Model`.
    compare
        Peers: ``"llama.cpp"``, ``"openvino"``. They need the extra ``bench``.
    patience
        Seconds that may be lost to a degraded machine, by waiting for it and by samples that are dropped;
        then samples are taken as they come.
    progress
        Called before each sample with what is done, the samples of the test that count so far, and those
        wanted.
    make_worker
        Makes the worker of an engine; by default a process.

    Raises
    ------
    ValueError
        Nothing to measure, a prompt longer than the model's context, an unknown peer.
    MissingExtraError
        A peer is not installed.
    BenchError
        An engine failed.
    GGUFError, UnsupportedModelError
        The file is no model that this package takes.
    """
    from metal_prefill._bench import cases, engines, limit, machine, model_file
    from metal_prefill._bench.client import WorkerProcess
    from metal_prefill._bench.rows import in_order, make_row
    from metal_prefill._bench.runner import Runner
    from metal_prefill._packaged import packaged_model
    from metal_prefill.model import resolve_device

    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    if patience < 0:
        raise ValueError(f"patience must not be negative, got {patience}")
    tests = (
        [cases.Case(0, 0, 0, n_texts=cases.TEXTS)]
        if embed
        else cases.make_cases(prompts, n_gen, depth, streams)
    )
    names = [engines.OURS, *dict.fromkeys(compare)]
    for name in names:
        engines.check_installed(name)
    path = model_file.smollm_shape() if model is None else packaged_model(model) or Path(model)
    facts = model_file.read_facts(path)
    longest = max(tests, key=lambda case: case.context)
    if longest.context > facts.context_length:
        raise ValueError(
            f"{longest.name} takes {longest.context} positions, but the context of {path.name} "
            f"has {facts.context_length}"
        )
    if threads is None and compare:
        threads = machine.available_threads()
    options = engines.Options(
        path=os.fspath(path),
        max_context=longest.context,
        max_prompt=max(max(case.n_prompt, case.n_depth) for case in tests),
        threads=threads,
        device=device,
        compute=compute,
        kv_dtype=kv_dtype,
    )
    with ExitStack() as stack:
        workers = []
        for name in names:
            if progress is not None:
                progress(f"loading {name}", 0, 1)
            worker = (make_worker or WorkerProcess)(name, options, facts.vocab_size)
            stack.callback(worker.close)
            workers.append(worker)
        calibrator = machine.Calibrator(threads or machine.available_threads())
        stack.callback(calibrator.close)
        runner = Runner(workers, calibrator, repetitions, progress, patience)
        runner.run(tests)
        cpu = machine.cpu_name()
        limits: dict[int, float] = {}
        unlimited = ""  # why there are none
        if resolve_device(device) == "cpu" and compute == "int8" and not embed:
            lengths = list({case.n_prompt for case in tests if case.n_prompt})
            try:
                limits = limit.prompt_limits(path, lengths, threads or machine.available_threads())
            except BenchError as error:
                unlimited = f"no limit: {error}"
        rows = [
            make_row(
                worker,
                case,
                runner.selection(worker, case),
                facts,
                options,
                calibrator.reference_ns,
                cpu,
                limits.get(case.n_prompt),
                _note(worker.name, case, unlimited),
            )
            for worker in workers
            for case in tests
        ]
    return BenchResults(in_order(rows, names))
