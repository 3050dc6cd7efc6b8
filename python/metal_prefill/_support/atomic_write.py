"""Atomic file replacement."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from metal_prefill._support.interruptions import deferred_interruptions
from metal_prefill.errors import OutputError

# Folders of files that are being written. Their names are short regardless of the length of the file name.
_PREFIX, _SUFFIX = ".metal_prefill-", ".tmp"

_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return the path of the regular file, existing or not, that `path` names, following links.

    Raises OutputError if `path` is a special file, which writing would replace with a regular file, or names
    an open file, such as ``/dev/stdout``; IsADirectoryError if it is a directory; FileNotFoundError if its
    folder does not exist.
    """
    step = os.path.abspath(path)
    for _ in range(40):  # the limit of Linux
        folder = os.path.realpath(os.path.dirname(step))
        if folder.startswith(("/proc/", "/dev/fd")):
            raise OutputError(errno.EINVAL, "names an open file", os.fspath(path))
        if not os.path.islink(step):
            break
        step = os.path.join(folder, os.readlink(step))
    target = Path(os.path.realpath(path))
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path)) from None
        return target
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
        raise OutputError(errno.EINVAL, f"is {kind}; name a regular file", os.fspath(path))
    return target


@contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name a file in errors of writing it, such as a full disk, which name none."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new file that replaces `path` atomically, or is deleted if the block fails.

    The file is empty and has the name of `path`, in a temporary folder next to it. It takes over the
    permissions of the file that it replaces. Temporary folders left by killed processes are removed.

    Raises the errors of `check_target`, and OSError if the folder is not writable, before the block runs.
    """
    target = check_target(path)
    with deferred_interruptions():
        _remove_abandoned(target.parent)
    scratch = _Scratch()
    try:
        try:
            with deferred_interruptions():
                scratch.open_in(target.parent)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
        temporary = scratch.folder / target.name
        with open(temporary, "xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(os.stat(target).st_mode)
        with named(path):
            yield temporary
            os.chmod(temporary, mode)  # the block may have replaced the file
            with open(temporary, "rb+" if mode & stat.S_IWUSR else "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
    finally:
        try:
            scratch.discard()
        finally:  # Ctrl-C may come before the first call defers it
            scratch.discard()
    with deferred_interruptions():  # the rename must also survive a power failure
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class _Scratch:
    """A temporary folder that is locked until it is discarded."""

    folder: Path

    def __init__(self) -> None:
        self._lock: int | None = None

    def open_in(self, parent: Path) -> None:
        while True:
            self.folder = parent / f"{_PREFIX}{os.urandom(8).hex()}{_SUFFIX}"
            self.folder.mkdir(mode=0o700)
            self._lock = _lock(self.folder, wait=True)
            if self.folder.is_dir():  # otherwise another process has removed it as abandoned
                return
            self.discard()

    def discard(self) -> None:
        with deferred_interruptions():
            if hasattr(self, "folder"):
                _remove(self.folder)
            lock, self._lock = self._lock, None
            if lock is not None:
                os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """Remove unlocked folders, left by processes that ended while writing."""
    for folder in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and (lock := _lock(folder, wait=False)) is not None:
                _remove(folder)
                os.close(lock)


def _remove(folder: Path) -> None:
    import shutil  # imports bz2 and lzma

    shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Lock a folder; return None if another process has locked it, or locks are not supported."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(BlockingIOError):
        if lock(descriptor, wait=wait):
            return descriptor
    os.close(descriptor)
    return None


def lock(file: int | IO[Any], *, wait: bool) -> bool:
    """Lock an open file until it is closed; return False if locks are not supported.

    Raises BlockingIOError if another process has locked it, unless `wait`.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:  # some network file systems
        return False
    return True
