"""``metal-prefill convert``: write a model folder as a GGUF file."""

import argparse
import sys
from pathlib import Path

from metal_prefill.commands import common
from metal_prefill.conversion import TENSOR_TYPES, convert
from metal_prefill.hub._local_file import encoder_folders, model_folder

EXAMPLE = "metal-prefill convert minilm minilm.gguf"


def _type(text: str) -> str:
    return text.lower() if text.lower() == "auto" else text.upper()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="folder with config.json, model.safetensors and tokenizer.json; or owner/repo on the Hugging "
        "Face Hub; or minilm",
    )
    parser.add_argument("path", metavar="OUT.gguf", type=Path, help="file to write")
    common.add_option(
        parser,
        "--type",
        f"type of the matrices: {', '.join(TENSOR_TYPES)}; auto keeps BF16 and F16, and selects F32 for "
        "other weights",
        "auto",
        dest="tensor_type",
        type=_type,
        choices=TENSOR_TYPES,
        metavar="TYPE",
    )
    parser.add_argument("--name", help="name of the model in the file (default: that of the folder)")
    common.add_adapter_argument(parser, ": a folder, or the name of one within them")


def execute(arguments: argparse.Namespace) -> None:
    """Write the file and print its path and size."""
    folder, name = model_folder(arguments.folder)
    with common.progress_bar("weights", "bytes") as progress:
        path = convert(
            folder,
            arguments.path,
            tensor_type=arguments.tensor_type,
            name=arguments.name or name,
            adapter=arguments.adapter,
            encoders=encoder_folders(folder),
            progress=progress,
        )
    print(f"{path}: {path.stat().st_size:,} bytes", file=sys.stderr)
