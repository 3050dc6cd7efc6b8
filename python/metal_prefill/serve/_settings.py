"""Limits of a server."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from metal_prefill._support.arguments import integer


@dataclass(frozen=True)
class Settings:
    """What a server allows.

    Attributes
    ----------
    names : collection of str
        The model's names, of which requests give one; by default the name of its file without ``.gguf``.
    api_keys : collection of str
        Of which each request must bring one; empty: none is asked for.
    max_streams : int
        Most texts that are written at a time.
    max_queue : int
        Most texts that wait for their turn; a request beyond it gets status 429.
    max_connections : int
        Most that may be open; a request on a further one gets status 503.
    header_seconds : float
        That a client may take to send the headers of a request.
    max_body : int
        Bytes of a request.
    max_texts : int
        Texts that one request may ask for: `n` times its prompts.
    max_inputs : int
        Texts that one request may have embedded, or documents that it may have ranked.
    max_seconds : float
        That an answer may take, waiting included.
    body_seconds : float
        That a client may take to send the body of a request.
    send_seconds : float
        That a client may take to receive a piece of an answer.
    pooling : str or None
        Of embeddings; None stands for what the file says.
    prefix_store : path or None
        Folder for beginnings of prompts, which are loaded after a restart instead of computed.
    prefix_store_bytes : int
        That they may take of the disk.
    share_prefixes : bool
        Whether requests find prefixes of prompts that came with other API keys. If they do, ``cached_tokens``
        and times tell the owner of one key which prompts others sent.

    Raises
    ------
    TypeError, ValueError
        A value is out of range.

    Notes
    -----
    ``max_connections`` and ``header_seconds`` hold for ``metal-prefill serve``. A server of your own that the
    application is mounted in has limits of its own for both.
    """

    names: Collection[str] = ()
    api_keys: Collection[str] = ()
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
    pooling: Literal["mean", "cls", "last"] | None = None
    prefix_store: str | os.PathLike[str] | None = None
    prefix_store_bytes: int = 1 << 30
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        for name in ("max_streams", "max_connections", "max_body", "max_texts", "max_inputs"):
            integer(name, getattr(self, name), 1)
        integer("max_queue", self.max_queue, 0)
        integer("prefix_store_bytes", self.prefix_store_bytes, 0)
        for name in ("max_seconds", "header_seconds", "body_seconds", "send_seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name in ("names", "api_keys"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a collection of strings, got one string")
        if not all(self.api_keys):
            raise ValueError("an API key is empty")
        for name in self.names:
            if not _is_utf8(name):
                raise ValueError(f"a name of the model must be UTF-8, got {name!r}")
        if not all(map(_is_utf8, self.api_keys)):
            raise ValueError("an API key is not UTF-8")


def _is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogates, to which Python decodes other bytes of a command line."""
    return text == text.encode("utf-8", "replace").decode()
