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

if TYPE_CHECKING:
    from types import ModuleType

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_SPEC = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<file>.+)")
_LISTED = 12  # files that an error names at most
_TIMEOUT = 10  # seconds; the default of huggingface_hub for its own first request


def resolve_model(spec: str | os.PathLike[str]) -> Path:
    """Return the local path of a model, fetching it if need be.

    Parameters
    ----------
    spec
        Path of a file; or ``owner/repo:file``, where ``file`` is a path in a repository of the Hub or a glob
        pattern that one file of it matches, such as ``*Q4_0.gguf``. A file of that name on the disk is first.

    Raises
    ------
    HubError
        See :func:`fetch`; or `spec` names a repository without a file.
    """
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
        out of reach and the cache does not hold the file.
    """
    hub = _import_hub()
    where = f"{repo_id}@{revision}" if revision else repo_id
    cache = os.fspath(cache_dir) if cache_dir is not None else None
    if not any(c in pattern for c in "*?["):
        cached = hub.try_to_load_from_cache(repo_id, pattern, cache_dir=cache, revision=revision)
        if isinstance(cached, str):
            return Path(cached)

    http_error = hub.errors.HfHubHTTPError.__bases__[0]  # of the client in use, requests or httpx
    try:
        # Not list_repo_files: that tries for half a minute before it says that there is no connection.
        info = hub.model_info(repo_id, revision=revision, token=token, timeout=_TIMEOUT)
        files = [file.rfilename for file in info.siblings]
    except hub.errors.GatedRepoError:
        raise HubError(f"{where} is open on request only: ask there, then log in or set HF_TOKEN") from None
    except hub.errors.RepositoryNotFoundError:
        raise HubError(f"there is no repository {repo_id} on the Hub, or it is private") from None
    except hub.errors.RevisionNotFoundError:
        raise HubError(f"{repo_id} has no revision {revision!r}") from None
    except (http_error, OSError) as error:
        held = _cached_files(hub, repo_id, revision or "main", cache)
        if not held:
            reason = str(error) or type(error).__name__
            raise HubError(f"{where} is not in the cache, and the Hub cannot be reached: {reason}") from error
        return held[_only_match(list(held), pattern, f"{where} in the cache, the Hub being out of reach,")]

    name = _only_match(files, pattern, where)
    try:
        return Path(hub.hf_hub_download(repo_id, name, revision=revision, token=token, cache_dir=cache))
    except (http_error, OSError) as error:
        raise HubError(
            f"{name} of {where} cannot be downloaded: {str(error) or type(error).__name__}"
        ) from error


def _import_hub() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
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
