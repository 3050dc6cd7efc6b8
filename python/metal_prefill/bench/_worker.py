"""Worker process of one engine, so that memory and threads of engines are separate.

``python -m metal_prefill.bench._worker NAME OPTIONS`` loads the engine and answers requests: one JSON object
in each line. It waits for the next request in a blocking read and leaves the cores to the others meanwhile.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import IO, Any

from metal_prefill.bench import _engines, _machine
from metal_prefill.bench._cases import Case, stream_ids, text_ids, token_ids
from metal_prefill.bench._engines import Engine, Ids
from metal_prefill.bench._model_file import task_ids

REST_S = 2.0  # longest wait for an engine's threads to sleep after a sample
REST_STEP_S = 0.02


def timed_run(
    engine: Engine, case: Case, vocab_size: int, task: Callable[[], Ids] | None = None
) -> dict[str, int]:
    """Run a test once; return its nanoseconds and the involuntary context switches meanwhile.

    `task` returns the ids of `cases.TASK`, which tests of copying need.
    """
    if case.choice:
        if case.choice in ("argmax", "sampled"):
            ids = token_ids(case.n_depth + 1, vocab_size)
        else:
            assert task is not None
            ids = task()
        engine.clear()
        engine.prefill(ids[:-1])
        return _timed(lambda: engine.choose(ids, case.n_gen, case.choice))
    if case.n_texts:
        texts = text_ids(case, vocab_size)
        return _timed(lambda: [engine.embed(texts) for _ in range(case.calls)])
    if case.n_streams:
        ids = stream_ids(case, vocab_size)
        engine.open_streams(case.n_streams, case.context)
        prefill, decode = engine.prefill_streams, engine.decode_streams
    else:
        ids = token_ids(case.context, vocab_size)
        engine.clear()
        prefill, decode = engine.prefill, engine.decode
    if case.n_depth:
        prefill(ids[..., : case.n_depth])
    timed = ids[..., case.n_depth :]
    call = prefill if case.n_prompt else decode
    return _timed(lambda: call(timed))


def _timed(work: Callable[[], object]) -> dict[str, int]:
    switches = _machine.involuntary_switches()
    begin = time.perf_counter_ns()
    work()
    elapsed = time.perf_counter_ns() - begin
    return {"ns": elapsed, "switches": _machine.involuntary_switches() - switches}


def _rest() -> None:
    """Wait until the engine's threads no longer spin for more work; those of some spin for 0.2 s."""
    deadline = time.monotonic() + REST_S
    used = time.process_time()
    while time.monotonic() < deadline:
        time.sleep(REST_STEP_S)
        before, used = used, time.process_time()
        if used - before < REST_STEP_S / 10:
            return


def serve(name: str, options: dict[str, Any], requests: IO[str], replies: IO[str]) -> None:
    """Load the engine, report its identity, and answer requests until `requests` ends."""

    def reply(**fields: Any) -> None:
        print(json.dumps(fields), file=replies, flush=True)

    try:
        vocab_size = options.pop("vocab_size")
        begin = time.perf_counter_ns()
        engine = _engines.load(name, _engines.Options(**options))
        task = cache(lambda: task_ids(options["path"]))
        loaded = time.perf_counter_ns()
        reply(load_ns=loaded - begin, **asdict(engine.identity()))
        gc.disable()
        for line in requests:
            request = json.loads(line)
            if request["do"] == "sample":
                taken = timed_run(engine, Case(**request["case"]), vocab_size, task)
                gc.collect()
                _rest()
                reply(**taken)
            else:
                reply(peak_rss=_machine.peak_rss_bytes())
    except Exception as error:
        reply(error=f"{type(error).__name__}: {error}")
        raise


def main() -> None:
    """Run as a process: requests on stdin, replies on stdout."""
    # Libraries print to stdout too. The pipe is kept for replies; what they print goes to stderr.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.argv[1], json.loads(sys.argv[2]), sys.stdin, replies)


if __name__ == "__main__":
    main()
