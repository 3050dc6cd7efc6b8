"""Typed access to the JSON files of a model folder, and the paths of its transformer and modules.

Every getter of `Fields` raises a `GGUFError` that names the file and the field if the value is missing and
has no default, has another type, or is out of range.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metal_prefill._support.messages import Located, shortened
from metal_prefill.errors import GGUFError
from metal_prefill.files._metadata_keys import MAX_INT
from metal_prefill.files._other_formats import RECOGNIZED_BYTES, in_place_of_file

ADAPTER = "adapter_config.json"
GLINER = "gliner_config.json"
LABELS_TOKENIZER = "labels_tokenizer"  # folder in a folder of GLiNER
STATIC = "StaticEmbedding"  # module whose vectors are means of rows of a table
STATIC_CLASS = "StaticModel"  # class of such a table alone, in model2vec
MAX_TEXT = 256 << 20  # bytes of a file of text; the largest tokenizers have about 35 MB
MAX_FLOAT = float(np.finfo(np.float32).max)
MAX_FILE_NAME = 255  # bytes; common file systems have no longer names
MAX_LAYERS = 4096  # published models have up to 126
REQUIRED: Any = object()  # replaces the default of a field
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text, or raise a `GGUFError` that names it."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= MAX_TEXT else b""
    if max(size, len(content)) > MAX_TEXT:
        raise GGUFError(f"{path}: has more than {MAX_TEXT} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise GGUFError(f"{path}: is not valid UTF-8 at byte {error.start}") from None


def read_json(path: Path) -> Any:
    """Read a file of JSON, or raise a `GGUFError` that names it."""
    text = read_text(path)
    try:
        values = json.loads(text)
        if _SURROGATE.search(text.encode()):  # unpaired surrogates, which files must not contain
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        found = in_place_of_file(text[:RECOGNIZED_BYTES].encode())
        kind = f"JSON, but {found}" if found else f"valid JSON: {error}"
        raise GGUFError(shortened(f"{path}: is not {kind}")) from None
    return values


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number in float32."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_FLOAT


class Fields(Located):
    """An object in a JSON file. A getter with several names reads the first field that is present."""

    def __init__(self, path: Path, values: dict[str, Any], inside: str = "") -> None:
        self.path = path
        self.values = values  # contents of the object
        self._inside = inside

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Read a file that contains one object."""
        if not path.is_file():
            raise GGUFError(f"{path}: is missing")
        values = read_json(path)
        if not isinstance(values, dict):
            raise GGUFError(f"{path}: contains a {type(values).__name__}, expected an object")
        return cls(path, values)

    @classmethod
    def read_if_present(cls, path: Path) -> Fields:
        """Read a file, or return an object without fields if there is no such file."""
        return cls.read(path) if path.is_file() else cls(path, {})

    def name(self, key: str) -> str:
        return f"{self._inside}.{key}" if self._inside else key

    def has(self, key: str) -> bool:
        """Return whether a field is present and not null."""
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int = REQUIRED, least: int = 1, most: int = MAX_INT) -> int:
        value = self._typed(keys, default, int, "an integer")
        if not least <= value <= most:
            raise self.error(f"{self._names(keys)} is {value}, must be between {least} and {most}")
        return int(value)

    def layers(self) -> int:
        """Read the number of layers, which is limited since lists of this length precede the tensors."""
        return self.integer("num_hidden_layers", "n_layer", most=MAX_LAYERS)

    def number(self, *keys: str, default: float = REQUIRED) -> float:
        value = self._typed(keys, default, (int, float), "a number")
        if not 0 < value <= MAX_FLOAT:
            raise self.error(f"{self._names(keys)} is {value}, must be positive and at most {MAX_FLOAT:.6g}")
        return float(value)

    def string(self, *keys: str, default: str = REQUIRED) -> str:
        return str(self._typed(keys, default, str, "a string"))

    def choice(self, *keys: str, known: Collection[str], default: str = REQUIRED) -> str:
        """Read one of the `known` strings."""
        value = self.string(*keys, default=default)
        if value not in known:
            names = ", ".join(map(repr, known))
            raise self.unsupported(f"{self._names(keys)} is {value!r}; supported: {names}")
        return value

    def boolean(self, *keys: str, default: bool = REQUIRED) -> bool:
        return bool(self._typed(keys, default, bool, "true or false"))

    def sequence(self, key: str) -> list[Any]:
        """Read an array; a missing one is empty."""
        return list(self._typed((key,), [], list, "an array"))

    def object(self, key: str) -> Fields:
        """Read an object; a missing one has no fields."""
        return Fields(self.path, self._typed((key,), {}, dict, "an object"), self.name(key))

    def objects(self, key: str) -> list[Fields]:
        """Read an array of objects; a missing one is empty."""
        values = {f"{key}[{i}]": value for i, value in enumerate(self.sequence(key))}
        items = Fields(self.path, values, self._inside)
        return [items.object(name) for name in values]

    def require(self, key: str, accepted: Sequence[Any], default: Any) -> None:
        """Raise an UnsupportedModelError unless a field has one of the accepted values."""
        value = self.values.get(key)
        value = default if value is None else value
        if value not in accepted:
            known = ", ".join(map(repr, accepted))
            raise self.unsupported(f"{self.name(key)} is {value!r}; supported: {known}")

    def _typed(self, keys: Sequence[str], default: Any, kind: type | tuple[type, ...], expected: str) -> Any:
        """Return the value under the first name that is present; `expected` describes its type in errors."""
        key = next(filter(self.has, keys), None)
        value = default if key is None else self.values[key]
        if value is REQUIRED:
            raise self.error(f"{self._names(keys)} is missing")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{self._names(keys)} is {type(value).__name__}, expected {expected}")
        return value

    def _names(self, keys: Sequence[str]) -> str:
        return self.name(next(filter(self.has, keys), keys[0]))


