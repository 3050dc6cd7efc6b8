"""``metal-prefill synth``: write a model with random weights."""

import argparse
import sys
from pathlib import Path

from metal_prefill.commands import common
from metal_prefill.synth import PRESETS, TENSOR_TYPES, synthesize

SIZES = {
    "layers": "number of layers",
    "dim": "width of the residual stream",
    "heads": "number of query heads",
    "kv_heads": "number of key-value heads",
    "head_dim": "width of a head",
    "ffn": "inner width of the feed-forward",
    "vocab": "number of tokens in the vocabulary",
    "context": "context length in tokens",
}

EXAMPLE = "metal-prefill synth --preset tiny tiny.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; :func:`metal_prefill.synth.synthesize` has more."""
    parser.add_argument("path", metavar="OUT.gguf", type=Path, help="file to write")
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="smollm-135m",
        help="shape that the other options modify (default: smollm-135m)",
    )
    for name, meaning in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        common.add_number(parser, option, type=int, help=f"{meaning} (default: the preset's)")
    for option, dest, what, default in (
        ("--type", "tensor_type", f"layer matrices: {', '.join(TENSOR_TYPES)}", "Q4_0"),
        ("--embedding-type", "embedding_type", "token embedding", "Q8_0"),
    ):
        parser.add_argument(
            option,
            dest=dest,
            type=str.upper,
            choices=TENSOR_TYPES,
            default=default,
            metavar="TYPE",
            help=f"type of the {what} (default: {default})",
        )
    common.add_number(parser, "--seed", type=int, default=0, help="seed of the random weights")


def execute(arguments: argparse.Namespace) -> None:
    """Write the file and print its path and size."""
    names = ("path", "preset", *SIZES, "tensor_type", "embedding_type", "seed")
    with common.progress_bar("weights", "bytes") as progress:
        path = synthesize(**{name: getattr(arguments, name) for name in names}, progress=progress)
    print(f"{path}: {path.stat().st_size:,} bytes", file=sys.stderr)
