"""Measure the savings of drafts and forced tokens, in interleaved pairs, in CPU time and wall time.

Each text is generated twice, with and without, in alternating order, from a prompt that is already computed.
The texts must be equal. Prints a line for each kind of task: median and range of several rounds::

    python tools/measure/measure_texts.py smollm2 --threads 2
    python tools/measure/measure_texts.py smollm2 --threads 2 -r 5 --only record
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from metal_prefill import Model

# From A Tale of Two Cities, Pride and Prejudice, Moby-Dick, Alice's Adventures in Wonderland and Walden.
PASSAGES = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of"
    " foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of "
    "Light, it was the season of Darkness, it was the spring of hope, it was the winter of despair.",
    "However little known the feelings or views of such a man may be on his first entering a "
    'neighbourhood, this truth is so well fixed in the minds of the surrounding families. "My dear '
    'Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at '
    'last?" Mr. Bennet replied that he had not.',
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my "
    "purse, and nothing particular to interest me on shore, I thought I would sail about a little and"
    " see the watery part of the world.",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having "
    'nothing to do: once or twice she had peeped into the book her sister was reading. "And what is '
    'the use of a book," thought Alice, "without pictures or conversations?"',
    "I went to the woods because I wished to live deliberately, to front only the essential facts of "
    "life, and see if I could not learn what it had to teach, and not, when I came to die, discover "
    "that I had not lived.",
)
CODE = """def mean_{0}(items):
    total = 0
    count = 0
    for item in items:
        if item.{0} is None:
            continue
        total += item.{0}
        count += 1
    return total / count
