"""``metal-prefill cache``: packed weights and converted models stored between runs."""

import argparse
import time

from metal_prefill.commands import common

MIB = 1 << 20

EXAMPLE = "metal-prefill cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--clear", action="store_true", help="delete all packed weights and converted models")
    what.add_argument(
        "--check", action="store_true", help="verify all packed weights, and delete damaged ones"
    )


def execute(arguments: argparse.Namespace) -> None:
    """Print the entries, most recently used first, and delete those that the options select."""
    from rich.table import Table

    from metal_prefill.hub import _local_file
    from metal_prefill.storage import _pack_cache

    table = Table(title="packed weights", title_justify="left")
    for column, justify in (("model", "left"), ("MiB", "right"), ("used", "left"), ("file", "left")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    total, deleted = 0, 0
    entries = _pack_cache.entries()
    for entry in entries:
        name = entry.name or "damaged"
        if arguments.clear or (arguments.check and not _pack_cache.is_whole(entry)):
            _pack_cache.remove(entry)
            name, deleted = f"{name}: deleted", deleted + 1
        else:
            total += entry.size
        table.add_row(name, f"{entry.size / MIB:,.1f}", _date(entry.used), str(entry.path))
    console = common.console()
    if entries:
        console.print(table)
    kept = f"{len(entries) - deleted} of {len(entries)} kept" if deleted else str(len(entries))
    size = f"{total / MIB:,.1f} MiB of at most {_pack_cache.limit() / MIB:,.0f} MiB"
    console.print(f"entries: {kept}; {size}", highlight=False)
    models = Table(title="converted models", title_justify="left")
    for column, justify in (("MiB", "right"), ("used", "left"), ("file", "left")):
        models.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    conversions = _local_file.conversions()
    for used_at, nbytes, path in conversions:
        state = str(path)
        if arguments.clear:
            path.unlink(missing_ok=True)
            state = f"{state}: deleted"
        models.add_row(f"{nbytes / MIB:,.1f}", _date(used_at), state)
    if arguments.clear:
        _local_file.forget_deleted()
    if conversions:
        console.print(models)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
