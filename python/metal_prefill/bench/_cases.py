"""The tests of a benchmark: prompts of some lengths, decoding, and both for many sequences together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

DECODE_DEPTH = 32  # tokens in the context before decoding is timed
SHORT_PROMPT = 16  # tokens of each prompt where many are processed together
SHORT_PROMPTS = 64  # how many they are
TEXTS = 64  # texts to embed, of these lengths
SHORTEST_TEXT, LONGEST_TEXT = 8, 512
DOCUMENTS, DOCUMENT_TOKENS = 20, 300  # to rank
# What Qwen3-Reranker's form has before a document, with a query of some 15 tokens, and after it.
QUERY_TOKENS, CLOSING_TOKENS = 90, 9
QUESTIONS, ANSWERS = 4, 4  # of an evaluation, and for each
MOST_GUESSES = 31  # of a pass: positions that engines may want after the last token

# How an engine chooses tokens: the most probable ones; as SAMPLING says, after the same context; the most
# probable ones of a task of copying; these, with guesses looked up in the text so far.
Choice = Literal["", "argmax", "sampled", "greedy", "lookup"]
# Tests that are compared with another one of the same engine, so that their samples are taken in turns.
COMPARED: dict[Choice, Choice] = {"sampled": "argmax", "lookup": "greedy"}
# Names of tests that are not called as the choice.
_NAMES: dict[Choice, str] = {"argmax": "greedy", "greedy": "copy"}
# What is done with texts: their vectors; how well documents answer a query, by a model's "yes" and "no";
# how likely answers are after questions.
Task = Literal["", "embed", "rerank", "evaluate"]
# What has to do with a test, where an engine can do some of them only.
Ability = Literal["prompts", "streams", "choices", "embed", "rerank", "evaluate"]
SAMPLING: dict[str, float] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "repeat_penalty": 1.1,
    "seed": 1,
}
# Asked for where tokens are guessed at: from Walden, by Henry David Thoreau.
COPIED = (
    "I went to the woods because I wished to live deliberately, to front only the essential facts of life, "
    "and see if I could not learn what it had to teach, and not, when I came to die, discover that I had not "
    "lived. I did not wish to live what was not life, living is so dear; nor did I wish to practise "
    "resignation, unless it was quite necessary."
)
TASK = f"Copy this text word by word:\n\n{COPIED}"


@dataclass(frozen=True)
class Case:
    """One test, named as llama-bench names it: ``pp512`` or ``tg64``; ``tg64x8`` is 8 streams together.

    Attributes
    ----------
    n_prompt : int
        Tokens of the timed prompt, from an empty context; 0 in a decode test. Of each stream, if there are
        several, as are `n_gen` and `n_depth`.
    n_gen : int
        Tokens that are timed one by one; 0 in a prompt test.
    n_depth : int
        Tokens in the context before the clock starts.
    n_streams : int
        Sequences that go through the model together, each with a context of its own; 0: one sequence, by the
        calls for one.
    n_texts : int
        Texts of a task; 0 in other tests. `text_lengths` has those of texts to embed.
    task : str
        What is done with the texts. With "evaluate", `n_prompt` is the number of tokens of all of them.
    choice : str
        How an engine chooses the tokens that are timed; empty where they are given. With "greedy" and
        "lookup", the context is `TASK`.
    """

    n_prompt: int
    n_gen: int
    n_depth: int
    n_streams: int = 0
    n_texts: int = 0
    choice: Choice = ""
    task: Task = ""

    @property
    def name(self) -> str:
        """``pp<n>`` for a prompt, ``tg<n>`` for decoding, ``x<streams>`` after it for several together.

        ``embed<n>``, ``rerank<n>`` and ``evaluate<n>`` for a task with n texts; ``greedy<n>``,
        ``sampled<n>``, ``copy<n>`` and, with guesses, ``lookup<n>`` for tokens that the engine chooses.
        """
        if self.task:
            return f"{self.task}{self.n_texts}"
        if self.choice:
            return f"{_NAMES.get(self.choice, self.choice)}{self.n_gen}"
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name}x{self.n_streams}" if self.n_streams else name

    @property
    def timed_tokens(self) -> int:
        """Tokens that go through the model while the clock runs, those of all streams.

        Those of all texts of a task, also where an engine computes what texts share once.
        """
        if self.task == "embed":
            return sum(text_lengths(self.n_texts))
        if self.task == "rerank":
            return self.n_texts * (QUERY_TOKENS + DOCUMENT_TOKENS + CLOSING_TOKENS)
        return (self.n_prompt + self.n_gen) * (self.n_streams or 1)

    @property
    def context(self) -> int:
        """Positions that the test needs, in each stream."""
        if self.task:
            return LONGEST_TEXT
        return self.n_depth + self.n_prompt + self.n_gen + (MOST_GUESSES if self.choice == "lookup" else 0)

    @property
    def ability(self) -> Ability:
        """Return what an engine must be able to do."""
        if self.task:
            return self.task
        if self.choice:
            return "choices"
        return "streams" if self.n_streams else "prompts"


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
    of `TASK`, one of copying without guesses and one with them.

    Raises
    ------
    ValueError
        A length is below 1, named twice, or there is nothing to measure.
    """
    lengths = list(prompts)
    if any(n < 1 for n in lengths):
        raise ValueError(f"a prompt has at least 1 token, got {min(lengths)}")
    if len(set(lengths)) != len(lengths):
        raise ValueError(f"a prompt length is named twice: {','.join(map(str, lengths))}")
    if n_gen < 0 or depth < 1:
        raise ValueError(f"decoding takes n_gen >= 0 and a depth >= 1, got {n_gen} and {depth}")
    cases = [Case(n, 0, 0) for n in lengths]
    if n_gen:
        cases.append(Case(0, n_gen, depth))
    counts = list(streams)
    if any(n < 1 for n in counts) or len(set(counts)) != len(counts):
        raise ValueError(f"numbers of streams are at least 1 and differ, got {','.join(map(str, counts))}")
    if counts and not n_gen:
        raise ValueError("streams decode tokens, of which there are none: n_gen is 0")
    if (sampled or task) and not n_gen:
        raise ValueError("there are no tokens to choose: n_gen is 0")
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


