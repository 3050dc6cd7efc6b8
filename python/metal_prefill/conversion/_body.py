"""Where a model folder has its transformer: configuration, tokenizer and weights."""

from pathlib import Path

from metal_prefill._support.messages import shortened
from metal_prefill.conversion._fields import MAX_FILE_NAME, Fields, read_json
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._task_config import TOKEN_VECTORS, TOKEN_WEIGHTS

ADAPTER = "adapter_config.json"
GLINER = "gliner_config.json"
LABELS_TOKENIZER = "labels_tokenizer"  # folder in a folder of GLiNER
STATIC = "StaticEmbedding"  # module whose vectors are means of rows of a table


def body_folder(folder: Path) -> Path:
    """Return the folder with ``config.json``: this one, or one in it that ``modules.json`` names.

    A folder of GLiNER has ``gliner_config.json`` instead.

    Folders of early versions of sentence-transformers have their first module in ``0_Transformer``. A module
    without a transformer, which is a table, needs no ``config.json``.
    """
    if any((folder / name).is_file() for name in ("config.json", GLINER)):
        return folder
    if (folder / "modules.json").is_file():
        first, *_ = (*modules_of(folder), None)
        if first is not None:
            place, kind = folder / place_of(first), first.string("type").rpartition(".")[2]
            if (place / "config.json").is_file() or kind == STATIC:
                return place
            if kind != "Transformer":
                raise first.unsupported(
                    f"{first.name('type')} is {kind}; supported first are a Transformer and a {STATIC}"
                )
    refuse_adapter(folder)
    files = sorted(path.name for path in folder.glob("*.gguf"))
    hint = f"; it contains GGUF files, so name one, such as {folder / files[0]}" if files else ""
    raise GGUFError(f"{folder}: has no config.json, which a model folder contains{hint}")


def adapters_of(folder: Path) -> dict[str, Path]:
    """Return the folders of adapters in a model folder by their names, as jina-embeddings-v5 has them."""
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"adapters/*/{ADAPTER}"))}


def adapter_folder(folder: Path, adapter: Path | None) -> Path | None:
    """Return the folder of an adapter that a caller names; the name itself if no folder has it.

    Raises UnsupportedModelError if the caller names none, but the folder has some.
    """
    if adapter is None:
        refuse_adapter(folder)
        return None
    return adapters_of(folder).get(str(adapter), adapter)


def refuse_adapter(folder: Path) -> None:
    """Raise an UnsupportedModelError if a folder has adapters, of which a caller must name one."""
    if known := adapters_of(folder):
        names = ", ".join(known)
        raise UnsupportedModelError(
            shortened(f"{folder}: has the adapters {names}; name one of them as adapter= or --adapter")
        )
    if not (folder / ADAPTER).is_file():
        return
    base = Fields.read(folder / ADAPTER).values.get("base_model_name_or_path")
    of, model = (f" of {base}", "that model") if base else ("", "its base model")
    raise UnsupportedModelError(
        shortened(
            f"{folder}: has an adapter ({ADAPTER}){of}; to apply it, open {model} and name this folder as "
            "adapter= or --adapter"
        )
    )


def modules_of(folder: Path) -> list[Fields]:
    """Read the modules of sentence-transformers that a folder lists; of a Router, those of documents."""
    path = folder / "modules.json"
    listed = Fields(path, {"modules": read_json(path)}).objects("modules")
    documents = _route(folder, listed, "document")
    return [*documents, *listed[1:]] if documents else listed


def query_modules(folder: Path) -> list[Fields]:
    """Read the modules that compute queries alone; none if documents have the same."""
    path = folder / "modules.json"
    listed = Fields(path, {"modules": read_json(path)}).objects("modules") if path.is_file() else []
    queries, documents = (_route(folder, listed, name) for name in ("query", "document"))
    places = [[place_of(module) for module in route] for route in (queries, documents)]
    return queries if places[0] != places[1] else []


def token_heads(folder: Path) -> dict[str, Path]:
    """Return the files of a folder with the heads of bge-m3, which it does not list, by their names."""
    paths = {name: folder / f"{name}_linear.pt" for name in (TOKEN_WEIGHTS, TOKEN_VECTORS)}
    return {name: path for name, path in paths.items() if path.is_file()}


def _route(folder: Path, listed: list[Fields], name: str) -> list[Fields]:
    """Read the modules of a route, if the first module is a Router."""
    if not listed or listed[0].string("type").rpartition(".")[2] != "Router":
        return []
    place = place_of(listed[0])
    config = Fields.read(folder / place / "router_config.json")
    types, structure, parameters = (config.object(key) for key in ("types", "structure", "parameters"))
    if set(structure.values) != {"query", "document"} or parameters.values.get("route_mappings"):
        raise config.unsupported(
            f"routes are {', '.join(structure.values)}; supported are query and document, without mappings"
        )
    first = next(iter(structure.values))
    parameters.require("default_route", ("document",), first)
    ids = structure.sequence(name)
    if not ids or not all(isinstance(i, str) for i in ids):
        raise config.error(f"{structure.name(name)} must name modules")
    return [Fields(config.path, {"type": types.string(i), "path": str(place / i)}, i) for i in ids]


def place_of(module: Fields) -> Path:
    """Return the folder of a module, relative to that of the model, in which it must be."""
    name = module.string("path", default="")
    place = Path(name)
    if place.is_absolute() or ".." in place.parts or "\0" in name or len(name.encode()) > MAX_FILE_NAME:
        raise module.error(f"{module.name('path')} is {name!r}, must be a folder in this one")
    return place


def module_folders(folder: Path) -> list[Path]:
    """Return the folders of the modules that a folder lists; none if its list is missing or damaged."""
    try:
        return [folder / place_of(module) for module in (*modules_of(folder), *query_modules(folder))]
    except (FileNotFoundError, GGUFError):
        return []
