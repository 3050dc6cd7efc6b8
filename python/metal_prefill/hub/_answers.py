"""Validation of a hub's responses before `huggingface_hub` uses them.

The cache of `huggingface_hub` derives file names from response headers, so that an ETag such as ``../../x``
would write outside the cache. Listings are limited in size, and responses in time.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from metal_prefill.errors import HubError

MAX_LISTING = 16 << 20  # bytes; the listing of a repository with 10,000 files has about 2 MB
TIME_LIMIT = 30  # seconds for a complete response, except file contents

_SAFE_NAME = re.compile(r"[\w.+=-]{1,200}", re.ASCII)
_NAMING_HEADERS = ("ETag", "X-Linked-ETag", "X-Repo-Commit")
_hooks = threading.Lock()

Result = TypeVar("Result")


def list_files(hub: ModuleType, repo_id: str, revision: str | None, token: str | bool | None) -> list[str]:
    """Return the paths of all files of a revision.

    Raises HubError if the repository or revision does not exist, or access is denied; other errors if the
    hub is unreachable, or its response is not a listing.
    """
    tail = f"/revision/{revision.replace('/', '%2F')}" if revision else ""
    url = f"{hub.constants.ENDPOINT}/api/models/{repo_id}{tail}"
    status, headers, body = within(TIME_LIMIT, lambda: _get(hub, url, token))
    _check_status(repo_id, revision, status, headers)
    try:
        files = [sibling["rfilename"] for sibling in json.loads(body)["siblings"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"its response is not a file listing ({type(error).__name__})") from None
    for name in files:
        if not isinstance(name, str) or not _is_relative(name):
            raise ValueError(f"its listing contains the invalid file name {str(name)[:80]!r}")
    return files


def check_file(
    hub: ModuleType, repo_id: str, name: str, revision: str | None, token: str | bool | None
) -> None:
    """Request the headers of a file once, without the library's retries, which take minutes.

    Raises an error of the HTTP client, OSError or ValueError if the file is not available, or the response
    lacks its ETag, commit or size.
    """
    url = hub.hf_hub_url(repo_id, name, revision=revision)
    metadata = within(TIME_LIMIT, lambda: hub.get_hf_file_metadata(url, token=token, timeout=_patience(hub)))
    needed = {"an ETag": metadata.etag, "a commit": metadata.commit_hash, "a size": metadata.size}
    for what, value in needed.items():
        if value is None:
            raise ValueError(f"its response for {name} lacks {what}")


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
        result: Result = in_thread(call).result(seconds)
        return result
    except futures.TimeoutError:
        raise TimeoutError(f"no complete response within {seconds} s") from None


def _patience(hub: ModuleType) -> float:
    """Return the read timeout in seconds, which is the library's own for a first request (default: 10)."""
    return float(hub.constants.HF_HUB_ETAG_TIMEOUT)


def _get(hub: ModuleType, url: str, token: str | bool | None) -> tuple[int, Any, bytes]:
    """Send a GET request; return status, headers and body, which is limited to `MAX_LISTING` bytes."""
    client, patience = hub.utils.get_session(), _patience(hub)
    headers = hub.utils.build_hf_headers(token=token)
    end = time.monotonic() + TIME_LIMIT
    with client.stream("GET", url, headers=headers, timeout=patience, follow_redirects=True) as answer:
        return answer.status_code, answer.headers, _read(answer.iter_bytes(1 << 16), end)


def _read(chunks: Iterator[bytes], end: float) -> bytes:
    body = bytearray()
    for chunk in chunks:
        body += chunk
        if len(body) > MAX_LISTING:
            raise ValueError(f"its response has more than {MAX_LISTING} bytes")
        if time.monotonic() > end:  # the caller has stopped waiting
            raise TimeoutError
    return bytes(body)


def _check_status(repo_id: str, revision: str | None, status: int, headers: Any) -> None:
    code = headers.get("X-Error-Code")
    if code is None and headers.get("Content-Type", "").startswith("text/html"):  # the Hub sends JSON
        raise ValueError(
            f"its response is a web page with status {status}, as proxies and sign-in pages send: sign in "
            "with a browser, or set HTTPS_PROXY or HF_ENDPOINT"
        )
    if code == "GatedRepo":
        where = f"{repo_id}@{revision}" if revision else repo_id
        raise HubError(f"{where} is gated: request access on its page, then log in or set HF_TOKEN")
    if code == "RevisionNotFound":
        raise HubError(f"{repo_id} has no revision {revision!r}")
    if code == "RepoNotFound" or status in (401, 404):
        raise HubError(f"repository {repo_id} does not exist on the Hub, or is private")
    if status != 200:
        raise ValueError(f"its response has status {status}")


def _is_relative(name: str) -> bool:
    parts = name.split("/")
    return not any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts)


def _check_headers(response: Any, *_: Any, **__: Any) -> None:
    for header in _NAMING_HEADERS:
        value = response.headers.get(header)
        if value is None:
            continue
        name = value.removeprefix("W/").strip('"')
        if not _SAFE_NAME.fullmatch(name) or not name.strip("."):
            raise HubError(f"its {header} {value[:80]!r} is not a valid file name")
