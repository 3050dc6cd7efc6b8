"""``metal-prefill cache``: packed weights and converted models stored between runs."""

import argparse
import time

from metal_prefill.commands import common

EXAMPLE = "metal-prefill cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="delete all packed weights and converted models")


def execute(arguments: argparse.Namespace) -> None:
    """Print the entries, most recently used first, and delete them if requested."""
    from metal_prefill._support.tables import table
    from metal_prefill.hub import _local_file
    from metal_prefill.storage import _pack_cache
    from metal_prefill.storage._cache_folder import stored_files

    console = common.console()
    packed, converted = (stored_files(module.PATTERN) for module in (_pack_cache, _local_file))
    kept = 0 if arguments.clear else sum(entry.size for entry in packed)
    for title, entries in (("packed weights", packed), ("converted models", converted)):
        rows = []
        for used, nbytes, path in entries:
            if arguments.clear:
                path.unlink(missing_ok=True)
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
            rows.append(
                (f"{path}: deleted" if arguments.clear else str(path), day, f"{nbytes / common.MIB:,.1f}")
            )
        if rows:
            console.print(table(title, ("file", "used", "MiB"), rows, names=2))
        if entries is packed:
            count = f"0 of {len(packed)} kept" if arguments.clear and packed else str(len(packed))
            size = f"{kept / common.MIB:,.1f} MiB of at most {_pack_cache.limit() / common.MIB:,.0f} MiB"
            console.print(f"entries: {count}; {size}", highlight=False)
