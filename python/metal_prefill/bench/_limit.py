"""Upper bound on prompt speed, from the machine's rate of 8-bit products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from metal_prefill.bench._peak import int8_peak
from metal_prefill.files._architecture import ARCHITECTURES
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_config import has_attention, layer_kind, layers_differ
from metal_prefill.files._model_tensors import expected_tensors, ignored_tensors, tensor_name

FLOAT_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class PromptWork:
    """Minimum number of multiply-adds of a prompt, up to the logits of its last token.

    In the last layer nothing but keys and values is needed of the other tokens.

    Attributes
    ----------
    each : int
        In products with weights, for each token.
    once : int
        In products with weights, for the last token: the rest of the last layer, and the head.
    position : int
        In the attention of one layer, for each position that a token sees.
    windows : tuple of int
        Positions that a token sees at most in each layer; 0: all, -1: the layer has no attention.
    """

    each: int
    once: int
    position: int
    windows: tuple[int, ...]

    def products(self, n: int) -> int:
        """Return the multiply-adds of a prompt of `n` tokens."""
        seen = sum(_positions_seen(n, window) for window in self.windows[:-1])
        last = self.windows[-1]
        seen += 0 if last < 0 else min(n, last or n)
        return n * self.each + self.once + seen * self.position


def _positions_seen(n: int, window: int) -> int:
    """Return the total number of positions that `n` tokens attend to, including themselves."""
    if window < 0:
        return 0
    within = min(n, window) if window else n
    return within * (within + 1) // 2 + (n - within) * within


def read_work(path: Path) -> PromptWork | None:
    """Read it from a model's file; None where weights are not quantized, and products not of integers."""
    with GGUFFile(path) as gguf:
        config = read_config(gguf)
        last = f"blk.{config.n_layers - 1}."
        each = once = 0
        others = {
            tensor_name(ARCHITECTURES[config.architecture], spec, layer)
            for spec, layer, _ in expected_tensors(config)
            if spec.kind not in ("matrix", "experts") or spec.role == "router"
        }
        others |= ignored_tensors(gguf, config).keys()
        for tensor in gguf.tensors.values():
            if len(tensor.shape) not in (2, 3) or not tensor.name.startswith("blk.") or tensor.name in others:
                continue
            if tensor.type_name in FLOAT_TYPES:
                return None
            weights = prod(tensor.shape)
            if len(tensor.shape) == 3:  # of all experts
                weights = weights // config.n_experts * config.experts_used
            if tensor.name.startswith(last) and not tensor.name.startswith(
                tuple(
                    f"{last}{name}"
                    for name in ("attn_k", "attn_v", "shortconv.in_proj", "ssm_in", "ssm_alpha", "ssm_beta")
                )
            ):
                once += weights
            else:
                each += weights
        windows = config.layer_window or (0,) * config.n_layers
        kinds = [layer_kind(config, layer) for layer in range(config.n_layers)]
        windows = tuple(w if has_attention(kind) else -1 for w, kind in zip(windows, kinds, strict=True))
        if layers_differ(config) or config.layer_cache or config.per_layer_dim:
            return None
        position = config.n_heads * (config.key_dim + config.value_dim)
        return PromptWork(each, once + config.vocab_size * config.dim, position, windows)


def prompt_limits(path: Path, lengths: Sequence[int], threads: int) -> dict[int, float]:
    """Return tokens per second that prompts of some lengths could reach on this machine's CPU.

    Every multiply-add counts as one of 8-bit integers at the rate that the machine was just measured to do
    them on `threads` threads; scales, norms, exponentials and memory count for nothing. No engine that
    computes with 8-bit integers is faster. Empty where the work is not known.

    Raises
    ------
    BenchError
        The process that measures the rate dies.
    """
    work = read_work(path)
    if work is None or not lengths:
        return {}
    rate = int8_peak(threads)
    return {n: rate * n / work.products(n) for n in lengths}
