"""A repository of the Hub, whose responses are validated before `huggingface_hub` uses them.

The cache of `huggingface_hub` derives file names from response headers, so that an ETag such as ``../../x``
would write outside the cache. Listings are limited in size, and responses in time.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from metal_prefill.errors import HubError
from metal_prefill.files._gguf_file import is_later_part

if TYPE_CHECKING:
    from types import ModuleType

MAX_LISTING = 16 << 20  # bytes; the listing of a repository with 10,000 files has about 2 MB
TIME_LIMIT = 30  # seconds for a complete response, except file contents
_LISTED = 12  # maximum number of files in an error message

_SAFE_NAME = re.compile(r"[\w.+=-]{1,200}", re.ASCII)
_NAMING_HEADERS = ("ETag", "X-Linked-ETag", "X-Repo-Commit")
_hooks = threading.Lock()

Result = TypeVar("Result")


class Repository(NamedTuple):
    """A revision of a repository, and the cache for its files."""

    hub: ModuleType
    repo_id: str
    revision: str | None
    token: str | bool | None
    cache: str | None  # folder of the cache; None selects that of all Hugging Face libraries

    @property
    def name(self) -> str:
        return f"{self.repo_id}@{self.revision}" if self.revision else self.repo_id

    def files(self) -> tuple[list[str], str]:
        """Return the paths of all files, and the name of their place: the cache if the Hub is unreachable."""
        try:
            with safe_answers(self.hub):
                return self._listed(), self.name
        except HubError:
            raise
        except Exception as error:  # of the library or its HTTP client
            held = self.held()
            if not held:
                reason = f"the Hub is unreachable: {str(error) or type(error).__name__}"
                raise HubError(f"{self.name} is not in the cache, and {reason}") from error
            return list(held), f"{self.name} in the cache (the Hub is unreachable)"

    def only_match(self, pattern: str) -> str:
        """Return the path of the only file that matches a pattern."""
        files, where = self.files()
        found = [f for f in files if f == pattern]
        found = found or [f for f in files if fnmatchcase(f, pattern) and not is_later_part(f)]
        if len(found) == 1:
            return found[0]
        if found:
            raise HubError(f"{len(found)} files in {where} match {pattern!r}; name one of {listing(found)}")
        models = [f for f in files if f.endswith(".gguf")]
        has = f"available models: {listing(models)}" if models else "it contains no GGUF files"
        raise HubError(f"no file in {where} matches {pattern!r}; {has}")

    def cached(self, name: str) -> Path | None:
        """Return the local path of a file if the cache has it."""
        found = self.hub.try_to_load_from_cache(
            self.repo_id, name, cache_dir=self.cache, revision=self.revision
        )
        return Path(found) if isinstance(found, str) else None

    def download(self, name: str) -> Path:
        """Return the local path of the newest version of a file, or of a cached one without the Hub."""
        options: dict[str, Any] = {"revision": self.revision, "token": self.token, "cache_dir": self.cache}
        try:
            with safe_answers(self.hub):
                self._check(name)
                return Path(self.hub.hf_hub_download(self.repo_id, name, **options))
        except Exception as error:
            held = self.held()
            if name in held:
                return held[name]
            raise HubError(
                f"cannot download {name} from {self.name}: {str(error) or type(error).__name__}"
            ) from error

    def file(self, name: str) -> Path:
        """Return the local path of a file, which is downloaded if it is not in the cache."""
        return self.cached(name) or self.download(name)

    def held(self) -> dict[str, Path]:
        """Return the files in the cache by their paths in the repository."""
        revision = self.revision or "main"
        return {
            file.file_path.relative_to(kept.snapshot_path).as_posix(): file.file_path
            for repo in cached_repositories(self.hub, self.cache)
            if repo.repo_id == self.repo_id
            for kept in repo.revisions
            if revision in kept.refs or revision == kept.commit_hash
            for file in kept.files
        }

    def _listed(self) -> list[str]:
        """Return the paths of all files of the revision.

        Raises HubError if the repository or revision does not exist, or access is denied; other errors if
        the hub is unreachable, or its response is not a listing.
        """
        status, headers, body = within(TIME_LIMIT, self._get)
        self._check_status(status, headers)
        try:
            files = [sibling["rfilename"] for sibling in json.loads(body)["siblings"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"its response is not a file listing ({type(error).__name__})") from None
        for name in files:
            if not isinstance(name, str) or not all(map(_is_plain, name.split("/"))):
                raise ValueError(f"its listing contains the invalid file name {str(name)[:80]!r}")
        return files

    def _check(self, name: str) -> None:
        """Request the headers of a file once, without the library's retries, which take minutes.

        Raises an error of the HTTP client, OSError or ValueError if the file is not available, or the
        response lacks its ETag, commit or size.
        """
        url = self.hub.hf_hub_url(self.repo_id, name, revision=self.revision)
        read = self.hub.get_hf_file_metadata
        metadata = within(TIME_LIMIT, lambda: read(url, token=self.token, timeout=self._patience))
        needed = {"an ETag": metadata.etag, "a commit": metadata.commit_hash, "a size": metadata.size}
        for what, value in needed.items():
            if value is None:
                raise ValueError(f"its response for {name} lacks {what}")

    @property
    def _patience(self) -> float:
        """The read timeout in seconds, which is the library's own for a first request (default: 10)."""
        return float(self.hub.constants.HF_HUB_ETAG_TIMEOUT)

    def _get(self) -> tuple[int, Any, bytes]:
        """Request the listing; return status, headers and body, which is limited to `MAX_LISTING` bytes."""
        tail = f"/revision/{self.revision.replace('/', '%2F')}" if self.revision else ""
        url = f"{self.hub.constants.ENDPOINT}/api/models/{self.repo_id}{tail}"
        headers, client = self.hub.utils.build_hf_headers(token=self.token), self.hub.utils.get_session()
        end, body = time.monotonic() + TIME_LIMIT, bytearray()
        options = {"headers": headers, "timeout": self._patience, "follow_redirects": True}
        with client.stream("GET", url, **options) as answer:
            for chunk in answer.iter_bytes(1 << 16):
                body += chunk
                if len(body) > MAX_LISTING:
                    raise ValueError(f"its response has more than {MAX_LISTING} bytes")
                if time.monotonic() > end:  # the caller has stopped waiting
                    raise TimeoutError
            return answer.status_code, answer.headers, bytes(body)

    def _check_status(self, status: int, headers: Any) -> None:
        code = headers.get("X-Error-Code")
        if code is None and headers.get("Content-Type", "").startswith("text/html"):  # the Hub sends JSON
            raise ValueError(
                f"its response is a web page with status {status}, as proxies and sign-in pages send: "
                "sign in with a browser, or set HTTPS_PROXY or HF_ENDPOINT"
            )
        if code == "GatedRepo":
            raise HubError(f"{self.name} is gated: request access on its page, then log in or set HF_TOKEN")
        if code == "RevisionNotFound":
            raise HubError(f"{self.repo_id} has no revision {self.revision!r}")
        if code == "RepoNotFound" or status in (401, 404):
            raise HubError(f"repository {self.repo_id} does not exist on the Hub, or is private")
        if status != 200:
            raise ValueError(f"its response has status {status}")


