"""``metal-prefill perplexity``: perplexity of a text under a model."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from metal_prefill._support.messages import counted
from metal_prefill.commands import common

DEFAULT_WINDOW = 512  # tokens, as in llama.cpp's tool

EXAMPLE = "echo 'O Romeo, Romeo, wherefore art thou Romeo?' | metal-prefill perplexity -c 8 -f -"


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text under a model."""

    value: float  # ``exp`` of the mean negative log probability
    error: float  # standard error of `value`, assuming independent tokens
    n_scored: int  # tokens
    n_windows: int


def windows(ids: Sequence[int], length: int, bos: int | None) -> list[list[int]]:
    """Split a text into windows that do not overlap, and drop an incomplete last window.

    Each window starts with `bos` unless it is None. `bos` replaces the first token of the window, as in
    llama.cpp's perplexity tool, so that results are comparable.
    """
    cut = [list(ids[at : at + length]) for at in range(0, len(ids) - length + 1, length)]
    if bos is not None:
        for window in cut:
            window[0] = bos
    return cut


def perplexity(
    score: Callable[[Sequence[int]], np.ndarray[tuple[int], np.dtype[np.float32]]],
    cut: Sequence[Sequence[int]],
    report: Callable[[int, int], object] | None = None,
) -> Perplexity:
    """Score the second half of each of the `windows`, given the first.

    Every scored token thus has at least half a window of context. In a window of n tokens, the tokens at
    n/2 + 1 to n - 1 are scored, as in llama.cpp's perplexity tool. `score` returns log probabilities, as
    `metal_prefill.Model.score`; `report` is called with the number of finished windows and their total.
    """
    scored = []
    for done, window in enumerate(cut, start=1):
        scored.append(score(window)[len(window) // 2 :])
        if report is not None:
            report(done, len(cut))
    losses = -np.concatenate(scored).astype(np.float64)
    value, error = float(np.exp(losses.mean())), float(losses.std()) / max(losses.size - 1, 1) ** 0.5
    return Perplexity(value, value * error, losses.size, len(cut))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Perplexity of a text, measured as in llama.cpp's tool: the text is split into windows that do "
        "not overlap, each starts with the beginning-of-text token if the model has one, and the second "
        "half of each window is scored given the first."
    )
    common.add_model_arguments(parser)
    parser.add_argument("-f", "--file", required=True, metavar="FILE", help="file with the text; - is stdin")
    default = f"{DEFAULT_WINDOW}, or the model's context if smaller"
    common.add_number(parser, "-c --window", f"tokens in a window (default: {default})")
    common.add_number(parser, "--windows", "use only the first N windows")


def execute(arguments: argparse.Namespace) -> None:
    """Print the perplexity."""
    text = common.read_text(arguments.file)
    with common.open_model(arguments, generates=True) as model:
        length = arguments.window or min(DEFAULT_WINDOW, model.max_context)
        if length < 4:
            raise common.UsageError(f"a window must have at least 4 tokens, got {length}")
        if length > model.max_context:
            raise common.UsageError(f"a window of {length} tokens exceeds the context of {model.max_context}")
        ids = model.tokenizer.encode(text)
        bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
        cut = windows(ids, length, bos)[: arguments.windows]
        if not cut:
            raise common.UsageError(
                f"the text has {len(ids)} tokens, fewer than a window of {length}: use a longer text, or set "
                "--window"
            )
        with common.progress_bar("perplexity", "windows") as progress:
            result = perplexity(model.score, cut, progress)
    print(
        f"perplexity {result.value:.4f} ± {result.error:.4f} over {counted(result.n_scored, 'token')} "
        f"in {counted(result.n_windows, 'window')} of {length}, the second half of each"
    )
