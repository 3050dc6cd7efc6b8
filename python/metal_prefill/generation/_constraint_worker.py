"""Compile constraints in a separate process, where a crash cannot end a text.

llguidance recurses over rules, references and regular expressions, so a hostile source can overflow the
stack, and no limit on depth that is checked beforehand can rule that out. A source that compiles here, with a
quarter of a thread's usual stack, also compiles in the process that asked. This file is run by its path and
imports nothing of the package, since NumPy and the engine would delay its start.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

STACK = 2 << 20  # bytes; threads of the process that asked have 8 MiB
STEPS = 16  # tokens that are tried after compiling
MOST_SHOWN = 2000  # characters of an error
READY = b"ready"
VOCABULARY = "vocabulary"  # a request that names no kind of source

# Bounds the time of a mask, during which all texts of a batch wait. With llguidance's default of 1,000,000
# the mask of `(a{1000}){1000}` takes 0.8 s and 166 MB, with this value 0.09 s and 32 MB.
_LIMITS = {"initial_lexer_fuel": 200_000}

# As models write JSON: one space after commas and colons, and no other white space. Tokens without an
# alternative need not be sampled.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Spelling:
    """A vocabulary in the form that llguidance reads."""

    def __init__(self, tokens: list[bytes], special_ids: list[int], stop_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.stop_ids = stop_ids
        self.eos_token_id = min(stop_ids, default=0)
        self.bos_token_id = None
        self.prepared: Any = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Write a string in the longest tokens, as no tokenizer is here that writes it otherwise."""
        if self.prepared is None:
            return []
        ids: list[int] = self.prepared.greedy_tokenize(text.decode() if isinstance(text, bytes) else text)
        return ids


def prepare(spelling: Any) -> Any:
    """Return llguidance's form of a vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(spelling), n_vocab=len(spelling.tokens), eos_token=spelling.stop_ids or None
    )


def compile_source(vocabulary: Any, kind: str, source: str) -> Any:
    """Return llguidance's matcher of a constraint; it may hold an error.

    Parameters
    ----------
    vocabulary
        Made by :func:`prepare`.
    kind
        ``json_schema``, ``regex`` or ``grammar``.
    source
        The schema as JSON, the regular expression, or the Lark grammar.

    Raises
    ------
    TypeError, ValueError
        The source cannot be read.
    """
    from llguidance import LLMatcher, LLParserLimits

    if kind == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(source, defaults=_JSON_STYLE)
    elif kind == "regex":
        grammar = LLMatcher.grammar_from_regex(source)
    else:
        grammar = LLMatcher.grammar_from_lark(source)
    return LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def _try_out(vocabulary: Any, kind: str, source: str) -> str:
    """Compile a source and follow it for some tokens; return llguidance's error, or nothing."""
    try:
        matcher = compile_source(vocabulary, kind, source)
    except (TypeError, ValueError) as error:
        return str(error)
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return str(matcher.get_error())
    for step in range(STEPS):
        if matcher.is_stopped() or not (allowed := int.from_bytes(mask, "little")):
            break
        # Every other token is the first that is allowed, the rest come from the middle of the vocabulary.
        above = allowed >> (step % 2 * 4 * len(mask)) << (step % 2 * 4 * len(mask))
        lowest = above or allowed
        matcher.consume_token((lowest & -lowest).bit_length() - 1)
        mask = matcher.compute_bitmask()
    return ""  # a later error is the text's


def _limit_memory(memory: int) -> None:
    """Allow this process so many bytes in addition to what it has; an allocation beyond that ends it."""
    if sys.platform != "linux":  # macOS accepts such limits and ignores them
        return
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[5]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + memory, most))


def _limited(vocabulary: Any, kind: str, source: str, cpu_seconds: float, memory: int) -> str:
    """Try out a source within the limits, beyond which this process ends."""
    answer: list[str] = []
    _limit_memory(memory)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF ends the process, whatever it is doing
    thread = threading.Thread(target=lambda: answer.append(_try_out(vocabulary, kind, source)))
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    if not answer:  # an exception of Python, such as MemoryError
        os.abort()
    return answer[0][:MOST_SHOWN]


def main() -> None:
    """Answer requests from stdin on stdout: pickled vocabularies, and sources to try out."""
    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    import llguidance  # noqa: F401  (here, so that READY means that it is there)

    answers.send_bytes(READY)
    vocabulary: Any = None
    while True:
        try:
            kind, content, *limits = pickle.loads(requests.recv_bytes())
        except EOFError:  # the process that asked has ended
            return
        if kind == VOCABULARY:
            spelling = Spelling(*content)
            vocabulary = spelling.prepared = prepare(spelling)
        else:
            answers.send_bytes(_limited(vocabulary, kind, content, *limits).encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
