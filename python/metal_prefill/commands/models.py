"""``metal-prefill models``: models that open without a download, what they do, and their size."""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from metal_prefill.commands import common

EXAMPLE = "metal-prefill models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--delete",
        metavar="OWNER/REPO",
        help="delete the files of a repository from the cache of the Hub; `metal-prefill cache` deletes "
        "converted models and packed weights",
    )


def execute(arguments: argparse.Namespace) -> None:
    """Print the names of models, as for ``-m``, or delete a repository."""
    from metal_prefill._support.tables import table
    from metal_prefill.hub._download import delete_cached

    console = common.console()
    if arguments.delete is not None:
        freed = delete_cached(arguments.delete)
        console.print(f"{arguments.delete}: deleted, {freed / common.MIB:,.1f} MiB", highlight=False)
        return
    rows = ((name, _task(path), f"{nbytes / common.MIB:,.1f}") for name, path, nbytes in _models())
    console.print(table(None, ("model", "does", "MiB"), rows, names=2))


def _models() -> Iterator[tuple[str, Path, int]]:
    """Yield name, path and size of the bundled model, of models in packages, then in the Hub's cache."""
    from metal_prefill.errors import MissingExtraError
    from metal_prefill.hub._download import cached_models
    from metal_prefill.hub._local_file import PACKAGED, default_model_path, packaged_model

    bundled = default_model_path()
    yield "(without -m)", bundled, bundled.stat().st_size
    for name in PACKAGED:
        with suppress(MissingExtraError):
            if (path := packaged_model(name)) is not None:
                weights = path / "model.safetensors" if path.is_dir() else path
                yield name, path, weights.stat().st_size
    yield from cached_models()


def _task(path: Path) -> str:
    """Return the task of a model, or the reason why it does not open."""
    from metal_prefill.errors import MetalPrefillError

    try:
        return _task_of_folder(path) if path.is_dir() else _task_of_file(path)
    except (MetalPrefillError, OSError) as error:
        return f"does not open: {str(error).removeprefix(f'{path}: '):.100}"


def _task_of_file(path: Path) -> str:
    from metal_prefill.files._gguf_file import GGUFFile
    from metal_prefill.files._hyperparameters import read_config
    from metal_prefill.files._metadata_keys import POOLING_KEY
    from metal_prefill.files._task_config import CLASSIFIER

    with GGUFFile(path) as gguf:
        config = read_config(gguf)
        if not gguf.tensors.keys().isdisjoint(CLASSIFIER):
            return "labels, ranks"
        pools = {POOLING_KEY, f"{config.architecture}.pooling_type"} & set(gguf.metadata)
        if not config.causal or pools:
            return "vectors"
        return "chat" if "tokenizer.chat_template" in gguf.metadata else "text"


def _task_of_folder(path: Path) -> str:
    from metal_prefill.conversion._folder import Fields, body_folder
    from metal_prefill.conversion._source import find_source
    from metal_prefill.conversion._writing import SOURCES

    _, task = find_source(SOURCES, Fields.read(body_folder(path) / "config.json"))
    if (path / "modules.json").exists() or task == "late":
        return "vectors"
    if task == "causal":
        return "chat" if (path / "chat_template.jinja").exists() else "text"
    return {"sequence": "labels, ranks", "tokens": "labels", "masked": "vectors"}.get(task, "vectors")
