"""Compare the logits of this package and of llama.cpp with each other and with float64 arithmetic.

Prints the tables of ``docs/accuracy.md``. Every engine processes the same tokens. Its logits are compared
with the tests' float64 reference for the same dequantized weights::

    pip install . llama-cpp-python
    python tools/measure/compare_accuracy.py                  # the bundled model, and SmolLM-135M's shape
    python tools/measure/compare_accuracy.py model.gguf -n 300
    python tools/measure/compare_accuracy.py model.gguf -f text.txt   # perplexity, in windows of 512 tokens
    python tools/measure/compare_accuracy.py model.gguf -f text.txt --types -n 4096  # by llama.cpp's types
    python tools/measure/compare_accuracy.py model.gguf -f text.txt -n 4096 --types Q3_K_S TQ2_0  # by these
"""

import argparse
import ctypes
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.comparison import VERSE
from support.reference import ReferenceModel

from metal_prefill import Model, default_model_path, synth
from metal_prefill.bench._machine import available_threads
from metal_prefill.commands.perplexity import perplexity, windows

CORRELATED_TOKENS = 64  # tokens after which the logits of types are compared
WINDOW = 512  # tokens of a window for perplexity

Logits: TypeAlias = npt.NDArray[np.float64]  # [n, vocab]
Tokens: TypeAlias = npt.NDArray[np.int64]
Scores: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
Engines: TypeAlias = dict[str, Callable[[Tokens], Logits]]


def ours(path: Path, tokens: Tokens, compute: str, kv_dtype: str) -> Logits:
    """Return the logits of this package's CPU engine after every token."""
    with Model(path, device="cpu", compute=compute, kv_dtype=kv_dtype) as model:
        return np.array([model.forward_token(int(token)) for token in tokens], dtype=np.float64)


def llama(path: Path, tokens: Tokens) -> Logits:
    """Return the logits of llama.cpp with its defaults: 8-bit activations, float16 cache, repacking."""
    n, threads = len(tokens), available_threads()
    model = llama_cpp.Llama(
        str(path),
        n_ctx=n,
        n_batch=n,
        n_ubatch=n,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        logits_all=True,
        verbose=False,
    )
    model.eval(tokens.tolist())
    logits: Logits = model.scores.astype(np.float64)
    model.close()
    return logits


def log_softmax(logits: Logits) -> Logits:
    """Return the log probabilities of each row."""
    shifted: Logits = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def comparison(actual: Logits, expected: Logits) -> list[str]:
    """Return the cells of a row: distances of `actual` from `expected`, over all positions."""
    correlations = [float(np.corrcoef(a, e)[0, 1]) for a, e in zip(actual, expected, strict=True)]
    same = int((actual.argmax(axis=1) == expected.argmax(axis=1)).sum())
    log_p, log_q = log_softmax(expected), log_softmax(actual)
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean()
    return [
        f"{np.median(correlations):.7f}",
        f"{min(correlations):.7f}",
        f"{same} of {len(actual)}",
        f"{max(divergence, 0.0):.1e}",
    ]


def margin_where_different(actual: Logits, expected: Logits) -> float:
    """Return the largest lead of `expected`'s choice at positions at which the two choose differently."""
    chosen, wanted = actual.argmax(axis=1), expected.argmax(axis=1)
    rows = np.arange(len(expected))
    return float((expected[rows, wanted] - expected[rows, chosen]).max())


def engines_of(path: Path) -> Engines:
    """Return the engines to compare on a model, by name."""
    return {
        "metal_prefill, f32, f32 cache": lambda tokens: ours(path, tokens, "f32", "f32"),
        "metal_prefill, f32, f16 cache": lambda tokens: ours(path, tokens, "f32", "f16"),
        "metal_prefill, int8 (the default)": lambda tokens: ours(path, tokens, "int8", "f16"),
        "metal_prefill, bf16": lambda tokens: ours(path, tokens, "bf16", "f16"),
        "llama.cpp": lambda tokens: llama(path, tokens),
    }


def compare_logits(name: str, path: Path, tokens: Tokens) -> None:
    """Print the table of one model."""
    exact = ReferenceModel(path).forward(tokens).logits
    found = {engine: compute(tokens) for engine, compute in engines_of(path).items()}
    deviation = exact.std(axis=1).mean()
    print(f"### {name}: {len(tokens)} tokens, logits of standard deviation {deviation:.2f}\n")
    columns = ("correlation, median", "lowest", "same greedy token", "mean KL divergence")
    print_header(["engine", "against", *columns])
    for other, expected in (("float64", exact), ("llama.cpp", found["llama.cpp"])):
        for engine, logits in found.items():
            if engine != other:
                print_row([engine, other, *comparison(logits, expected)])
    print(
        "\nWhere an engine's greedy token is not float64's, float64 has that token below its own by at most:"
    )
    print(
        "; ".join(f"{engine} {margin_where_different(logits, exact):.4f}" for engine, logits in found.items())
    )
    print(flush=True)


def windows_of(path: Path, text: str, most: int | None = None) -> tuple[list[int], list[list[int]]]:
    """Return the first tokens of a text, and the windows in which they are scored."""
    with Model(path, device="cpu") as model:
        ids = model.tokenizer.encode(text)[:most]
        bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
        return ids, windows(ids, min(WINDOW, len(ids)), bos)


