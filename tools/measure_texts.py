"""Measure what guesses and forced tokens save: interleaved pairs, in time of the processor and of the clock.

Each text is made twice, with and without, in changing order, from a prompt that is already computed. The
texts must be the same. Prints a line for each kind of task::

    python tools/measure_texts.py smollm2 --threads 2
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

from metal_prefill import Model

# Of A Tale of Two Cities, Pride and Prejudice, Moby-Dick, Alice's Adventures in Wonderland and Walden.
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
    """Seconds of the processor and of the clock."""

    processor: float = 0.0
    clock: float = 0.0


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
    """Make a text from a prompt that is computed, and add what it took."""
    with model.session() as session:
        session.forward_prompt(ids)
        start = time.process_time(), time.perf_counter()
        tokens = [piece.token for piece in session.stream(ids, n, **options)]
        spent.processor += time.process_time() - start[0]
        spent.clock += time.perf_counter() - start[1]
    return tokens


def compare(model: Model, what: str, prompts: list[list[int]], n: int, fast: Any, slow: Any) -> None:
    """Print the time of `slow` texts as a multiple of that of `fast` ones."""
    with_it, without, made = Sum(), Sum(), 0
    timed(model, prompts[0], 8, Sum(), **fast)
    for i, ids in enumerate(prompts):
        runs = [(with_it, fast), (without, slow)]
        texts = [timed(model, ids, n, spent, **options) for spent, options in runs[:: 1 if i % 2 else -1]]
        assert texts[0] == texts[1], f"{what}: the texts of prompt {i} differ"
        made += len(texts[0])
    print(
        f"{what}: {len(prompts)} prompts, {made} tokens, "
        f"{without.processor / with_it.processor:.2f}x by the processor, "
        f"{without.clock / with_it.clock:.2f}x by the clock",
        flush=True,
    )


def main() -> None:
    """Print all lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-n", type=int, default=96, help="tokens of a text")
    arguments = parser.parse_args()
    off = {"speculate": "off"}
    with Model(arguments.model, device="cpu", threads=arguments.threads) as model:
        free = [_asked(model, f"Write a few sentences about {topic}.") for topic in TOPICS]
        compare(model, "copying tasks", copying_tasks(model), arguments.n, {}, off)
        compare(model, "free text", free, arguments.n, {}, off)
        sampled = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
        compare(model, "free text, sampled", free, arguments.n, sampled, {**off, **sampled})
        wrong = {"speculate": lambda tokens: [3] * 31}
        compare(model, "guesses that are always wrong", free, arguments.n, wrong, off)
        people = [_asked(model, f"Make up record {i} of a person as JSON.") for i in range(5)]
        # Log probabilities are of every token, so each is computed by itself then.
        constrained = {"json_schema": RECORD, "temperature": 0.8, "seed": 2}
        compare(model, "record of 12 fields", people, 400, constrained, {**constrained, "logprobs": 0, **off})
        compare(model, "record of 12 fields, guesses", people, 400, constrained, {**constrained, **off})
        copies = [_asked(model, f"Repeat this record as JSON:\n\n{record}") for record in RECORDS]
        copied = {"json_schema": RECORD}
        compare(model, "record of 12 fields, copied, guesses", copies, 400, copied, {**copied, **off})


if __name__ == "__main__":
    main()
