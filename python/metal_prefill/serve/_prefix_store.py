"""Beginnings of prompts on disk: after a restart a known system message is loaded, not computed.

A beginning that two prompts of a prefix namespace had in common is saved as a session is, in a file that is
named by its tokens: their number, and a hash of them and of the namespace. So nothing but names is read at
the start, and a prompt finds its beginnings by hashing its own; those of other namespaces have other names.
Files of each model and cache dtype have a folder of their own. A file that is damaged is removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from metal_prefill._support.cache_folder import beyond_limit
from metal_prefill.errors import MetalPrefillError, StateError
from metal_prefill.model import Model
from metal_prefill.serve._errors import log

Ids = npt.NDArray[np.int32]

PAGE = 64  # tokens: beginnings are cut to whole pages
RECENT_PROMPTS = 64  # that a prompt is compared with
MOST_PENDING = 4  # beginnings that wait to be written; further ones are left for a later prompt
_NAME = re.compile(r"(\d+)-([0-9a-f]{32})\.session")


class PrefixStore:
    """Saves beginnings of prompts, and loads those that a prompt has.

    Safe to call from several threads.

    Parameters
    ----------
    model
        Whose prompts they are.
    folder
        Made if need be, for this user alone: whoever can write there can put any K and V into it.
    limit
        Bytes of all files of the model; those that were not used for longest are removed.

    Attributes
    ----------
    loaded, saved : int
        Beginnings so far.
    """

    def __init__(self, model: Model, folder: str | os.PathLike[str], limit: int) -> None:
        self._model = model
        owner = model.engine.state_owner
        self._folder = Path(folder) / f"{owner.fingerprint}-{owner.kv_dtype}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._limit = limit
        self._lock = threading.Lock()  # guards what follows
        self._names: dict[int, set[str]] = {}  # hashes by number of tokens
        self._recent: deque[tuple[str, Ids]] = deque(maxlen=RECENT_PROMPTS)
        self._pending = 0
        self._loading = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="metal_prefill prefix store")
        self.loaded = self.saved = 0
        for path in self._folder.iterdir():
            if found := _NAME.fullmatch(path.name):
                self._names.setdefault(int(found[1]), set()).add(found[2])

    def load(self, ids: Ids, namespace: str = "") -> None:
        """Load the longest beginning of a prompt that its namespace has, unless the cache has as much."""
        with self._lock:
            lengths = sorted((n for n in self._names if n < len(ids)), reverse=True)
        for n in lengths:
            digest = _digest(ids[:n], namespace)
            with self._lock:
                known = digest in self._names.get(n, ())
            if known and self._load(ids[: n + 1], n, digest, namespace):
                return

    def note(self, ids: Ids, namespace: str = "") -> None:
        """Save the beginning that a finished prompt shares with an earlier one of its namespace.

        That is done in a thread of the store.

        A conversation that continues shares all of its former prompt, which is no beginning of another.
        """
        with self._lock:
            others = [other for space, other in self._recent if space == namespace]
            shared = max((_shared(ids, other) for other in others), default=0)
            self._recent.append((namespace, ids))
            n = min(shared, len(ids) - 1) // PAGE * PAGE
            digest = _digest(ids[:n], namespace)
            if n == 0 or digest in self._names.get(n, ()) or self._pending == MOST_PENDING:
                return
            self._pending += 1
        self._writer.submit(self._save, ids[: n + 1], n, digest, namespace)

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.shutdown()

    def _path(self, n: int, digest: str) -> Path:
        return self._folder / f"{n}-{digest}.session"

    def _load(self, ids: Ids, n: int, digest: str, namespace: str) -> bool:
        """Put a stored beginning, ``ids[:n]``, into the model's cache; False where the file is of no use."""
        path = self._path(n, digest)
        with self._loading:  # of many prompts that begin alike, one loads it
            try:
                with self._model.session(prefix_namespace=namespace) as session:
                    if session.native.reuse(ids) >= n:
                        return True
                with self._model.load_session(path, prefix_namespace=namespace) as session:
                    if session.tokens != ids[:n].tolist():
                        raise StateError(f"{path}: its tokens are not those of its name")
                    session.native.reuse(ids)  # from now on, others find it
                os.utime(path)
                self.loaded += 1
                return True
            except (StateError, FileNotFoundError) as error:
                log.warning("a stored prefix is dropped: %s", error)
                self._remove(path)
            except (MetalPrefillError, OSError) as error:
                log.warning("a stored prefix cannot be loaded: %s", error)
        return False

    def _save(self, ids: Ids, n: int, digest: str, namespace: str) -> None:
        try:
            with self._model.session(prefix_namespace=namespace) as session:
                core = session.native
                if core.reuse(ids) < n:
                    return  # others have taken its place in the cache
                core.rewind(n)
                session.save(self._path(n, digest))
            with self._lock:
                self._names.setdefault(n, set()).add(digest)
            self.saved += 1
            self._remove_oldest()
        except (MetalPrefillError, OSError) as error:
            log.warning("a prefix cannot be stored: %s", error)
        finally:
            with self._lock:
                self._pending -= 1

    def _remove_oldest(self) -> None:
        files = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if _NAME.fullmatch(path.name):
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        for path in beyond_limit(files, self._limit):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()
        if found := _NAME.fullmatch(path.name):
            with self._lock:
                self._names.get(int(found[1]), set()).discard(found[2])


def _digest(ids: Ids, namespace: str) -> str:
    key = hashlib.blake2b(namespace.encode()).digest() if namespace else b""
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16, key=key).hexdigest()


def _shared(ids: Ids, other: Ids) -> int:
    """Return how many tokens two prompts begin with alike; 0 where one continues the other."""
    n = min(len(ids), len(other))
    different = np.flatnonzero(ids[:n] != other[:n])
    if different.size:
        return int(different[0])
    return n if len(ids) == len(other) else 0
