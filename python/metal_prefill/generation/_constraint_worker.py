"""Compile and match constraints in separate processes, so that a crash or a hang ends no other text.

llguidance recurses over rules, references and regular expressions, so a hostile source can overflow the
stack, and some grammars take exponential time to match despite llguidance's limits. The fork server prepares
a vocabulary once. Each constraint gets a fork of it, which compiles the constraint and holds the matchers of
its texts. Each request has a limit on processor time, after which a signal ends the process. This module
imports neither NumPy nor the engine, which would delay its start.
"""

import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Sequence
from itertools import takewhile
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from metal_prefill.generation._schema_rewriting import rewrite_schema

STACK = 4 << 20  # bytes
STEPS = 16  # tokens that are tried after compiling
MOST_SHOWN = 2000  # characters of an error
READY = b"ready"
SPELL = "spell"  # first element of an answer that requests the tokens of a string

# Bounds the time of a mask, during which all texts of a batch wait. With llguidance's default of 1,000,000
# the mask of `(a{1000}){1000}` takes 0.8 s and 166 MB, with this value 0.09 s and 32 MB.
_LIMITS = {"initial_lexer_fuel": 200_000}

# JSON in the style of models: one space after commas and colons, and no other white space. It forces more
# tokens, which need not be sampled.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class _Spelling:
    """A vocabulary in the form that llguidance reads."""

    def __init__(self, tokens: list[bytes], special_ids: list[int], stop_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.stop_ids = stop_ids
        self.eos_token_id = min(stop_ids, default=0)
        self.bos_token_id = None
        self.connection: Connection | None = None  # to the process that has the tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokenizer's tokens of a string."""
        if self.connection is None:  # TokenizerWrapper tests whether it accepts bytes
            return []
        self.connection.send_bytes(
            _answer([SPELL], text if isinstance(text, bytes) else text.encode("utf-8"))
        )
        ids: list[int] | None = pickle.loads(self.connection.recv_bytes())
        if ids is None:
            raise ValueError("the tokenizer cannot write the string")
        return ids


def _answer(header: Sequence[Any], content: bytes = b"") -> bytes:
    return json.dumps(header).encode() + b"\n" + content


def _prepare(spelling: Any) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(spelling), n_vocab=len(spelling.tokens), eos_token=spelling.stop_ids or None
    )


def _compile_source(vocabulary: Any, kind: str, source: str) -> Any:
    """Return llguidance's matcher of a constraint, which may contain an error; raises other errors."""
    from llguidance import LLMatcher, LLParserLimits

    if kind == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(rewrite_schema(source), defaults=_JSON_STYLE)
    elif kind == "regex":
        grammar = LLMatcher.grammar_from_regex(source)
    else:
        grammar = LLMatcher.grammar_from_lark(source)
    return LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def _follow(matcher: Any, mask: bytes) -> None:
    """Follow a constraint for some tokens; later errors are attributed to a text."""
    for step in range(STEPS):
        if matcher.is_stopped() or not (allowed := int.from_bytes(mask, "little")):
            break
        # Every other token is the first allowed one, the rest are from the middle of the vocabulary.
        above = allowed >> (step % 2 * 4 * len(mask)) << (step % 2 * 4 * len(mask))
        lowest = above or allowed
        matcher.consume_token((lowest & -lowest).bit_length() - 1)
        mask = matcher.compute_bitmask()


