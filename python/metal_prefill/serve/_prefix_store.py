"""Shared prompt prefixes on disk: after a restart, a known system message is loaded rather than computed.

A prefix that two prompts of a namespace share is saved as a session file, as is the last prompt of each
conversation when the server closes. A file is named by its number of tokens and a hash of the tokens and the
namespace. The server therefore reads only file names when it starts, and a prompt finds its stored prefixes
by hashing its own; names differ between namespaces. Each model and cache dtype has its own folder. Damaged
files are removed.
"""

import hashlib
import logging
import os
import re
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.engine import Engine
from metal_prefill.errors import MetalPrefillError, StateError
from metal_prefill.storage import _session_file
from metal_prefill.storage._cache_folder import beyond_limit

Ids = npt.NDArray[np.int32]

PAGE = 64  # tokens; prefixes end after a whole page or a turn, so that similar prompts have the same ones
RECENT_PROMPTS = 64  # of all namespaces, with which later prompts are compared
MOST_PENDING = 4  # prefixes queued for writing; further ones are skipped, and saved with a later prompt
_log = logging.getLogger("metal_prefill")
_NAME = re.compile(r"(\d+)-([0-9a-f]{32})\.session")


class _Prompt(NamedTuple):
    """A recent prompt, and whether it continues an earlier one."""

    ids: Ids
    continues: bool


class PrefixStore:
    """Store of shared prompt prefixes as session files.

    Thread-safe.
    """

    def __init__(
        self,
        engine: Engine,  # engine that computes the prompts
        # Folder of the files, created if missing with access for this user only: anyone with write access to
        # it can replace K and V.
        folder: str | os.PathLike[str],
        limit: int,  # maximum total size in bytes of the model's files; the least recently used are removed
    ) -> None:
        self._engine = engine
        self._folder = Path(folder) / f"{engine.state_owner.fingerprint}-{engine.kv_dtype}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._limit = limit
        self._lock = threading.Lock()  # guards the members below
        self._names: dict[int, set[str]] = {}  # hashes by number of tokens
        self._recent: dict[str, deque[_Prompt]] = {}  # by namespace, the one that was used last at the end
        self._pending = 0
        self._loading = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="metal_prefill prefix store")
        for path in self._folder.iterdir():
            if found := _NAME.fullmatch(path.name):
                self._names.setdefault(int(found[1]), set()).add(found[2])

    def load(self, ids: Ids, namespace: str = "") -> None:
        """Load the longest stored prefix of a prompt in its namespace, unless the cache holds as much."""
        with self._lock:
            lengths = sorted((n for n in self._names if n < len(ids)), reverse=True)
        for n in lengths:
            digest = _digest(ids[:n], namespace)
            with self._lock:
                known = digest in self._names.get(n, ())
            if known and self._load(ids[: n + 1], n, digest, namespace):
                return

    def note(self, ids: Ids, namespace: str = "") -> None:
        """Save the prefix that a finished prompt shares with an earlier one of its namespace.

        The store's own thread writes the file. A prompt that continues an earlier one, as in a conversation,
        takes its place: no other prompt would use the part that they share before the server closes.
        """
        shared, continues, kept = 0, False, deque[_Prompt]()
        with self._lock:
            for other in self._recent.pop(namespace, ()):
                n = _core.common_prefix(ids, other.ids)
                if n < min(len(ids), len(other.ids)) or len(ids) == len(other.ids):
                    shared = max(shared, n)
                if n == len(other.ids):
                    continues |= other.continues or n < len(ids)
                else:
                    kept.append(other)
            self._recent[namespace] = kept
            kept.append(_Prompt(ids, continues))
            self._drop_recent()
            if self._pending < MOST_PENDING:
                self._submit(ids, shared, namespace)

    def _submit(self, ids: Ids, most: int, namespace: str) -> None:
        """Save at most `most` tokens of a prompt, in the store's own thread, unless they are stored."""
        most = min(most, len(ids) - 1)
        n = max([most // PAGE * PAGE, *self._engine.tokenizer.turn_ends(ids[:most])[-1:]])
        digest = _digest(ids[:n], namespace)
        if n >= PAGE and digest not in self._names.get(n, ()):
            self._pending += 1
            self._writer.submit(self._save, ids[: n + 1], n, digest, namespace)

    def _drop_recent(self) -> None:
        """Drop the oldest prompt of the namespace with the most, so that none displaces prompts of others."""
        if sum(map(len, self._recent.values())) > RECENT_PROMPTS:
            namespace = max(self._recent, key=lambda space: len(self._recent[space]))
            self._recent[namespace].popleft()
            if not self._recent[namespace]:
                del self._recent[namespace]

    def close(self) -> None:
        """Save the last prompts of conversations, and wait for pending writes."""
        with self._lock:
            for namespace, recent in self._recent.items():
                for ids, continues in recent:
                    if continues:
                        self._submit(ids, len(ids), namespace)
        self._writer.shutdown()

    def _path(self, n: int, digest: str) -> Path:
        return self._folder / f"{n}-{digest}.session"

    def _load(self, ids: Ids, n: int, digest: str, namespace: str) -> bool:
        """Load a stored prefix, ``ids[:n]``, into the model's cache; return False if the file is unusable."""
        path = self._path(n, digest)
        with self._loading:  # one of several prompts with the same prefix loads it
            try:
                if self._engine.session(prefix_namespace=namespace).reuse(ids) >= n:
                    return True
                session = self._engine.session(prefix_namespace=namespace)
                loaded = _session_file.load(session, path, self._engine.state_owner)
                if loaded.tokens.tolist() != ids[:n].tolist():
                    raise StateError(f"{path}: its tokens are not those of its name")
                session.reuse(ids)  # makes it available to other sessions
                os.utime(path)
                return True
            except (StateError, FileNotFoundError) as error:
                _log.warning("dropped an unusable stored prefix: %s", error)
                self._remove(path)
            except (MetalPrefillError, OSError) as error:
                _log.warning("could not load a stored prefix: %s", error)
        return False

    def _save(self, ids: Ids, n: int, digest: str, namespace: str) -> None:
        try:
            session = self._engine.session(prefix_namespace=namespace)
            if session.reuse(ids) < n:
                return  # it was evicted from the cache
            session.rewind(n)
            _session_file.save(session, self._path(n, digest), self._engine.state_owner)
            with self._lock:
                self._names.setdefault(n, set()).add(digest)
            self._remove_oldest()
        except (MetalPrefillError, OSError) as error:
            _log.warning("could not store a prefix: %s", error)
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
