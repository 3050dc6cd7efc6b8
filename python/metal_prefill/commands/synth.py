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
    shape = "shape that the other options modify"
    common.add_option(parser, "--preset", shape, "smollm-135m", choices=tuple(PRESETS))
    for name, meaning in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        common.add_number(parser, option, f"{meaning} (default: the preset's)", type=int)
    types = {"type": str.upper, "choices": TENSOR_TYPES, "metavar": "TYPE"}
    matrices = f"type of the layer matrices: {', '.join(TENSOR_TYPES)}"
    common.add_option(parser, "--type", matrices, "Q4_0", dest="tensor_type", **types)
    common.add_option(parser, "--embedding-type", "type of the token embedding", "Q8_0", **types)
    common.add_number(parser, "--seed", "seed of the random weights", 0, int)


def execute(arguments: argparse.Namespace) -> None:
    """Write the file and print its path and size."""
    names = ("path", "preset", *SIZES, "tensor_type", "embedding_type", "seed")
    with common.progress_bar("weights", "bytes") as progress:
        path = synthesize(**{name: getattr(arguments, name) for name in names}, progress=progress)
    print(f"{path}: {path.stat().st_size:,} bytes", file=sys.stderr)