"""
TOPICS = (
    "a lighthouse keeper", "the sea", "why leaves are green", "a journey by train", "bread", "the moon",
    "a lost dog", "how bridges stand", "winter", "a market", "music", "an old clock", "rivers", "stars",
    "the first day at school", "a letter", "gardens", "the wind", "a chess game", "mountains",
)  # fmt: skip
FIELDS = ("identifier", "first_name", "last_name", "date_of_birth", "email_address", "phone_number",
          "street_address", "postal_code", "country_code", "favourite_colour", "number_of_children",
          "is_active")  # fmt: skip
VALUES: dict[str, Any] = {
    "number_of_children": {"type": "integer", "minimum": 0, "maximum": 9},
    "is_active": {"type": "boolean"},
    "date_of_birth": {"type": "string", "pattern": r"^19\d\d-\d\d-\d\d$"},
}
RECORD = {
    "type": "object",
    "properties": {name: VALUES.get(name, {"type": "string", "maxLength": 12}) for name in FIELDS},
    "required": list(FIELDS),
    "additionalProperties": False,
}

PEOPLE = ("Alice Johnson", "Robert Miller", "Maria Garcia", "John Smith", "Emily Clark")
RECORDS = [
    json.dumps(dict(zip(FIELDS, [
        f"A-{1040 + i}", *name.split(), f"19{60 + i}-0{i + 1}-17", f"p{i}@ex.org", f"555-01{i}7",
        f"{i + 3} Elm St", f"9{i}210", "US", "green", i, i % 2 == 0,
    ], strict=True)))
    for i, name in enumerate(PEOPLE)
]  # fmt: skip


@dataclass
class Sum:
    """CPU time and wall time in seconds."""

    processor: float = 0.0
    clock: float = 0.0


@dataclass(frozen=True)
class Task:
    """Prompts, and two sets of options that must generate the same texts.

    Attributes
    ----------
    name : str
    prompts : list of list of int
    tokens : int
        At most, of a text.
    fast, slow : dict
        Options of `Session.stream`.
    """

    name: str
    prompts: list[list[int]]
    tokens: int
    fast: dict[str, Any]
    slow: dict[str, Any]


def copying_tasks(model: Model) -> list[list[int]]:
    """Rewrite with a change, extract, continue a table, repeat code with an edit: five of each."""
    tasks = []
    for i, passage in enumerate(PASSAGES):
        tasks.append(_asked(model, f"Repeat this text, with every 'was' written as 'is':\n\n{passage}"))
        tasks.append(_asked(model, f"Copy the first two sentences of this text word by word:\n\n{passage}"))
        rows = "".join(f"| {n} | station {n} | {'open' if n % 3 else 'closed'} |\n" for n in range(1, 9 + i))
        tasks.append(model.tokenizer.encode(f"| number | name | state |\n| --- | --- | --- |\n{rows}"))
        code = "".join(CODE.format(name) for name in ("price", "weight", "size", "age", "cost")[: 2 + i % 2])
        tasks.append(_asked(model, f"Repeat this code, with 'total' renamed to 'result':\n\n{code}"))
    return tasks


def _asked(model: Model, text: str) -> list[int]:
    return model.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def timed(model: Model, ids: list[int], n: int, spent: Sum, **options: Any) -> list[int]:
    """Generate a text after a computed prompt, and add its time."""
    with model.session() as session:
        session.forward_prompt(ids)
        start = time.process_time(), time.perf_counter()
        tokens = [piece.token for piece in session.stream(ids, n, **options)]
        spent.processor += time.process_time() - start[0]
        spent.clock += time.perf_counter() - start[1]
    return tokens


def compare(model: Model, task: Task, rounds: int) -> None:
    """Print the time of `slow` texts as a multiple of that of `fast` ones."""
    ratios: list[tuple[float, float]] = []
    timed(model, task.prompts[0], 8, Sum(), **task.fast)
    for _ in range(rounds):
        with_it, without, made = Sum(), Sum(), 0
        for i, ids in enumerate(task.prompts):
            runs = [(with_it, task.fast), (without, task.slow)]
            runs = runs[:: 1 if (i + len(ratios)) % 2 else -1]
            texts = [timed(model, ids, task.tokens, spent, **options) for spent, options in runs]
            assert texts[0] == texts[1], f"{task.name}: the texts of prompt {i} differ"
            made += len(texts[0])
        ratios.append((without.processor / with_it.processor, without.clock / with_it.clock))
    processor, clock = (
        f"{median(r):.2f}x" + (f" ({min(r):.2f} to {max(r):.2f})" if rounds > 1 else "")
        for r in zip(*ratios, strict=True)
    )
    print(
        f"{task.name}: {len(task.prompts)} prompts, {made} tokens, "
        f"{processor} by the processor, {clock} by the clock",
        flush=True,
    )


def all_tasks(model: Model, tokens: int) -> list[Task]:
    """Return each kind of text with two sets of options that must generate the same text."""
    off = {"speculate": "off"}
    free = [_asked(model, f"Write a few sentences about {topic}.") for topic in TOPICS]
    sampled = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
    wrong = {"speculate": lambda tokens: [3] * 31}
    people = [_asked(model, f"Make up record {i} of a person as JSON.") for i in range(5)]
    constrained = {"json_schema": RECORD, "temperature": 0.8, "seed": 2}
    # Log probabilities are of every token, so each is computed separately then.
    one_by_one = {**constrained, "logprobs": 0, **off}
    copies = [_asked(model, f"Repeat this record as JSON:\n\n{record}") for record in RECORDS]
    copied = {"json_schema": RECORD}
    return [
        Task("copying tasks", copying_tasks(model), tokens, {}, off),
        Task("free text", free, tokens, {}, off),
        Task("free text, sampled", free, tokens, sampled, {**off, **sampled}),
        Task("drafts that are always wrong", free, tokens, wrong, off),
        Task("record of 12 fields", people, 400, constrained, one_by_one),
        Task("record of 12 fields, drafts", people, 400, constrained, {**constrained, **off}),
        Task("record of 12 fields, copied, drafts", copies, 400, copied, {**copied, **off}),
    ]


def main() -> None:
    """Print all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-n", type=int, default=96, help="tokens per text")
    parser.add_argument("-r", "--rounds", type=int, default=1, help="repetitions of the texts of each line")
    parser.add_argument("--only", default="", help="measure only lines whose names contain this")
    arguments = parser.parse_args()
    with Model(arguments.model, device="cpu", threads=arguments.threads) as model:
        for task in all_tasks(model, arguments.n):
            if arguments.only in task.name:
                compare(model, task, arguments.rounds)


if __name__ == "__main__":
    main()
