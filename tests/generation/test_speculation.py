"""Speculative decoding saves passes and never changes a text."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.native_requests import passes_of_texts
from support.scheduled_texts import tokens_of_many

from metal_prefill import Model, SessionBusyError, _core
from metal_prefill.engine import Engine, RowCost
from metal_prefill.generation._speculation import MOST_DRAFTS, Acceptance, Best, LookupDrafter, Speculation
from metal_prefill.generation._stream import make_streams

SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "repeat_penalty": 1.1, "seed": 3}
LENGTH = 12  # of a text
VOCAB = 320

Drafter = Callable[[list[int]], Sequence[int]]


@pytest.fixture(scope="module")
def tiny(model_path: Callable[[str], Path]) -> Iterator[Model]:
    """Two layers, one of them with a window, with random weights."""
    with Model(model_path("gqa 1"), device="cpu", threads=1) as model:
        yield model


def prompts_of(n: int, seed: int) -> list[list[int]]:
    """Random tokens of a small alphabet, so that much of it repeats."""
    rng = random.Random(seed)
    return [[rng.randrange(1, 12) for _ in range(rng.randrange(1, 40))] for _ in range(n)]


def planted(truth: list[int], seed: int) -> Drafter:
    """Drafts correctly for a while and then wrongly."""
    rng = random.Random(seed)

    def draft(tokens: list[int]) -> list[int]:
        made = len(tokens)
        drafts = [*truth[made : made + rng.randrange(6)], *(rng.randrange(VOCAB) for _ in range(4))]
        return drafts[: rng.randrange(1, 8)]

    return draft


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_many_texts_are_identical(tiny: Model, options: dict[str, Any]) -> None:
    prompts = prompts_of(250, 5)
    expected = tokens_of_many(tiny, prompts, LENGTH, speculate="off", **options)
    assert tokens_of_many(tiny, prompts, LENGTH, **options) == expected
    drafted = [
        (prompt, {"speculate": planted([*prompt, *text], i)})
        for i, (prompt, text) in enumerate(zip(prompts, expected, strict=True))
    ]
    assert tokens_of_many(tiny, drafted, LENGTH, **options) == expected


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_session_ends_as_without_speculation(tiny: Model, options: dict[str, Any]) -> None:
    def state(
        prompt: list[int], n: int, take: int | None = None, context: int | None = None, **more: Any
    ) -> tuple[Any, ...]:
        with tiny.session(max_context=context) as session:
            pieces = session.stream(prompt, n, **options, **more)
            tokens = [p.token for _, p in zip(range(take or n), pieces, strict=False)]
            pieces.close()  # type: ignore[attr-defined]
            ids, _, rows = session.native.export_state()
            return tokens, ids.tolist(), [np.asarray(row).tobytes() for row in rows]

    for i, prompt in enumerate(prompts_of(20, 6)):
        ends: list[dict[str, Any]] = [{"n": 15}, {"n": 30, "take": 1 + i % 9}]
        ends.append({"n": 30, "context": len(prompt) + 12})
        tokens, _, _ = state(prompt, 15, speculate="off")
        ends.append({"n": 20, "stop": tokens[i % 15]})
        for end in ends:
            expected = state(prompt, **end, speculate="off")
            drafter = planted([*prompt, *expected[0]], i)
            for speculate in ("lookup", drafter):
                assert state(prompt, **end, speculate=speculate) == expected, end


@pytest.mark.usefixtures("most_drafts")
def test_pieces_have_the_same_text_probabilities_and_ends(bundled: Model) -> None:
    prompt = "ROMEO:\nto be or not to be, to be or not to be, to be"
    for options in ({}, {"temperature": 0.5, "seed": 4}):
        for end in ({}, {"stop": [", "]}, {"min_tokens": 20, "stop": ["e"]}):
            kwargs: dict[str, Any] = {"logprobs": 2, **options, **end}
            expected = list(bundled.session().stream(prompt, 40, speculate="off", **kwargs))
            assert list(bundled.session().stream(prompt, 40, **kwargs)) == expected


@pytest.mark.usefixtures("most_drafts")
def test_every_engine_and_drafter_generates_the_same(device: str, tiny: Model) -> None:
    # On the CPU, the first tokens leave the window of penalties.
    n, prompt = (5, [5, 6, 7, 8, 5, 6, 7]) if device == "metal" else (40, [5, 6, 7, 8] * 12)
    with (
        Model(tiny.path, device=device) as model,
        Model(tiny.path, device="cpu", max_context=60) as short,
        Model(tiny.path, device="cpu", kv_memory=1, prefix_memory=0) as full,  # after 64 positions
    ):
        drafters: list[Any] = ["lookup", tiny, short, full, lambda tokens: [1, 2, 3], lambda tokens: []]
        for options in ({}, {**SAMPLED, "frequency_penalty": 0.3}):
            expected = [p.token for p in model.session().stream(prompt, n, speculate="off", **options)]
            for speculate in drafters:
                with model.session() as session:
                    made = [p.token for p in session.stream(prompt, n, speculate=speculate, **options)]
                assert made == expected
                assert tokens_of_many(model, [prompt], n, speculate=speculate, **options) == [expected]


def test_drafts_of_the_same_model_are_all_accepted(
    bundled: Model, demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every computed row yields a token."""
    with Model(demo_path, device="cpu", threads=1) as other, bundled.session() as session:
        passes = passes_of_texts(monkeypatch)
        text = "".join(session.generate("JULIET:\n", 60, speculate=other))
    assert len(passes) < sum(rows for rows, _ in passes) == 59
    assert text == "".join(bundled.generate("JULIET:\n", 60, speculate="off"))