def scores_of(compute: Callable[[Tokens], Logits]) -> Callable[[Sequence[int]], Scores]:
    """Return a function that scores the tokens of a window after the first."""

    def score(window: Sequence[int]) -> Scores:
        log_probs = log_softmax(compute(np.array(window)))
        return log_probs[np.arange(len(window) - 1), window[1:]].astype(np.float32)

    return score


def compare_perplexity(path: Path, text: str) -> None:
    """Print the perplexity of a text, with the same windows for every engine."""
    ids, cut = windows_of(path, text)
    exact = ReferenceModel(path)
    engines: Engines = {"float64": lambda tokens: exact.forward(tokens).logits, **engines_of(path)}
    print(f"### {path.name}: {len(ids)} tokens, windows of {WINDOW}\n")
    print_header(["engine", "perplexity"])
    for engine, compute in engines.items():
        print_row([engine, f"{perplexity(scores_of(compute), cut).value:.4f}"])


def quantized(source: Path, ftype: int, path: Path) -> bool:
    """Quantize a model to another type with llama.cpp; return False if it does not support that."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = ftype, True
    return bool(
        llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)) == 0
    )


def llama_types() -> dict[str, int]:
    """Return the types of llama.cpp's quantizer in their order, by their names without prefixes."""
    prefix = "LLAMA_FTYPE_"
    found = {
        name.removeprefix(prefix).replace("MOSTLY_", ""): int(getattr(llama_cpp, name))
        for name in dir(llama_cpp)
        if name.startswith(prefix) and "GUESSED" not in name
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def print_row(cells: Sequence[str]) -> None:
    """Print a line of a table."""
    print("|", " | ".join(cells), "|", flush=True)


def print_header(cells: Sequence[str]) -> None:
    """Print the first two lines of a table."""
    print_row(cells)
    print_row(["---"] * len(cells))


def compare_types(source: Path, text: str, tokens: int, types: Sequence[str]) -> None:
    """Print the accuracy of types that llama.cpp quantizes a model to.

    Prints the perplexity of a text, and the correlation over the vocabulary between the logits after each of
    the first tokens and those of float32 products with the same weights: its median and its minimum.
    """
    ids, cut = windows_of(source, text, tokens)
    print(f"### {source.name}, quantized again: {len(ids)} tokens, windows of {min(WINDOW, len(ids))}\n")
    correlation = "correlation with f32, median and lowest: int8"
    engines = ["metal_prefill, int8", "bf16", "llama.cpp", "metal_prefill, f32"]
    print_header(["type", "MiB", *engines, correlation, "bf16", "llama.cpp"])
    for name in types:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            if not quantized(source, llama_types()[name], path):
                continue
            cells = [name, f"{path.stat().st_size / 2**20:.0f}"]
            for compute in ("int8", "bf16", "llama", "f32"):
                if compute == "llama":
                    value = perplexity(scores_of(partial(llama, path)), cut).value
                else:
                    with Model(path, device="cpu", compute=compute, prefix_memory=0) as model:
                        value = perplexity(model.score, cut).value
                cells.append(f"{value:.3f}")
            first = np.array(ids[:CORRELATED_TOKENS])
            exact = ours(path, first, "f32", "f32")
            for logits in (
                ours(path, first, "int8", "f16"),
                ours(path, first, "bf16", "f16"),
                llama(path, first),
            ):
                cells.append(", ".join(comparison(logits, exact)[:2]))
            print_row(cells)


def main() -> None:
    """Compare on the given files, or on the two in the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL.gguf")
    parser.add_argument("-n", type=int, default=200, metavar="N", help="tokens (default: 200)")
    parser.add_argument("-f", "--file", type=Path, help="measure the perplexity of this text instead")
    parser.add_argument(
        "--types",
        nargs="*",
        choices=llama_types(),
        metavar="TYPE",
        help="measure the perplexity for these types, or for all that llama.cpp quantizes the model to",
    )
    arguments = parser.parse_args()
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # of its quantizer

    def random_tokens(path: Path) -> Tokens:
        with Model(path, device="cpu") as model:
            n: int = arguments.n
            return np.random.default_rng(1).integers(0, model.config.vocab_size, n)

    if arguments.types is not None and not arguments.file:
        parser.error("--types needs a text: -f FILE")
    if arguments.file:
        text = arguments.file.read_text(encoding="utf-8")
        for path in arguments.models or [default_model_path()]:
            if arguments.types is None:
                compare_perplexity(path, text)
            else:
                compare_types(path, text, arguments.n, arguments.types or list(llama_types()))
        return
    for path in arguments.models:
        compare_logits(path.name, path, random_tokens(path))
    if not arguments.models:
        with Model(device="cpu") as box:
            compare_logits("The bundled model", default_model_path(), np.array(box.tokenizer.encode(VERSE)))
        with tempfile.TemporaryDirectory() as folder:
            path = synth.synthesize(Path(folder) / "smollm.gguf", preset="smollm-135m")
            compare_logits("SmolLM-135M's shape, random weights, random tokens", path, random_tokens(path))


if __name__ == "__main__":
    main()
