"""Speed of the Metal emulator on this machine's CPU: products of one core, and a prompt of a whole model.

It concerns the duration of tests and predicts nothing about any GPU. Kernels are those of ``shaders/`` on the
shapes of SmolLM-135M's feed-forward block, on one thread of the host.

``--prepare`` compiles and makes the model, in ``build/emulator-speed``, and measures nothing.

Example
-------
``python tools/measure/emulator_speed.py``
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from metal_prefill import Model, synth

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "emulator/testing")]

from shader_library import ShaderLibrary, build  # noqa: E402
from support.kernel_harness import CONSTANTS, Weights, ceil_div, make_args  # noqa: E402

IN_DIM, OUT_DIM = 576, 1536
REPEATS = 5
LANES = 8  # of a row in multi_token_matvec


def measure(kernels: ShaderLibrary, kernel: str, tokens: int, tile: tuple[int, int], threads: int) -> float:
    """Return the median of billions of multiplications and additions a second, on one core."""
    rng = np.random.default_rng(0)
    weights = Weights(rng, "Q4_0", [OUT_DIM], IN_DIM)
    matmul = kernel.startswith("matmul")
    x = rng.standard_normal((tokens, IN_DIM)).astype(np.float16 if matmul else np.float32)
    y = np.zeros((tokens, OUT_DIM), np.float32)
    given = {"weights": weights.stacked(), "in_dim": IN_DIM, "out_dim": OUT_DIM, "out_stride": OUT_DIM}
    if matmul:
        args = make_args("MatmulArgs", **given, tokens=tokens, accumulate=0, activation=0)
    else:
        args = make_args(
            "MatvecArgs", **given, tokens=tokens, lanes_per_row=LANES, accumulate=0, activation=0, eps=0
        )
    tiles = (ceil_div(OUT_DIM, tile[0]), ceil_div(tokens, tile[1]))
    grid = tiles if matmul else tiles[::-1]
    buffers = [weights.bytes, x, y, args.tobytes()]
    seconds = [kernels.run(kernel, grid, (threads,), buffers, workers=1).seconds for _ in range(REPEATS + 1)][
        1:
    ]
    error = np.abs(y - x.astype(np.float64) @ weights.values.T).max() / np.abs(y).max()
    assert error < 2e-3, f"{kernel} is wrong by {error}"
    return tokens * IN_DIM * OUT_DIM / statistics.median(seconds) / 1e9


def prompt_seconds(model_path: Path, tokens: int) -> float:
    """Return the time of a prompt, excluding the opening of the model."""
    with Model(model_path, device="metal") as model:
        model.forward_token(0)
        model.reset()
        start = time.perf_counter()
        model.forward_prompt(list(range(tokens)))
        return time.perf_counter() - start


def prepared(folder: Path) -> tuple[Path, Path]:
    """Return the compiled kernels and a synthetic SmolLM-135M, rebuilt after changes."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model.gguf"
    if not model.exists():
        synth.synthesize(model, preset="smollm-135m")
    sources = [ROOT / "shaders" / f"{name}.metal" for name in ("matmul", "matvec")]
    library = folder / f"lib{sources[0].stem}.so"
    inputs = [p for f in ("shaders", "emulator") for p in (ROOT / f).rglob("*") if p.suffix != ".pyc"]
    if not library.exists() or library.stat().st_mtime < max(
        p.stat().st_mtime for p in inputs if p.is_file()
    ):
        build(sources, folder, variants=("plain",))
    return library, model


def main() -> None:
    """Measure and print."""
    library, model = prepared(ROOT / "build" / "emulator-speed")
    if "--prepare" in sys.argv[1:]:
        return
    kernels = ShaderLibrary(library)
    threads = CONSTANTS["MATMUL_THREADS"]
    for kernel, tokens, tile, size in (
        ("matmul_q4_0_wide", 128, (64, 64), threads),
        ("matmul_q4_0_narrow", 128, (32, 32), threads),
        (
            "multi_token_matvec_q4_0",
            8,
            (CONSTANTS["FEW_TOKEN_ROWS"] * 64 // LANES, CONSTANTS["MULTI_TOKEN_TILE"]),
            64,
        ),
    ):
        speed = measure(kernels, kernel, tokens, tile, size)
        print(f"{kernel:26s} {tokens:4d} tokens  {speed:5.2f} GMAC/s a core")
    seconds = prompt_seconds(model, 32)
    print(f"{'SmolLM-135M, whole prompt':26s} {32:4d} tokens  {seconds:5.2f} s on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
