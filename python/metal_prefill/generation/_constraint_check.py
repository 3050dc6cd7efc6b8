"""Check constraints before this process compiles them: size, depth, and a trial in a worker process."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from metal_prefill.errors import ConstraintError
from metal_prefill.generation import _constraint_worker
from metal_prefill.generation._constraint_worker import READY, VOCABULARY

MOST_CHARACTERS = 1 << 20  # of a source
# Rules or definitions in a chain, each naming the next. Compiling takes up to 9 KB of stack for each, so that
# 200 of them fit in the 2 MiB of a worker.
MOST_DEPTH = 128
CPU_SECONDS = 5.0  # of a worker for one source; large published schemas take less than one
MEMORY = 256 << 20  # bytes of a worker for one source; within llguidance's limits sources take up to 100 MB
MOST_WORKERS = 2  # at a time
# A worker that is this slow hangs for a reason other than its work, which ends it after CPU_SECONDS.
PATIENCE = 120.0

_TEXT = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*'
)  # of a grammar: strings, patterns, comments
_RULE = re.compile(r"^[ \t]*[?!]*([A-Za-z_]\w*)(?!\w)[^\n:]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")


def check_source(kind: str, source: str) -> None:
    """Refuse a source that is too large or too deep.

    Raises
    ------
    ConstraintError
        It names the limit.
    """
    if len(source) > MOST_CHARACTERS:
        raise ConstraintError(f"{kind}: {len(source):,} characters exceed the limit of {MOST_CHARACTERS:,}")
    if kind == "json_schema":
        graph, what = _definitions(source), "definitions"
        depth = _depth(graph, next(iter(graph), ""))
    elif kind == "grammar":
        depth, what = _depth(_rules(source), "start"), "rules"
    else:
        return
    if depth > MOST_DEPTH:
        raise ConstraintError(
            f"{kind}: a chain of {depth:,} {what}, each naming the next, exceeds the limit of {MOST_DEPTH}"
        )


def _rules(grammar: str) -> dict[str, list[str]]:
    """Return the names in each rule and terminal of a Lark grammar."""
    plain = _TEXT.sub(" ", grammar)
    heads = list(_RULE.finditer(plain))
    ends = [*(head.start() for head in heads[1:]), len(plain)]
    return {head[1]: _NAME.findall(plain, head.end(), end) for head, end in zip(heads, ends, strict=False)}


def _definitions(schema: str) -> dict[str, list[str]]:
    """Return the parts of a JSON schema that are referred to, each with those that it names or contains.

    The whole schema comes first.
    """
    try:
        whole = json.loads(schema)
    except (ValueError, RecursionError):  # llguidance reports it
        return {}
    resolved: dict[str, Any] = {}
    todo = [whole]
    while todo:
        part = todo.pop()
        if isinstance(reference := _reference(part), str) and reference not in resolved:
            resolved[reference] = _resolve(whole, reference)
        todo += _inner(part)
    referred_to = {id(whole)} | {id(part) for part in resolved.values() if isinstance(part, (dict, list))}
    graph: dict[str, list[str]] = {str(part): [] for part in (id(whole), *sorted(referred_to))}
    parts: list[tuple[Any, list[str]]] = [(whole, [])]  # each with what the part around it refers to
    while parts:
        part, outer = parts.pop()
        if id(part) in referred_to:
            outer.append(str(id(part)))
            outer = graph[str(id(part))]
        if isinstance(reference := _reference(part), str):
            outer.append(str(id(resolved[reference])))
        for name in _DEFINITIONS if isinstance(part, dict) else ():
            # Compiled only where they are referred to.
            parts += [(inner, []) for inner in _inner(part.get(name))]
        parts += [(inner, outer) for inner in _inner(part, besides=_DEFINITIONS)]
    return graph


_DEFINITIONS = ("$defs", "definitions")


def _inner(part: Any, besides: Collection[str] = ()) -> list[Any]:
    """Return the objects and arrays in one, but for members of some names."""
    if isinstance(part, dict):
        values = [value for name, value in part.items() if name not in besides]
    else:
        values = part if isinstance(part, list) else []
    return [value for value in values if isinstance(value, (dict, list))]


def _reference(part: Any) -> str | None:
    """Return the local reference that a part of a schema is, or None."""
    reference = part.get("$ref") if isinstance(part, dict) else None
    return reference if isinstance(reference, str) and reference.startswith("#") else None


def _resolve(whole: Any, reference: str) -> Any:
    """Return the part of a document that a JSON pointer names, or None."""
    at = whole
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict):
            at = at.get(step)
        elif isinstance(at, list) and step.isdecimal() and len(step) < 8 and int(step) < len(at):
            at = at[int(step)]
        else:
            return None
    return at


def _depth(graph: Mapping[str, list[str]], first: str) -> int:
    """Return the length of the longest chain of names in a depth-first search, which visits each name once.

    A compiler that recurses goes the same way. Where it does not, a worker finds what is too deep.
    """
    deepest, seen = 0, set[str]()
    for start in (first, *graph):
        path = [iter((start,))]
        while path:
            name = next(path[-1], None)
            if name is None:
                path.pop()
            elif name in graph and name not in seen:
                seen.add(name)
                path.append(iter(graph[name]))
                deepest = max(deepest, len(path) - 1)
    return deepest


class _Worker:
    """A process that tries constraints out, one at a time."""

    def __init__(self) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        program = (
            f"import runpy, sys; sys.path[:] = {path!r}; "
            f"runpy.run_path({str(Path(_constraint_worker.__file__))!r}, run_name='__main__')"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is not for it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._answers = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        self._vocabulary: object = None
        try:
            started = self._answer() == READY
        except (EOFError, TimeoutError):
            started = False
        except BaseException:
            self.close()
            raise
        if not started:
            raise ConstraintError(
                f"the process that checks constraints did not start: {sys.executable}, status {self.close()}"
            )

    def _answer(self) -> bytes:
        if not self._answers.poll(PATIENCE):
            raise TimeoutError
        return self._answers.recv_bytes()

    def try_out(self, spelling: Any, kind: str, source: str) -> str | None:
        """Return the error of a source, or nothing. None: the process ended or hangs."""
        try:
            if self._vocabulary is not spelling:
                content = (spelling.tokens, spelling.special_token_ids, spelling.stop_ids)
                self._requests.send_bytes(pickle.dumps((VOCABULARY, content)))
                self._vocabulary = spelling
            self._requests.send_bytes(pickle.dumps((kind, source, CPU_SECONDS, MEMORY)))
            return self._answer().decode()
        except (EOFError, OSError, TimeoutError):
            return None

    def close(self) -> int:
        """End the process, if it has not ended, and return its exit status."""
        self._requests.close()
        self._answers.close()
        try:
            return self._process.wait(0.1)  # its pipes may end before it does
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def forget(self) -> None:
        """Leave the process to the one that this process was forked from."""
        self._requests.close()
        self._answers.close()
        self._process.returncode = 0


class _Workers:
    """Workers that wait for the next source, and how many there are."""

    def __init__(self) -> None:
        self.idle: list[_Worker] = []
        self.room = threading.BoundedSemaphore(MOST_WORKERS)

    def close(self) -> None:
        """End those that wait."""
        while self.idle:
            self.idle.pop().close()

    def begin_in_child(self) -> None:
        """Start anew in a forked process."""
        for worker in self.idle:
            worker.forget()
        self.__init__()  # type: ignore[misc]


_workers = _Workers()
atexit.register(_workers.close)
os.register_at_fork(after_in_child=_workers.begin_in_child)


def try_out(spelling: Any, kind: str, source: str) -> str:
    """Compile a source in a worker process and follow it for some tokens.

    Parameters
    ----------
    spelling
        The vocabulary, as a :class:`metal_prefill.generation._constraint_worker.Spelling` has it.
    kind, source
        As :func:`metal_prefill.generation._constraint_worker.compile_source` takes them.

    Returns
    -------
    str
        llguidance's error, or nothing.

    Raises
    ------
    ConstraintError
        The source takes too much time, memory or depth, or the worker could not be started.
    """
    with _workers.room:
        worker = _workers.idle.pop() if _workers.idle else _Worker()
        error = None
        try:
            error = worker.try_out(spelling, kind, source)
        finally:  # after KeyboardInterrupt, too, its answer must not be read as that to the next source
            if error is not None:
                _workers.idle.append(worker)
            else:
                status = worker.close()
    if error is not None:
        return error
    if status == -signal.SIGPROF:
        raise ConstraintError(f"{kind}: compiling it takes more than {CPU_SECONDS:g} s of processor time")
    raise ConstraintError(
        f"{kind}: compiling it takes more than {MEMORY >> 20} MiB of memory, or recurses too deeply "
        f"(exit status {status})"
    )