def cached_repositories(hub: ModuleType, cache: str | None = None) -> list[Any]:
    """Return the repositories of models in the cache, by their names."""
    try:
        repos = hub.scan_cache_dir(cache).repos
    except hub.errors.CacheNotFound:
        return []
    return sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda repo: str(repo.repo_id))


def listing(files: list[str]) -> str:
    """Name files in a message."""
    more = len(files) - _LISTED
    return ", ".join(files[:_LISTED]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def safe_answers(hub: ModuleType) -> Iterator[None]:
    """Reject, while the block runs, responses whose headers are unsafe as file names."""
    client = hub.utils.get_session()
    with _hooks:
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks["response"], _check_headers]}
    try:
        yield
    finally:
        with _hooks:
            hooks = client.event_hooks
            hooks["response"].remove(_check_headers)  # the first one: other calls in flight have theirs
            client.event_hooks = hooks


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of `call`, or raise TimeoutError; an expired call continues in its daemon thread."""
    from concurrent import futures  # this module is imported when any model is opened

    from metal_prefill._support.threads import in_thread

    try:
        return in_thread(call).result(seconds)
    except futures.TimeoutError:
        raise TimeoutError(f"no complete response within {seconds} s") from None


def _is_plain(part: str) -> bool:
    """Return whether a part of a path names a file or folder in the one before."""
    return part not in ("", ".", "..") and "\\" not in part and "\0" not in part


def _check_headers(response: Any, *_: Any, **__: Any) -> None:
    for header in _NAMING_HEADERS:
        value = response.headers.get(header)
        if value is None:
            continue
        name = value.removeprefix("W/").strip('"')
        if not _SAFE_NAME.fullmatch(name) or not name.strip("."):
            raise HubError(f"its {header} {value[:80]!r} is not a valid file name")