@pytest.mark.usefixtures("most_drafts")
def test_a_session_that_another_call_changed_ends_the_text(bundled: Model) -> None:
    """The call comes between two tokens of one pass."""
    prompt = [5, 6, 7] * 8
    truth = [*prompt, *(p.token for p in bundled.session().stream(prompt, 20, speculate="off"))]
    session = bundled.session()
    pieces = session.stream(prompt, 20, speculate=lambda tokens: truth[len(tokens) : len(tokens) + 5])
    for _ in range(3):
        next(pieces)
    assert session.position > len(prompt) + 2  # the session is ahead of the pieces
    session.rewind(4)
    with pytest.raises(SessionBusyError, match="its position is 4"):
        next(pieces)
    assert session.position == 4


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize(
    ("speculate", "error", "message"),
    [
        ("else", ValueError, "speculate must be 'lookup', 'off', a model or a function, got 'else'"),
        (3, TypeError, "speculate must be 'lookup', 'off', a model or a function, got int"),
        (lambda tokens: [1 << 20], ValueError, "a draft of speculate: token id 1048576 .* outside"),
        (lambda tokens: ["a"], TypeError, "a draft of speculate: token ids must be integers"),
        (lambda tokens: None, TypeError, "a draft of speculate must be a sequence of ids, got NoneType"),
        (lambda tokens: 1 // 0, ZeroDivisionError, "division"),
    ],
)
def test_invalid_drafts_fail_only_their_text(
    bundled: Model, speculate: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        list(bundled.generate([1, 2], 9, speculate=speculate))
    results = dict(
        bundled.generate_many(
            [([1, 2], {"speculate": speculate}), [1, 2]], 9, errors="return", speculate="off"
        )
    )
    assert isinstance(results[0], error)
    assert isinstance(results[1], str)


@pytest.mark.parametrize("many", [False, True])
def test_a_draft_model_finds_prefixes_in_the_namespace_of_the_text(
    tiny: Model, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    real = Engine.session

    def noted(engine: Engine, max_context: int | None = None, prefix_namespace: str = "") -> Any:
        used.append(prefix_namespace)
        return real(engine, max_context, prefix_namespace)

    monkeypatch.setattr(Engine, "session", noted)
    if many:
        make_streams(tiny.engine, [1, 2, 3], 2, 9, speculate=tiny, prefix_namespace="key")
    else:
        with tiny.session(prefix_namespace="key") as session, session.fork() as fork:
            "".join(fork.generate([1, 2, 3], 9, speculate=tiny))
    assert used == ["key", "key"]


def test_a_draft_model_requires_the_same_vocabulary(bundled: Model, tiny: Model) -> None:
    with pytest.raises(ValueError, match="has a vocabulary of 320 tokens, this model one of 1024"):
        bundled.generate([1, 2], 9, speculate=tiny)


@pytest.mark.usefixtures("most_drafts")
def test_a_function_may_change_the_ids_that_it_receives(bundled: Model) -> None:
    received: list[list[int]] = []

    def draft(tokens: list[int]) -> list[int]:
        received.append(tokens.copy())
        tokens.clear()
        return []

    made = [piece.token for piece in bundled.session().stream([1, 2], 9, speculate=draft)]
    assert len(received) > 1
    assert received == [[1, 2, *made[:n]] for n in range(1, 1 + len(received))]


def oracle_of(text: list[int], count: int) -> tuple[int, set[tuple[int, ...]]]:
    """Return the longest suffix that occurred before, and the continuation of each occurrence."""
    n = len(text)
    for length in range(n - 1, 0, -1):
        end = text[n - length :]
        places = [i for i in range(n - length) if text[i : i + length] == end]
        if places:
            continued = [[*text[i + length :], *(text[i + length :] * count)][:count] for i in places]
            return length, {tuple(c) for c in continued}
    return 0, {()}


def lookup_of(*parts: Sequence[int]) -> _core.Lookup:
    lookup = _core.Lookup()
    for part in parts:
        lookup.append(np.array(part, np.int32))
    return lookup


@pytest.mark.parametrize("alphabet", [1, 2, 3, 30])
def test_lookup_finds_the_longest_suffix_that_occurred_before(alphabet: int) -> None:
    rng = random.Random(alphabet)
    for _ in range(6):
        lookup, text = _core.Lookup(), list[int]()
        for _ in range(60):
            text.append(rng.randrange(alphabet))
            lookup.append(np.array(text[-1:], np.int32))
            length, continuations = oracle_of(text, 5)
            assert lookup.matched == length
            assert tuple(lookup.after_match(5)) in continuations


ROW = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def test_lookup_continues_after_a_change() -> None:
    # 98 was never seen; 16 is part of the row and occurred before, so its continuation is no better draft.
    for change in (98, 16):
        lookup = lookup_of(ROW, [99], ROW[:5])
        assert lookup.since_change is None  # the match agrees
        lookup.append(np.array([change], np.int32))
        assert lookup.since_change == 0
        assert lookup.after_change(5) == [16, 17, 18, 19, 99]
        lookup.append(np.array([16, 17], np.int32))
        assert lookup.after_change(2) == [18, 19]


def test_lookup_needs_a_match_and_prefers_the_longest_and_latest() -> None:
    for lookup in (_core.Lookup(), lookup_of([1, 2, 3])):
        assert (lookup.matched, lookup.since_change) == (0, None)
        assert (lookup.after_match(3), lookup.after_change(3)) == ([], [])
    assert lookup_of([1, 2, 3, 1, 2, 4, 1, 2]).after_match(1) == [4]
    assert lookup_of(ROW, [99], ROW[:4], [98]).since_change is None  # the match is too short
    other = [30, 31, 32, 33, 34, 35]
    lookup = lookup_of(ROW, other, [99], ROW[:5], [98], other[:5], [97])
    assert (lookup.since_change, lookup.after_change(2)) == (0, [99, 10])
    lookup = lookup_of(ROW, [99], ROW[:5], [98])
    lookup.append(np.array([16], np.int32), forced=True)  # which does not count since a change
    assert (lookup.since_change, lookup.matched, lookup.after_change(1)) == (0, 1, [17])


def test_lookup_drops_an_occurrence_that_no_longer_matches() -> None:
    for changes in range(8):
        lookup = lookup_of(ROW, [99], ROW[:5], range(50, 50 + changes))
        assert (lookup.since_change is None) == (changes in (0, 5, 6, 7))


def test_lookups_after_a_change_are_used_while_they_are_more_likely() -> None:
    drafter = LookupDrafter()
    drafter.append(np.array([*ROW, 7, 16, 8, *ROW[:5], 16], np.int32))
    after_match, after_change = [8], [16]
    acceptance, draft = drafter.best()
    assert draft(1) == after_change
    acceptance.note(0, 20)
    _, draft = drafter.best()
    assert draft(1) == after_match


class Repeating(LookupDrafter):
    """Drafts the same token again and again."""

    def __init__(self, token: int, probability: float, *, free: bool = True) -> None:
        super().__init__()
        self.token, self.acceptance, self.free = token, Acceptance(probability), free

    def best(self) -> Best:
        return self.acceptance, lambda count: [self.token] * count


def numbers_of_drafts(drafter: LookupDrafter, chosen: Callable[[int], int], n: int) -> list[int]:
    """Take passes that choose these tokens, and return the number of drafts of each."""
    speculation, counts, position = Speculation(drafter, np.array([1], np.int32)), [], 0
    cost = RowCost()
    for rows in range(1, MOST_DRAFTS + 2):
        cost.note(rows, 1 + 0.16 * (rows - 1))
    for _ in range(n):
        drafts = speculation.drafts(MOST_DRAFTS, cost, 1, 1.0)
        counts.append(len(drafts))
        tokens = [chosen(position)]
        while len(tokens) <= len(drafts) and drafts[len(tokens) - 1] == tokens[-1]:
            tokens.append(chosen(position + len(tokens)))
        speculation.learn(tokens)
        position += len(tokens)
    return counts


def test_costs_of_passes_are_interpolated() -> None:
    cost = RowCost()
    cost.note(1, 2.0)
    assert cost.seconds(5) == pytest.approx(2 * 1.48)  # until more is known, a row more takes 12%
    cost.note(12, 8.0)
    assert cost.seconds(12) == 8.0
    assert cost.seconds(3) == pytest.approx(2 + 6 * 2 / 11)
    assert cost.seconds(16) == pytest.approx(8 + 2 * 0.12 * 4)


def test_a_pass_never_costs_less_than_one_of_one_row() -> None:
    cost = RowCost()
    cost.note(12, 8.0)
    assert cost.seconds(1) == pytest.approx(8 / (1 + 0.12 * 11))
    cost.note(1, 7.9)
    cost.note(16, 8.1)
    assert 7.9 < cost.seconds(8) < 8.0
    delayed = RowCost()
    assert delayed.seconds(8) > delayed.seconds(1) > 0
    delayed.note(1, 5.0)
    delayed.note(4, 1.0)
    assert delayed.seconds(6) == 5.0
    for _ in range(20):
        delayed.note(1, 1.0)
    delayed.note(1, 100.0)
    assert delayed.seconds(1) < 1.06
    for _ in range(100):
        delayed.note(1, 2.0)
    assert delayed.seconds(1) > 1.9


def test_rejected_drafts_back_off() -> None:
    counts = numbers_of_drafts(Repeating(-1, 0.5, free=False), lambda position: position, 400)
    assert sum(0.16 * count for count in counts) < 0.05 * 400
    assert any(counts[100:])
    assert sum(map(bool, counts[200:])) < sum(map(bool, counts[:200]))


def test_accepted_drafts_grow() -> None:
    counts = numbers_of_drafts(Repeating(1, 0.5), lambda position: 1, 30)
    assert counts[0] >= 1
    assert max(counts) == MOST_DRAFTS


def test_free_drafts_are_evaluated_without_use() -> None:
    counts = numbers_of_drafts(Repeating(1, 0.01), lambda position: 1, 40)
    assert counts[0] == 0
    assert counts[-1] > 0
