"""Models of the Hugging Face Hub, and its cache of downloads.

The cache is shared with all Hugging Face libraries, and ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE`` apply.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from metal_prefill.errors import HubError
from metal_prefill.files._gguf_file import is_later_part, part_names
from metal_prefill.hub._repository import Repository, cached_repositories, listing

if TYPE_CHECKING:
    from types import ModuleType

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
    cache = None if cache_dir is None else os.fspath(cache_dir)
    repository = Repository(import_hub(), repo_id, revision, token, cache)
    name, path = pattern, repository.cached(pattern)
    if path is None:
        name = repository.only_match(pattern)
        path = repository.download(name)
    for other in part_names(name)[1:]:
        repository.file(other)
    return path


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
    cache = None if cache_dir is None else os.fspath(cache_dir)
    repository = Repository(import_hub(), repo_id, revision, token, cache)
    files, where = repository.files()
    wanted = [name for name in files if any(_matches(name, pattern) for pattern in _FOLDER_FILES)]
    about = next((name for name in _CONFIGURATIONS if name in wanted), None)
    if "gliner_config.json" in wanted and "model.safetensors" not in wanted:
        wanted += [name for name in files if name == "pytorch_model.bin"]
    found = [name for name in wanted if name.endswith((".safetensors", ".bin"))]
    if about is None or (weights and not found):
        models = [name for name in files if name.endswith(".gguf")]
        rest = f"; write {repo_id}:FILE for one of {listing(models)}" if models else ", and no GGUF files"
        adapter = ", but an adapter (adapter_config.json)" if "adapter_config.json" in files else ""
        raise HubError(f"{where} does not have config.json and model.safetensors{adapter}{rest}")
    if "model.safetensors" in wanted:  # other weights in the repository are copies, split or older
        wanted = [name for name in wanted if not name.startswith("model-") and "index" not in name]
    if not weights:
        wanted = [name for name in wanted if name not in found]
    paths = {name: repository.file(name) for name in wanted}
    return paths[about].parent


def _matches(name: str, pattern: str) -> bool:
    """Return whether a path matches a pattern, part by part."""
    parts, patterns = name.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def import_hub() -> ModuleType:
    """Import the Hub's client on first use, as its import takes longer than that of this package."""
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


class CachedModel(NamedTuple):
    """A model that opens without a download."""

    name: str  # ``owner/repo`` for a folder, or ``owner/repo:file``
    path: Path  # the folder or file
    nbytes: int  # size of its weights


def cached_models() -> Iterator[CachedModel]:
    """Yield the model folders and GGUF files of the branches in the cache."""
    for repo in cached_repositories(import_hub()):
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

    repositories = {repo.repo_id: repo for repo in cached_repositories(import_hub())}
    if repo_id not in repositories:
        raise HubError(f"{repo_id} is not in the cache, which has {', '.join(repositories) or 'nothing'}")
    # By folder: forks of a repository have the same revisions, by which the Hub's client deletes.
    shutil.rmtree(repositories[repo_id].repo_path)
    return int(repositories[repo_id].size_on_disk)
