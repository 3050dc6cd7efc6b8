"""Models in the cache of the Hugging Face Hub."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from metal_prefill.errors import HubError
from metal_prefill.files._gguf_file import is_later_part, part_names
from metal_prefill.hub._download import import_hub


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

    Raises
    ------
    HubError
        The repository is not in the cache.
    """
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
