"""Files that are whole or not there."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from metal_prefill.errors import OutputError

if os.name == "posix":
    import fcntl

# Folders of files that are being written. Their names are short however long the file's own is.
_PREFIX, _SUFFIX = ".metal_prefill-", ".tmp"

_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return the regular file, existing or not, that `path` names; links are followed.

    Raises
    ------
    OutputError
        Something else is there, which a regular file would take the place of, or `path` stands for an open
        file such as ``/dev/stdout``.
    IsADirectoryError
        A directory is there.
    FileNotFoundError
        The folder does not exist.
    """
    step = os.path.abspath(path)
    for _ in range(40):  # as many links as Linux follows
        folder = os.path.realpath(os.path.dirname(step))
        if folder.startswith(("/proc/", "/dev/fd")):
            raise OutputError(errno.EINVAL, "stands for an open file", os.fspath(path))
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
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise OutputError(errno.EINVAL, f"is {kind}; only regular files are written", os.fspath(path))
    return target


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a new file that takes the place of `path` in one step, or vanishes when the block fails.

    The file is empty and has the name of `path`, in a folder of its own next to it. A file that is replaced
    hands on its permissions. Files that killed processes left here are removed.

    Raises
    ------
    OutputError, OSError
        As `check_target`, before the block runs; or the folder cannot be written.
    """
    target = check_target(path)
    _remove_abandoned(target.parent)
    try:
        folder, lock = _locked_folder(target.parent)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    try:
        temporary = folder / target.name
        with open(temporary, "xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(os.stat(target).st_mode)
        yield temporary
        os.chmod(temporary, mode)  # the block may have put another file there
        with open(temporary, "rb+" if mode & stat.S_IWUSR else "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    if os.name == "posix":  # the new name, too, must survive a power cut
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _locked_folder(parent: Path) -> tuple[Path, int | None]:
    """Make a folder, locked for as long as the descriptor is open."""
    while True:
        folder = parent / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        folder.mkdir(mode=0o700)
        lock = _lock(folder, wait=True)
        if folder.is_dir():  # else another process came between and took it for abandoned
            return folder, lock
        if lock is not None:
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that ended while they wrote: nobody locks them any more."""
    if os.name != "posix":
        return
    for folder in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and (lock := _lock(folder, wait=False)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Lock a folder; None where another process has, or where the file system knows no locks."""
    if os.name != "posix":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
