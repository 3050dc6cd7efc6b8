"""``metal-prefill synth``: write a model with random weights."""

import argparse
import inspect
import sys
from pathlib import Path

from metal_prefill.commands import common
from metal_prefill.files._task_config import NUMBERED_POOLINGS
from metal_prefill.synth import PRESETS, ROPE_SCALINGS, TENSOR_TYPES, TIED, Progress, synthesize
from metal_prefill.synth._tokenizer import VOCABULARIES

SIZES = {
    "layers": "number of layers",
    "dim": "width of the residual stream",
    "heads": "number of query heads",
    "kv-heads": "number of key-value heads",
    "head-dim": "width of a head",
    "ffn": "inner width of the feed-forward",
    "vocab": "number of tokens in the vocabulary",
    "context": "context length in tokens",
}

EXAMPLE = "metal-prefill synth --preset tiny tiny.gguf"


def _override(text: str) -> tuple[str, str]:
    pattern, equals, kind = text.rpartition("=")
    if not equals or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r}: must be PATTERN=TYPE")
    return pattern, kind.upper()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command, whose parsed values are the arguments of `run`."""
    parser.add_argument("path", metavar="OUT.gguf", type=Path, help="file to write")
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="smollm-135m",
        help="shape that the other options modify (default: smollm-135m)",
    )
    for name, meaning in SIZES.items():
        common.add_number(parser, f"--{name}", type=int, help=f"{meaning} (default: the preset's)")
    parser.add_argument(
        "--type",
        dest="tensor_type",
        type=str.upper,
        choices=TENSOR_TYPES,
        default="Q4_0",
        metavar="TYPE",
        help=f"type of the layer matrices: {', '.join(TENSOR_TYPES)} (default: Q4_0)",
    )
    parser.add_argument(
        "--embedding-type",
        type=str.upper,
        default="Q8_0",
        choices=TENSOR_TYPES,
        help="type of the token embedding (default: Q8_0)",
        metavar="TYPE",
    )
    parser.add_argument(
        "--output-type", metavar="TYPE", help='type of a separate output matrix, or "tied" for none'
    )
    parser.add_argument(
        "--override",
        dest="overrides",
        type=_override,
        action="append",
        metavar="PATTERN=TYPE",
        help="type of tensors with matching names, as in 'blk.*.ffn_down.weight=Q6_K'; repeatable",
    )
    parser.add_argument(
        "--tokenizer",
        choices=tuple(VOCABULARIES),
        help="byte-level BPE (gpt2), SentencePiece (llama) or WordPiece (bert) (default: the preset's)",
    )
    common.add_number(parser, "--rope-base", type=float, metavar="X", help="base of the RoPE frequencies")
    common.add_number(parser, "--rope-dims", type=int, help="number of rotated dimensions of a head")
    parser.add_argument("--rope-scaling", choices=ROPE_SCALINGS, help="method of extending the context")
    common.add_number(
        parser, "--rope-factor", type=float, metavar="X", help="factor by which the context was extended"
    )
    parser.add_argument(
        "--architecture",
        metavar="NAME",
        help="architecture in the file, such as llama, qwen3 or gemma3 (default: the preset's)",
    )
    parser.add_argument("--pooling", choices=NUMBERED_POOLINGS, help="pooling of an embedding model")
    common.add_number(parser, "--value-dim", type=int, help="width of a value head (default: the preset's)")
    common.add_number(parser, "--window", type=int, help="size of a sliding window in tokens")
    common.add_number(parser, "--seed", type=int, default=0, help="seed of the random weights")


def run(arguments: argparse.Namespace, progress: Progress | None = None) -> Path:
    """Write the model described by the options of `add_arguments`; see `synthesize`."""
    known = inspect.signature(synthesize).parameters
    options = {name: value for name, value in vars(arguments).items() if name in known}
    output_type, overrides = options.get("output_type"), options.get("overrides")
    if output_type is not None and output_type != TIED:
        options["output_type"] = output_type.upper()
    if overrides is not None:
        options["overrides"] = dict(overrides)
    return synthesize(**options, progress=progress)


def execute(arguments: argparse.Namespace) -> None:
    """Write the file and print its path and size."""
    with common.progress_bar("weights", "bytes") as progress:
        path = run(arguments, progress)
    print(f"{path}: {path.stat().st_size:,} bytes", file=sys.stderr)
