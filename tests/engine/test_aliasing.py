"""Arrays of a caller that change or are unmapped while a call reads them.

Calls copy what they read. Under AddressSanitizer, each of these tests shows a read of other memory.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from metal_prefill import Model
from metal_prefill._support.arguments import token_array
from metal_prefill.generation import Options, Sampler, Scheduler

CHUNK = 16
IDS = list(range(100, 150))
OTHERS = list(range(300, 350))
BEYOND = 2**31 - 1  # no vocabulary has this id


class Alias(NamedTuple):
    """Token ids, and what their owner does with them during a call."""

    tokens: Any
    change: Callable[[], object]


def _filled(whole: np.ndarray[Any, Any], part: slice, ids: list[int]) -> Alias:
    whole[part] = ids
    return Alias(whole[part], lambda: whole.fill(BEYOND))


def _list(folder: Path, ids: list[int]) -> Alias:
    tokens = list(ids)
    return Alias(tokens, lambda: tokens.__setitem__(slice(None), [BEYOND]))


def _objects(folder: Path, ids: list[int]) -> Alias:
    tokens = np.array(ids, object)
    return Alias(tokens, lambda: tokens.fill("text"))


def _memory_map(folder: Path, ids: list[int]) -> Alias:
    path = folder / "ids"
    path.write_bytes(np.array(ids, np.int32).tobytes())
    return Alias(np.memmap(path, np.int32, "r"), lambda: path.open("wb").close())  # a read: SIGBUS


def _shared_memory(folder: Path, ids: list[int]) -> Alias:
    memory = SharedMemory(create=True, size=4 * len(ids))
    tokens = np.ndarray(len(ids), np.int32, memory.buf)
    tokens[:] = ids

    def unmap() -> None:
        memory.close()  # a read: SIGSEGV
        memory.unlink()

    return Alias(tokens, unmap)


ALIASES: dict[str, Callable[[Path, list[int]], Alias]] = {
    "int32": lambda folder, ids: _filled(np.empty(50, np.int32), slice(None), ids),
    "int64": lambda folder, ids: _filled(np.empty(50, np.int64), slice(None), ids),
    "every second": lambda folder, ids: _filled(np.empty(100, np.int32), slice(None, None, 2), ids),
    "backwards": lambda folder, ids: _filled(np.empty(50, np.int32), slice(None, None, -1), ids),
    "list": _list,
    "objects": _objects,
    "memory map": _memory_map,
    "shared memory": _shared_memory,
}

Call = Callable[[Model, Any, Any], Any]  # with ids and a progress callback
CALLS: dict[str, Call] = {
    "forward_prompt": lambda m, ids, p: (m.forward_prompt(ids, progress=p), m._default_session().tokens),
    "forward_prompt, reuse": lambda m, ids, p: m.forward_prompt(ids, reuse=True, progress=p),
    "forward_prompt_logits": lambda m, ids, p: m.session().forward_prompt_logits(ids, progress=p).tolist(),
    "score": lambda m, ids, p: m.score(ids, progress=p).tolist(),
    "score of a session": lambda m, ids, p: m.session().score(ids, progress=p).tolist(),
    "score_many": lambda m, ids, p: [row.tolist() for row in m.score_many([OTHERS[:3], ids], progress=p)],
    "forward_prompts": lambda m, ids, p: m.forward_prompts([OTHERS, ids], progress=p).tolist(),
    "forward_batch": lambda m, ids, p: m.forward_batch(
        [m.session(), m.session()], [OTHERS, ids], output=("greedy", "log_probs"), progress=p
    )[1].tolist(),
    "generate": lambda m, ids, p: list(m.generate(ids, 4, progress=p, echo=True)),
    "several answers": lambda m, ids, p: sorted(
        (i, str(text)) for i, text in m.generate_many([ids], 3, n=2, progress=p, temperature=1, seed=1)
    ),
    "stream": lambda m, ids, p: [
        piece.token for piece in m.session().stream(ids, 4, progress=p, temperature=1, seed=1)
    ],
    "generate_many": lambda m, ids, p: "".join(
        str(text) for i, text in m.generate_many([OTHERS, ids], 4, progress=p) if i == 1
    ),
}


@pytest.fixture
def model(demo_path: Path) -> Iterator[Model]:
    with Model(demo_path, device="cpu", chunk_tokens=CHUNK) as model:
        yield model


@pytest.mark.parametrize(
    ("call", "alias"),
    [(call, ALIASES["int32"]) for call in CALLS.values()]
    + [(CALLS["forward_prompt"], alias) for alias in ALIASES.values()],
    ids=[*CALLS, *ALIASES],
)
def test_ids_that_a_callback_changes_are_those_of_the_call(
    model: Model, call: Call, alias: Callable[[Path, list[int]], Alias], tmp_path: Path
) -> None:
    wanted = call(model, IDS, lambda done, total: None)
    model.reset()
    tokens, change = alias(tmp_path, IDS)
    changes = iter([change])
    assert call(model, tokens, lambda done, total: next(changes, int)()) == wanted
    assert next(changes, None) is None, "the callback was not called"


LATER: dict[str, Callable[[Model, Any], Iterator[Any]]] = {
    "generate": lambda m, ids: m.generate(ids, 4),
    "stream": lambda m, ids: m.session().stream(ids, 4, temperature=1, seed=1),
    "submit": lambda m, ids: iter([Scheduler(m).submit(ids).prompt.tolist()]),
    "speculate": lambda m, ids: m.generate(IDS, 8, speculate=lambda known: ids),
}


@pytest.mark.parametrize("begin", LATER.values(), ids=LATER.keys())
def test_ids_may_change_before_the_first_piece(model: Model, begin: Callable[[Model, Any], Any]) -> None:
    wanted = list(begin(model, IDS))
    tokens = np.array(IDS, np.int32)
    pieces = begin(model, tokens)
    if begin is not LATER["speculate"]:  # whose ids are those of a later call
        tokens.fill(BEYOND)
    assert list(pieces) == wanted


def test_the_ids_of_a_stream_are_read_only(model: Model) -> None:
    with pytest.raises(ValueError, match="read-only"):
        Scheduler(model).submit(IDS).prompt[0] = BEYOND


def test_ids_that_a_thread_changes_are_checked() -> None:
    """Each id is one that the array had at some time: valid, or refused."""
    tokens = np.array(IDS, np.int32)
    done = threading.Event()

    def change() -> None:
        while not done.wait(1e-4):
            tokens[::3] = BEYOND
            tokens[::3] = 7

    thread = threading.Thread(target=change)
    thread.start()
    accepted = set[int]()
    try:
        for _ in range(200):
            with suppress(ValueError):  # which names BEYOND
                accepted |= set(token_array(tokens, 1024).tolist())
    finally:
        done.set()
        thread.join()
    assert accepted
    assert accepted <= {7, *IDS}


class Fickle:
    """An integer that is valid when it is read first."""

    reads = 0

    def __index__(self) -> int:
        self.reads += 1
        return 5 if self.reads == 1 else BEYOND


def test_an_integer_is_read_once(model: Model) -> None:
    model.forward_prompt(np.array([Fickle()], object))
    assert model._default_session().tokens == [5]


def test_a_bias_is_that_of_the_call(model: Model) -> None:
    bias = {token: -np.inf for token in range(0, model.config.vocab_size, 2)}
    wanted = [piece.token for piece in model.session().stream(IDS, 4, logit_bias=bias)]
    pieces = model.session().stream(IDS, 4, logit_bias=bias)
    options = Options(logit_bias=bias)
    bias.clear()
    assert [piece.token for piece in pieces] == wanted
    assert all(token % 2 for token in wanted)
    assert Sampler(options)(np.zeros(model.config.vocab_size)) == 1
