"""``metal-prefill info``: contents of a model file, and available devices."""

from __future__ import annotations

import argparse
from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from metal_prefill.commands import common
from metal_prefill.commands.common import MIB

if TYPE_CHECKING:
    from metal_prefill.files._gguf_file import GGUFFile

EXAMPLE = "metal-prefill info -m smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_argument(parser)
    parser.add_argument("positional_model", nargs="?", metavar="FILE", help="the same as -m FILE")


def bytes_by_type(gguf: GGUFFile) -> list[tuple[str, int, int, int]]:
    """Return name and numbers of tensors, weights and bytes per tensor type, largest first."""
    tensors: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        tensors[tensor.type_name] += 1
        weights[tensor.type_name] += prod(tensor.shape)
        sizes[tensor.type_name] += tensor.nbytes
    return [(name, tensors[name], weights[name], size) for name, size in sizes.most_common()]


def devices() -> list[tuple[str, str]]:
    """Return name and availability of each device."""
    from metal_prefill import _core
    from metal_prefill.engine import resolve_device
    from metal_prefill.storage._kernel_set import kernel_set, settle_pair_speed

    if problem := _core.metal_device().get("problem"):
        metal = f"not available: {problem}"
    elif _core.has_emulator:
        metal = "emulator: for correctness tests, its speed is not that of a GPU"
    else:
        metal = "available"
    speedup = settle_pair_speed()
    cpu = f"available, with {kernel_set()}"
    if speedup:
        cpu += f"; products of bfloat16 pairs measured {speedup:.1f} times as fast as float32"
    return [("auto", resolve_device("auto")), ("cpu", cpu), ("metal", metal)]


def execute(arguments: argparse.Namespace) -> None:
    """Print the tables."""
    from metal_prefill import default_model_path
    from metal_prefill._support.tables import table
    from metal_prefill.engine import chosen_mode
    from metal_prefill.files import ModelConfig
    from metal_prefill.files._gguf_file import GGUFFile
    from metal_prefill.files._hyperparameters import read_config
    from metal_prefill.files._model_tensors import ignored_tensors

    if arguments.model and arguments.positional_model:
        raise common.UsageError("name the model once: -m FILE or FILE")
    path = common.model_path(arguments.model or arguments.positional_model) or default_model_path()
    console = common.console()
    with GGUFFile(path) as gguf:
        config, defaults = read_config(gguf), ModelConfig()
        size = sum(part.stat().st_size for part in gguf.parts)
        console.print(f"{path}: GGUF version {gguf.version}, {size:,} bytes", highlight=False)
        settings = [
            (name, f"{value:g}" if isinstance(value, float) else str(value))
            for name, value in config.as_dict().items()
            if value != getattr(defaults, name)
        ]
        model_name, pre = gguf.metadata.get("tokenizer.ggml.model"), gguf.metadata.get("tokenizer.ggml.pre")
        tokenizer = "none" if model_name is None else f"{model_name}" + (f" ({pre})" if pre else "")
        settings += [("tokenizer", tokenizer), ("compute on the CPU", chosen_mode(gguf, config))]
        title = "configuration (settings other than defaults)"
        console.print(table(title, ("setting", "value"), settings, names=2))

        header = ("type", "tensors", "weights", "bytes", "MiB", "bits per weight")
        rows = (
            (kind, f"{n}", f"{weights:,}", f"{size:,}", f"{size / MIB:.2f}", f"{8 * size / weights:.2f}")
            for kind, n, weights, size in bytes_by_type(gguf)
        )
        console.print(table("tensors", header, rows))
        for purpose, count in Counter(ignored_tensors(gguf, config).values()).items():
            console.print(f"{count} tensors for {purpose} are ignored", highlight=False)

    console.print(table("devices", ("device", "state"), devices(), names=2))
