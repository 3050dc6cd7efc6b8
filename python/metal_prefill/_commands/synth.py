"""``metal-prefill synth``: write a model with random weights."""

from __future__ import annotations

import argparse
import sys

from metal_prefill import synth
from metal_prefill._commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    synth.add_arguments(parser)


def execute(arguments: argparse.Namespace) -> None:
    """Write the file and say where it is."""
    with common.progress_bar("weights", "bytes") as progress:
        path = synth.run(arguments, progress)
    print(f"{path}: {path.stat().st_size:,} bytes", file=sys.stderr)
