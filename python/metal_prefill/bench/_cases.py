"""Benchmark tests: prompts of several lengths, decoding, and both for batches of sequences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

DECODE_DEPTH = 32  # tokens in the context before decoding is timed
SHORT_PROMPT = 16  # tokens of each prompt of a batch
SHORT_PROMPTS = 64  # prompts of a batch
TEXTS = 64  # texts to embed, of these lengths
SHORTEST_TEXT, LONGEST_TEXT = 8, 512
SAMPLE_TOKENS = 2048  # texts of one length: calls are repeated up to this number of tokens per sample
MOST_DRAFTS = 31  # drafts of a pass: positions that engines may use after the last token

# How an engine chooses tokens: greedily; by SAMPLING, after the same context; greedily in a copying task; the
# same with prompt-lookup drafts.
Choice = Literal["", "argmax", "sampled", "greedy", "lookup"]
# Tests that are compared with another test of the same engine, so that their samples alternate.
COMPARED: dict[Choice, Choice] = {"sampled": "argmax", "lookup": "greedy"}
# Names of tests that differ from the choice.
_NAMES: dict[Choice, str] = {"argmax": "greedy", "greedy": "copy"}
# Abilities that tests require; an engine may support only some.
Ability = Literal["prompts", "streams", "choices", "embed"]
SAMPLING: dict[str, float] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "repeat_penalty": 1.1,
    "seed": 1,
}
# The text to copy in tests of speculative decoding: from Walden, by Henry David Thoreau.
COPIED = (
    "I went to the woods because I wished to live deliberately, to front only the essential facts of life, "
    "and see if I could not learn what it had to teach, and not, when I came to die, discover that I had not "
    "lived. I did not wish to live what was not life, living is so dear; nor did I wish to practise "
    "resignation, unless it was quite necessary."
)
TASK = f"Copy this text word by word:\n\n{COPIED}"


@dataclass(frozen=True)
class Case:
    """Benchmark test, named as in llama-bench: ``pp512`` or ``tg64``; ``tg64x8`` is a batch of 8 streams."""

    # Number of tokens of the timed prompt, from an empty context; 0 in a decode test. `n_prompt`, `n_gen` and
    # `n_depth` are per stream.
    n_prompt: int
    n_gen: int  # number of tokens that are timed one by one; 0 in a prompt test
    n_depth: int  # number of tokens in the context before timing starts
    # Number of sequences in a batch, each with its own context; 0 for one sequence without batching.
    n_streams: int = 0
    n_texts: int = 0  # number of texts to embed; 0 in other tests
    # Choice of the timed tokens; empty if they are given. For "greedy" and "lookup", the context is `TASK`.
    choice: Choice = ""
    # Length of each text to embed; 0 selects the many lengths of `text_lengths`.
    text_tokens: int = 0

    @property
    def name(self) -> str:
        """Name of the test; docs/benchmarking.md explains the names."""
        if self.text_tokens:
            return f"embed{self.text_tokens}x{self.n_texts}"
        if self.n_texts:
            return f"embed{self.n_texts}"
        if self.choice:
            return f"{_NAMES.get(self.choice, self.choice)}{self.n_gen}"
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name}x{self.n_streams}" if self.n_streams else name

    @property
    def calls(self) -> int:
        """Number of calls per sample: a single short text takes too little time to be timed."""
        return max(1, SAMPLE_TOKENS // (self.text_tokens * self.n_texts)) if self.text_tokens else 1

    @property
    def timed_tokens(self) -> int:
        """Number of tokens processed while timed, of all streams."""
        if self.text_tokens:
            return self.calls * self.n_texts * self.text_tokens
        if self.n_texts:
            return sum(text_lengths(self.n_texts))
        return (self.n_prompt + self.n_gen) * (self.n_streams or 1)

    @property
    def context(self) -> int:
        """Number of positions that the test needs in each stream."""
        if self.n_texts:
            return self.text_tokens or LONGEST_TEXT
        return self.n_depth + self.n_prompt + self.n_gen + (MOST_DRAFTS if self.choice == "lookup" else 0)

    @property
    def ability(self) -> Ability:
        """Ability that the test requires of an engine."""
        if self.n_texts:
            return "embed"
        if self.choice:
            return "choices"
        return "streams" if self.n_streams else "prompts"


def distinct(what: str, numbers: Iterable[int]) -> list[int]:
    """Return the numbers; raise ValueError if some are equal or below 1."""
    listed = list(numbers)
    if min(listed, default=1) < 1 or len(set(listed)) < len(listed):
        raise ValueError(f"{what} are at least 1 and differ, got {','.join(map(str, listed))}")
    return listed


def make_cases(
    prompts: Iterable[int],
    n_gen: int,
    depth: int = DECODE_DEPTH,
    streams: Iterable[int] = (),
    sampled: bool = False,
    task: int = 0,
) -> list[Case]:
    """Return a test for each prompt length and, unless `n_gen` is 0, one for decoding.

    With `streams` there is also one of decoding for each number of streams, and one of many short prompts.
    With `sampled` there is one of greedy choices and one of sampling, and with `task`, the number of tokens
    of `TASK`, one of copying without drafts and one with them.
    """
    lengths, counts = distinct("prompt lengths", prompts), distinct("numbers of streams", streams)
    if n_gen < 0 or depth < 1:
        raise ValueError(f"decoding takes n_gen >= 0 and a depth >= 1, got {n_gen} and {depth}")
    cases = [Case(n, 0, 0) for n in lengths]
    if n_gen:
        cases.append(Case(0, n_gen, depth))
    if counts and not n_gen:
        raise ValueError("streams decode tokens, of which there are none: n_gen=0")
    if (sampled or task) and not n_gen:
        raise ValueError("there are no tokens to choose: n_gen=0")
    if sampled:
        greedy = Case(0, n_gen, depth, choice="argmax")
        cases += [greedy, replace(greedy, choice="sampled")]
    if task:
        without = Case(0, n_gen, task - 1, choice="greedy")
        cases += [without, replace(without, choice="lookup")]
    cases += [Case(0, n_gen, depth, n) for n in counts]
    if counts:
        cases.append(Case(SHORT_PROMPT, 0, 0, SHORT_PROMPTS))
    if not cases:
        raise ValueError("there is nothing to measure: no prompt length and no token to decode")
    return cases


def make_embeddings(text_tokens: Iterable[int] = (), text_counts: Iterable[int] = ()) -> list[Case]:
    """Return the tests of embedding: one of texts of many lengths.

    With `text_tokens` there is one for each of these lengths and each number of texts instead.
    """
    lengths, counts = distinct("text lengths", text_tokens), distinct("numbers of texts", text_counts)
    if counts and not lengths:
        raise ValueError("numbers of texts are measured for texts of some length, of which there is none")
    sizes = [(n, count) for count in counts or (TEXTS,) for n in lengths] or [(0, TEXTS)]
    return [Case(0, 0, 0, n_texts=count, text_tokens=n) for n, count in sizes]


def in_turns(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the tests in groups whose speeds are compared with each other."""
    groups: list[list[Case]] = []
    for case in cases:
        if groups and case.choice and COMPARED.get(case.choice) == groups[-1][-1].choice:
            groups[-1].append(case)
        else:
            groups.append([case])
    return groups


def text_lengths(count: int) -> list[int]:
    """Return lengths of texts in tokens, evenly spaced on a logarithmic scale and shuffled."""
    lengths = np.geomspace(SHORTEST_TEXT, LONGEST_TEXT, count).astype(int)
    return [int(n) for n in np.random.default_rng(seed=64).permutation(lengths)]


def text_ids(case: Case, vocab_size: int) -> list[npt.NDArray[np.int32]]:
    """Return the ids of the texts, the same for every engine."""
    lengths = [case.text_tokens] * case.n_texts if case.text_tokens else text_lengths(case.n_texts)
    ends = np.cumsum(lengths)
    return np.split(token_ids(int(ends[-1]), vocab_size), ends[:-1])


def token_ids(count: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return prompt ids ``[count]``, equal for all engines; shorter prompts are prefixes of longer ones."""
    rng = np.random.default_rng(seed=135)
    return rng.integers(0, vocab_size, size=count, dtype=np.int32)


def stream_ids(case: Case, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return the ids of the streams of a test, ``[n_streams, context]``, the same for every engine."""
    return token_ids(case.n_streams * case.context, vocab_size).reshape(case.n_streams, case.context)
