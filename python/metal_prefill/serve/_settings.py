"""Limits of a server."""

import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from metal_prefill._support.arguments import integer
from metal_prefill.files._task_config import TextPooling

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    """Names, keys and limits of a server.

    Attributes
    ----------
    names : collection of str
        Names by which requests select the model; by default the name of its file without ``.gguf``.
    api_keys : collection of str
        Accepted API keys; if empty, requests need no key.
    allowed_hosts : collection of str
        Names of the server in URLs, besides IP addresses, ``localhost`` and the machine's name. Requests with
        another ``Host`` get status 403; ``*`` allows all.
    cors_origins : collection of str
        Origins, such as ``https://app.example.com``, whose pages may use the server from a browser. Requests
        with another ``Origin`` than these and the server's own get status 403; ``*`` allows all.
    max_streams : int
        Maximum number of texts generated at a time.
    max_queue : int
        Maximum number of queued texts; a request beyond it gets status 429.
    max_connections : int
        Maximum number of open connections; a request on a further one gets status 503.
    header_seconds : float
        Time limit in seconds for a client to send the headers of a request.
    max_body : int
        Maximum size of a request body in bytes.
    max_texts : int
        Maximum number of texts of one request: `n` times its prompts.
    max_inputs : int
        Maximum number of texts to embed, or documents to rank, in one request.
    max_seconds : float
        Time limit in seconds for an answer, including time in the queue.
    body_seconds : float
        Time limit in seconds for a client to send the body of a request.
    send_seconds : float
        Time limit in seconds for a client to receive a piece of an answer.
    pooling : str or None
        Pooling of embeddings; None selects that of the file.
    prefix_store : path or None
        Folder of shared prefixes and conversations, which are loaded after a restart instead of computed.
    prefix_store_bytes : int
        Maximum size in bytes of the files in `prefix_store`.
    share_prefixes : bool
        Whether requests with different API keys share prefixes. If so, ``cached_tokens`` and response times
        reveal to the owner of one key which prompts others sent.
    page : bool
        Whether ``/`` is a page for people. It loads without an API key, and asks for one.

    Raises
    ------
    TypeError, ValueError
        A value is out of range.

    Notes
    -----
    ``max_connections`` and ``header_seconds`` apply to ``metal-prefill serve``. If the application is mounted
    in another server, that server sets both limits.
    """

    names: Collection[str] = ()
    api_keys: Collection[str] = ()
    allowed_hosts: Collection[str] = ()
    cors_origins: Collection[str] = ()
    max_streams: int = 32
    max_queue: int = 256
    max_connections: int = 512
    header_seconds: float = 10.0
    max_body: int = 8 << 20
    max_texts: int = 128
    max_inputs: int = 2048
    max_seconds: float = 600.0
    body_seconds: float = 30.0
    send_seconds: float = 30.0
    pooling: TextPooling | None = None
    prefix_store: str | os.PathLike[str] | None = None
    prefix_store_bytes: int = 1 << 30
    share_prefixes: bool = False
    page: bool = True

    def __post_init__(self) -> None:
        for name in ("max_streams", "max_connections", "max_body", "max_texts", "max_inputs"):
            integer(name, getattr(self, name), 1)
        integer("max_queue", self.max_queue, 0)
        integer("prefix_store_bytes", self.prefix_store_bytes, 0)
        for name in ("max_seconds", "header_seconds", "body_seconds", "send_seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name in ("names", "api_keys", "allowed_hosts", "cors_origins"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a collection of strings, got one string")
        if not all(self.api_keys):
            raise ValueError("an API key is empty")
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"an origin must be '*', 'null' or SCHEME://HOST[:PORT], got {origin!r}")
        for name in self.names:
            if not _is_utf8(name):
                raise ValueError(f"a name of the model must be UTF-8, got {name!r}")
        if not all(map(_is_utf8, self.api_keys)):
            raise ValueError("an API key is not UTF-8")


def _is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogates, as which Python decodes invalid bytes of a command line."""
    return text == text.encode("utf-8", "replace").decode()