class _Texts:
    """A compiled constraint, and the matchers of the texts that it constrains."""

    def __init__(self, vocabulary: Any, stop_ids: list[int]) -> None:
        self._vocabulary = vocabulary
        self._stop_ids = stop_ids
        self._compiled: Any = None
        self._texts: dict[int, tuple[Any, list[int]]] = {}  # matchers, and the tokens that they have taken

    def compile(self, kind: str, source: str, memory: int, trial: bool) -> bytes:
        """Compile the constraint; answer with its error, if any, and the mask of the first token."""
        _limit_memory(memory)
        try:
            self._compiled = _compile_source(self._vocabulary, kind, source)
        except (TypeError, ValueError) as error:
            return _answer([str(error)[:MOST_SHOWN]])
        mask: bytes = self._compiled.compute_bitmask()
        if self._compiled.is_error():
            return _answer([str(self._compiled.get_error())[:MOST_SHOWN]])
        if trial:
            _follow(self._compiled.deep_copy(), mask)
        return _answer([""], mask)

    def _matcher(self, text: int, replayed: list[int] | None) -> tuple[Any, list[int]]:
        if replayed is not None:
            matcher = self._compiled.deep_copy()
            matcher.consume_tokens(replayed)
            self._texts[text] = matcher, replayed
        return self._texts[text]

    def advance(
        self, text: int, replayed: list[int] | None, tokens: list[int], most_forced: int, room: int
    ) -> bytes:
        """Take tokens, and those that must follow; see :meth:`Constraint.advance`."""
        matcher, taken = self._matcher(text, replayed)
        before = len(taken)
        forced: list[int] = []
        for token in tokens[:room]:
            if not _consume(matcher, taken, token):
                break
        room -= len(taken) - before
        if most_forced and room > 0 and not matcher.is_error() and not matcher.is_stopped():
            # End-of-text tokens are sampled, since a text's options may exclude them.
            found = matcher.compute_ff_tokens()
            forced = list(takewhile(lambda token: token not in self._stop_ids, found))
            for token in forced[: min(most_forced, room)] if not matcher.is_error() else ():
                room -= 1
                if not _consume(matcher, taken, token):
                    break
        mask = b""
        if room > 0 and not matcher.is_error() and not matcher.is_stopped():
            mask = matcher.compute_bitmask()
        error = matcher.get_error()[:MOST_SHOWN] if matcher.is_error() else ""
        complete = not error and matcher.is_stopped()
        met = complete or (not error and room <= 0 and matcher.is_accepting())
        return _answer([len(taken) - before, complete, forced, error, met], b"" if error else mask)

    def ahead(self, text: int, replayed: list[int] | None, drafts: list[int]) -> bytes:
        """Return the masks after drafts; see :meth:`Constraint.ahead`."""
        # Uses the matcher itself, not a copy, since it caches the work for a mask.
        matcher, taken = self._matcher(text, replayed)
        masks: list[bytes] = []
        consumed = 0
        for draft in drafts[: matcher.validate_tokens(drafts)]:
            matcher.consume_token(draft)
            consumed += 1
            if matcher.is_stopped():
                break
            mask = matcher.compute_bitmask()
            if matcher.is_error():  # such as excessive complexity, which is not an error of the text
                break
            masks.append(mask)
        if not matcher.rollback(consumed):
            self._matcher(text, taken)
        return _answer([len(masks)], b"".join(masks))

    def answer(self, requests: Connection) -> None:
        """Answer requests until there are no more."""
        while True:
            try:
                seconds, released, action, *arguments = pickle.loads(requests.recv_bytes())
            except EOFError:  # the requesting process has ended, or no longer needs this one
                return
            for text in released:
                self._texts.pop(text, None)
            if action is not None:
                signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process in any state
                answer: bytes = getattr(self, action)(*arguments)
                signal.setitimer(signal.ITIMER_PROF, 0)
                requests.send_bytes(answer)


def _consume(matcher: Any, taken: list[int], token: int) -> bool:
    """Take a token; return whether another one may follow."""
    matcher.consume_token(token)
    if matcher.is_error():
        return False
    taken.append(token)
    return not matcher.is_stopped()


def _limit_memory(memory: int) -> None:
    """Limit further memory of this process to these bytes; an allocation beyond that ends it."""
    if sys.platform != "linux":  # macOS accepts such limits and ignores them
        return
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[5]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + memory, most))


def _work(requests: Connection, spelling: _Spelling, vocabulary: Any) -> None:
    """Run as a fork: answer requests on a connection, then end."""
    status = 1
    try:
        spelling.connection = requests
        _Texts(vocabulary, spelling.stop_ids).answer(requests)
        status = 0
    finally:  # no caller handles an exception, such as MemoryError
        os._exit(status)


def _end(pid: int) -> int:
    """End a fork, if it has not ended, and return its exit status."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Run as the fork server: fork on request, until the connection on stdin ends."""
    control = Connection(os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, most))
    forks: set[int] = set()
    try:
        spelling = _Spelling(*pickle.loads(control.recv_bytes()))
        vocabulary = _prepare(spelling)
        control.send_bytes(READY)
        while True:
            forks_again, ended = pickle.loads(control.recv_bytes())
            results = [_end(pid) if pid in forks else -signal.SIGKILL for pid in ended]
            forks -= set(ended)
            if forks_again:
                requests = Connection(recv_handle(control))
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _work(requests, spelling, vocabulary)
                requests.close()
                forks.add(pid)
                results.append(pid)
            control.send_bytes(_answer(results))
    except (EOFError, OSError):  # the requesting process has ended
        for pid in forks:
            _end(pid)
