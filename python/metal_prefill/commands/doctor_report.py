"""Stages of ``metal-prefill doctor``: machine, shaders, kernels, results and speed."""

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from metal_prefill import _core
from metal_prefill.errors import MetalPrefillError, NumericalError, UnsupportedModelError
from metal_prefill.gpu._cost_model import CHIPS, UnknownKernelError, predict_run, shape_of
from metal_prefill.gpu._kernel_checks import Difference
from metal_prefill.gpu._self_test import QUICK, kernel_differences, known_tokens
from metal_prefill.model import Model
from metal_prefill.session import Session
from metal_prefill.storage._cache_folder import version

LONG_PROMPT = 300
SHORT_PROMPT = 9
GREEDY_TOKENS = 20
# In addition to the quick lengths: a prompt with wide tiles, then one token and a few with split keys.
ALL_LENGTHS = (*QUICK, 512, 1, 3)
# Relative to the largest logit or state. Kernels for many tokens use half precision; a few 1e-3 are normal.
BOUND = 2e-2
BENCH_PROMPT, BENCH_TOKENS, BENCH_SECONDS = 512, 64, 50.0

Report = dict[str, Any]
Array = np.ndarray[Any, Any]


def _tell_machine(device: str) -> tuple[Report, bool]:
    """Describe the machine and the package; with device "metal", it must have a GPU."""
    found: Report = {
        "package": version(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "macos": platform.mac_ver()[0],
        "os_build": os.uname().version,
        "machine": platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cores": os.cpu_count(),
        "compiler": _core.compiler,
        "emulator": _core.has_emulator,
        "gpu": _core.metal_device(),
    }
    facts = found | {f"gpu {name}": value for name, value in found["gpu"].items()}
    for name, value in facts.items():
        if name != "gpu" and value != "":
            print(f"{name}: {value}")
    return {"machine": found}, device == "auto" or "problem" not in found["gpu"]


def check_kernels(model: Model, quick: bool) -> Report:
    """Compare each kernel with float64 on the buffers of real passes."""
    with model.session() as session:
        core = session.native
        inspector = core.inspector()
        assert inspector is not None, "requires an engine with dispatches"
        lengths = QUICK if quick else ALL_LENGTHS
        checked, wrong = kernel_differences(core, model.config, lengths)
        pipelines = inspector.pipelines()
        return {
            "shaders": "metallib" if inspector.shaders_were_compiled else "source",
            "no_matmul_tensor": inspector.no_matmul_tensor,
            "pipelines": [
                {"kernel": p.kernel, "seconds": p.seconds, "max_threads": p.max_threads} for p in pipelines
            ],
            "checked": sorted(checked),
            "not_checked": sorted({p.kernel for p in pipelines} - checked),
            "differences": [asdict(difference) for difference in wrong],
        }


def _compare(name: str, compute: Callable[[], Array], expected: Array) -> Report:
    """Compare results by their largest difference; the argmax of logits must match or nearly tie."""
    try:
        got = compute()
    except NumericalError as nonfinite:
        return {"name": name, "passed": False, "problem": str(nonfinite)}
    scale = float(np.abs(expected).max())
    error = float(np.abs(got - expected).max()) / scale
    found: Report = {"name": name, "passed": error <= BOUND, "error": error}
    if expected.ndim == 1:
        best, wanted = int(np.argmax(got)), int(np.argmax(expected))
        gap = float(expected[wanted] - expected[best]) / scale
        found |= {"passed": max(error, gap) <= BOUND, "token": best, "cpu_token": wanted}
    return found


def compare_engines(model: Model, reference: Model, quick: bool) -> list[Report]:
    """Compare logits and tokens of two engines, or hidden states for a model without logits."""
    found = []
    limit = model.config.context_length
    for n in (SHORT_PROMPT,) if quick else (SHORT_PROMPT, min(LONG_PROMPT, limit - GREEDY_TOKENS)):
        tokens = known_tokens(n, model.config.vocab_size).tolist()
        if not model.config.has_head:
            compute = partial(_states, model, tokens)
            found.append(_compare(f"text of {n}", compute, _states(reference, tokens)))
            continue
        with model.session() as one, model.session() as other, reference.session() as cpu:
            expected = cpu.forward_prompt_logits(tokens)
            found.append(_compare(f"prompt of {n}", partial(one.forward_prompt_logits, tokens), expected))
            if model.config.causal:  # other texts are processed as a whole and cannot be continued
                found.append(
                    _compare(f"{n} tokens one by one", partial(_one_by_one, other, tokens), expected)
                )
    if not (model.config.causal and model.config.has_head):
        return found
    with model.session() as session, reference.session() as cpu:
        tokens = known_tokens(SHORT_PROMPT, model.config.vocab_size).tolist()
        expected = cpu.forward_prompt_logits(tokens)
        compute = partial(session.forward_prompt_logits, tokens)
        steps = []
        for i in range(GREEDY_TOKENS):
            steps.append(_compare(f"token {i + 1} after {SHORT_PROMPT}", compute, expected))
            if not steps[-1]["passed"]:
                break
            token = int(np.argmax(expected))
            compute, expected = partial(session.forward_token, token), cpu.forward_token(token)
        worst = max(steps, key=lambda step: (not step["passed"], step.get("error", 0)))
        found.append(worst | {"name": f"{GREEDY_TOKENS} greedy tokens, worst: {worst['name']}"})
    return found


def _one_by_one(session: Session, tokens: list[int]) -> Array:
    """Return the logits after a prompt that is processed token by token."""
    for token in tokens[:-1]:
        session.forward_token_greedy(token)
    return session.forward_token(tokens[-1])


def _states(model: Model, tokens: list[int]) -> Array:
    """Return the hidden states of a text, float32 ``[tokens][dim]``."""
    with model.session() as session:
        (states,) = model.forward_batch([session], [tokens], output="hidden", rows="all")
    return np.asarray(states)


def _speed(run: Callable[[], int]) -> float:
    """Return the highest tokens per second over repeated runs, at least two."""
    best, begin, runs = 0.0, time.perf_counter(), 0
    while runs < 2 or time.perf_counter() - begin < BENCH_SECONDS:
        start = time.perf_counter()
        n = run()
        best = max(best, n / (time.perf_counter() - start))
        runs += 1
    return best


def benchmark(model: Model) -> list[Report]:
    """Measure a prompt and decoding, and predict both if the chip is known."""
    decodes = BENCH_TOKENS if model.config.generates else 0
    prompt = min(BENCH_PROMPT, model.config.context_length - decodes)
    tokens = known_tokens(prompt, model.config.vocab_size).tolist()

    session = model.session()

    def prefill() -> int:
        session.reset()
        if model.config.has_head:
            session.forward_prompt(tokens)
        else:
            _states(model, tokens)
        return prompt

    def decode() -> int:
        session.rewind(prompt)
        token = tokens[-1]
        for _ in range(BENCH_TOKENS):
            token = session.forward_token_greedy(token)
        return BENCH_TOKENS

    results = [{"name": f"pp{prompt}", "tokens_per_second": _speed(prefill)}]
    if decodes:
        results.append({"name": f"tg{BENCH_TOKENS}", "tokens_per_second": _speed(decode)})
    try:
        _add_predictions(model, results, prompt, decodes)
    except (UnknownKernelError, UnsupportedModelError) as error:
        results[0]["no_prediction"] = str(error)
    return results


def _add_predictions(model: Model, results: list[Report], prompt: int, decodes: int) -> None:
    """Add the range of predicted speeds to each result, if the chip is known."""
    words = model.device.lower().replace("apple ", "").replace(" ", "-")
    chip = next((name for name in sorted(CHIPS, key=len, reverse=True) if words.startswith(name)), None)
    if chip is None:
        return
    stats = model.stats()
    found = predict_run(
        CHIPS[chip],
        shape_of(model.gguf),
        prompt,
        decodes,
        waits=decodes,
        gpu=model.device,
        fused_norm=bool(stats["fused_norm"]),
        matvec_rows=int(stats["matvec_rows"]),
        matmul_tensor=bool(stats["matmul_tensor"]),
    )
    for result, (_, prediction) in zip(results, found, strict=True):
        result |= {"chip": chip, "predicted_range": list(prediction.tokens_per_second_range)}


def _tell_shaders() -> tuple[Report, bool]:
    """Compile each source of the shaders from its text."""
    sources = _core.compile_shaders()
    for source in sources:
        if source.problem:
            print(f"{'NOTE' if source.needs_tensors else 'DIFFERS'}: {source.name}: {source.problem}")
    wrong = [source for source in sources if source.problem and not source.needs_tensors]
    print(f"sources that compile: {sum(not s.problem for s in sources)} of {len(sources)}")
    names = ("name", "problem", "seconds")
    return {"sources": [{n: getattr(source, n) for n in names} for source in sources]}, not wrong


def _tell_kernels(model: Model, quick: bool) -> tuple[Report, bool]:
    kernels = check_kernels(model, quick)
    slowest = max(kernels["pipelines"], key=lambda p: float(p["seconds"]))
    print(
        f"shaders: {kernels['shaders']}; {len(kernels['pipelines'])} pipelines, the slowest "
        f"{slowest['kernel']} after {slowest['seconds']:.3f} s"
    )
    if kernels["no_matmul_tensor"]:
        print(f"matrix units disabled: {kernels['no_matmul_tensor']}")
    print(f"kernels that agree: {len(kernels['checked']) - len(kernels['differences'])}")
    if kernels["not_checked"] and not quick:
        print(f"kernels not reached: {', '.join(kernels['not_checked'])}")
    for difference in kernels["differences"]:
        print(f"DIFFERS: {Difference(**difference)}")
    return {"kernels": kernels}, not kernels["differences"]


def _tell_results(model: Model, quick: bool) -> tuple[Report, bool]:
    has_logits = model.config.has_head
    what = "logit" if has_logits else "value"
    with Model(model.path, device="cpu", compute="f32") as reference:
        results = compare_engines(model, reference, quick)
    for c in results:
        verdict = "agrees" if c["passed"] else "DIFFERS"
        if "problem" in c:
            print(f"{verdict}: {c['name']}: {c['problem']}")
            continue
        chosen = f", token {c['token']}, CPU token {c['cpu_token']}" if has_logits else ""
        print(f"{verdict}: {c['name']}: error {c['error']:.1e} of the largest {what}{chosen}")
    return {"logits" if has_logits else "hidden_states": results}, all(c["passed"] for c in results)


def _tell_speed(model: Model) -> tuple[Report, bool]:
    results = benchmark(model)
    for b in results:
        predicted = b.get("predicted_range")
        compared = f", predicted {predicted[0]:.0f} to {predicted[1]:.0f}" if predicted else ""
        print(f"{b['name']}: {b['tokens_per_second']:.1f} tokens/s{compared}")
        if "no_prediction" in b:
            print(f"no prediction: {b['no_prediction']}")
    return {"benchmark": results}, True


def run_stage(name: str, path: Path | None, quick: bool, device: str) -> Report:
    """Run a stage; return its part of the report as ``report``, and ``passed``.

    After an exception, also ``problem``, one line, and ``detail``, the lines of the traceback.
    """
    try:
        if name in ("machine", "shaders"):
            report, passed = _tell_machine(device) if name == "machine" else _tell_shaders()
            return {"report": report, "passed": passed}
        checks = {"kernels": _tell_kernels, "results": _tell_results}
        with Model(path, device="metal") as model:
            report, passed = checks[name](model, quick) if name in checks else _tell_speed(model)
            return {"report": {**report, "model": str(model.path), "device": model.device}, "passed": passed}
    except Exception as error:
        text = " ".join(str(error).split())
        problem = text if isinstance(error, MetalPrefillError) else f"{type(error).__name__}: {text}"
        detail = traceback.format_exc().splitlines()
        return {"report": {}, "passed": False, "problem": problem, "detail": detail}


def main() -> None:
    """Run the stage, and write the file, that the arguments name."""
    stage, file, path, quick, device = sys.argv[1:]
    found = run_stage(stage, Path(path) if path else None, bool(quick), device)
    Path(file).write_text(json.dumps(found), encoding="utf-8")