def body_folder(folder: Path) -> Path:
    """Return the folder with ``config.json``: this one, or one in it that ``modules.json`` names.

    A folder of GLiNER has ``gliner_config.json`` instead.

    Folders of early versions of sentence-transformers have their first module in ``0_Transformer``. A module
    without a transformer, which is a table, needs no ``config.json``.
    """
    if any((folder / name).is_file() for name in ("config.json", GLINER)):
        return folder
    for first in modules_of(folder)[:1]:
        place, kind = folder / place_of(first), class_of(first)
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
    """Return the folder of an adapter that a caller names; the name itself if there is no such folder.

    Raises UnsupportedModelError if the caller names none, but the folder has adapters.
    """
    if adapter is None:
        refuse_adapter(folder)
        return None
    return adapters_of(folder).get(str(adapter), adapter)


def refuse_adapter(folder: Path) -> None:
    """Raise an UnsupportedModelError if a folder has adapters: the caller must name one."""
    listing = Fields(folder, {})
    if known := adapters_of(folder):
        names = ", ".join(known)
        raise listing.unsupported(f"has the adapters {names}; name one of them as adapter= or --adapter")
    if not (folder / ADAPTER).is_file():
        return
    base = Fields.read(folder / ADAPTER).values.get("base_model_name_or_path")
    of, model = (f" of {base}", "that model") if base else ("", "its base model")
    raise listing.unsupported(
        f"has an adapter ({ADAPTER}){of}; to apply it, open {model} and name this folder as adapter= or "
        "--adapter"
    )


def modules_of(folder: Path) -> list[Fields]:
    """Read the modules of sentence-transformers that a folder lists; of a Router, those of documents."""
    listed = _listed_modules(folder)
    documents = _route(folder, listed, "document")
    return [*documents, *listed[1:]] if documents else listed


def query_modules(folder: Path) -> list[Fields]:
    """Read the modules for queries; none if documents have the same modules."""
    listed = _listed_modules(folder)
    queries, documents = (_route(folder, listed, name) for name in ("query", "document"))
    places = [[place_of(module) for module in route] for route in (queries, documents)]
    return queries if places[0] != places[1] else []


def _listed_modules(folder: Path) -> list[Fields]:
    path = folder / "modules.json"
    return Fields(path, {"modules": read_json(path)}).objects("modules") if path.is_file() else []


def class_of(module: Fields) -> str:
    """Return the class of a module, without its package."""
    return module.string("type").rpartition(".")[2]


def _route(folder: Path, listed: list[Fields], name: str) -> list[Fields]:
    """Read the modules of a route, if the first module is a Router."""
    if not listed or class_of(listed[0]) != "Router":
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
    """Return the folder of a module inside the model's folder, as a relative path."""
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