def make_tasks(embed: bool, rerank: bool, evaluated: int) -> list[Case]:
    """Return a test for each task with texts; `evaluated` is the tokens of `evaluation_texts`, or 0."""
    tasks = [Case(0, 0, 0, n_texts=TEXTS, task="embed")] if embed else []
    if rerank:
        tasks.append(Case(0, 0, 0, n_texts=DOCUMENTS, task="rerank"))
    if evaluated:
        tasks.append(Case(evaluated, 0, 0, n_texts=QUESTIONS * ANSWERS, task="evaluate"))
    return tasks


def in_turns(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the tests in groups, those together whose speeds are compared with each other."""
    groups: list[list[Case]] = []
    for case in cases:
        if groups and case.choice and COMPARED.get(case.choice) == groups[-1][-1].choice:
            groups[-1].append(case)
        else:
            groups.append([case])
    return groups


def text_lengths(count: int) -> list[int]:
    """Return lengths of texts in tokens, spread evenly on a logarithmic scale, in no order."""
    lengths = np.geomspace(SHORTEST_TEXT, LONGEST_TEXT, count).astype(int)
    return [int(n) for n in np.random.default_rng(seed=64).permutation(lengths)]


def text_ids(case: Case, vocab_size: int) -> list[npt.NDArray[np.int32]]:
    """Return the ids of the texts that every engine gets."""
    lengths = text_lengths(case.n_texts)
    ends = np.cumsum(lengths)
    return np.split(token_ids(int(ends[-1]), vocab_size), ends[:-1])


def ranking_ids(case: Case, vocab_size: int) -> list[npt.NDArray[np.int32]]:
    """Return the ids of prompts that ask of documents one by one whether they answer the same query."""
    ids = token_ids(QUERY_TOKENS + case.n_texts * DOCUMENT_TOKENS + CLOSING_TOKENS, vocab_size)
    query, documents, closing = np.split(ids, [QUERY_TOKENS, len(ids) - CLOSING_TOKENS])
    return [np.concatenate([query, d, closing]) for d in documents.reshape(case.n_texts, DOCUMENT_TOKENS)]


def evaluation_texts() -> list[tuple[str, str]]:
    """Return questions of some 35 tokens, each as often as it has answers, and an answer after it.

    Words are drawn from `COPIED`: how fast likelihoods are computed does not depend on them.
    """
    words, rng = np.array(COPIED.split()), np.random.default_rng(seed=4)

    def draw(count: int) -> str:
        return " ".join(rng.choice(words, count).tolist())

    questions = [f"Question: {draw(18)}?\nAnswer:" for _ in range(QUESTIONS)]
    return [(question, f" {draw(3)}") for question in questions for _ in range(ANSWERS)]


def token_ids(count: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return the ids that every engine gets, ``[count]``; a longer prompt begins with the shorter ones."""
    rng = np.random.default_rng(seed=135)
    return rng.integers(0, vocab_size, size=count, dtype=np.int32)


def stream_ids(case: Case, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return the ids that every engine gets for the streams of a test, ``[n_streams, context]``."""
    return token_ids(case.n_streams * case.context, vocab_size).reshape(case.n_streams, case.context)
