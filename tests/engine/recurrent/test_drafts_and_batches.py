"""Drafts and batches with recurrent layers: results equal those of single tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.native_requests import choose
from support.recurrent import assert_equals_fresh, fresh, ids_of

from metal_prefill import Model


def test_rejected_drafts_restore_the_state_before_them(model: Model) -> None:
    """Seven drafts, of which the one at index `wrong` is wrong; 7: none."""
    ids = ids_of(66)
    with model.session() as session:
        chosen = [session.forward_prompt(ids)]
        for _ in range(7):
            chosen.append(session.forward_token_greedy(chosen[-1]))
    for wrong in range(8):
        drafts = chosen[:7]
        if wrong < 7:
            drafts[wrong] = (drafts[wrong] + 1) % 320
        with model.session() as session:
            session.forward_prompt(ids[:60])
            given = choose(session.native, [*ids[60:], *drafts], 7)
            assert given == chosen[: wrong + 1]
            kept = np.array([*ids, *chosen[:wrong]])
            assert_equals_fresh(model, session, np.append(kept, 11), session.forward_token(11))
            assert session.stats()["tokens_recomputed"] == 0


def test_no_snapshot_is_kept_of_rejected_drafts(model: Model) -> None:
    """The pass writes the state at position 64, which is an end of a page, after a wrong draft."""
    ids = ids_of(60)
    session = model.session()
    right = session.forward_prompt(ids)
    wrong = (right + 1) % 320
    choose(session.native, [right, wrong, 1, 2, 3, 4, 5, 6], 7)
    kept = [*ids, *session.tokens[60:]]
    assert len(kept) < 64
    kept += ids_of(30, seed=1).tolist()
    session.forward_prompt(kept[session.position :])
    session.rewind(65)
    assert_equals_fresh(model, session, np.array([*kept[:65], 3]), session.forward_token(3))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_speculation_does_not_change_the_text(model: Model, options: dict[str, Any]) -> None:
    prompt = np.tile(ids_of(7), 9)

    def text(speculate: Any) -> tuple[list[int], list[int]]:
        with model.session() as session:
            pieces = list(session.stream(prompt, 16, speculate=speculate, **options))
            return [piece.token for piece in pieces], session.tokens

    expected = text("off")
    made = [*prompt.tolist(), *expected[0]]
    assert text("lookup") == expected
    assert text(lambda ids: [*made[len(ids) : len(ids) + 3], 5]) == expected


def test_large_states_are_recomputed_after_rejected_drafts(device: str, large_path: Path) -> None:
    ids = ids_of(30)
    with Model(large_path, device=device) as model, model.session() as session:
        right = session.forward_prompt(ids)
        session.rewind(29)
        assert choose(session.native, [ids[29], right, (right + 1) % 320, 5], 3)[0] == right
        position = session.position
        logits = session.forward_token(7)
        assert session.stats()["tokens_recomputed"] == position - 29
        assert_equals_fresh(model, session, np.append([*ids, right][:position], 7), logits)


def test_sequences_of_a_batch_are_bit_identical_to_single_ones(model: Model) -> None:
    """Some share a prefix, one was rewound, some are short."""
    ids = ids_of(200)
    prompts = [ids[:n] for n in (130, 131, 5, 1, 200)]
    prompts += [np.append(ids[:100], ids_of(40, seed=3)), ids_of(115, seed=4)]
    sessions = [model.session() for _ in prompts]
    sessions[6].forward_prompt(ids_of(50, seed=4))
    sessions[6].rewind(45)
    taken = [*prompts[:6], prompts[6][45:]]
    logits = model.forward_batch(sessions, taken, output="logits")
    for session, prompt, result in zip(sessions, prompts, logits, strict=True):
        assert_equals_fresh(model, session, prompt, result)
    logits = model.forward_batch(sessions, [[7]] * len(sessions), output="logits")
    for session, prompt, result in zip(sessions, prompts, logits, strict=True):
        assert_equals_fresh(model, session, np.append(prompt, 7), result)


def test_prompts_of_a_batch_compute_their_common_prefix_once(model: Model) -> None:
    ids = ids_of(150)
    prompts = [np.concatenate([ids[:100], ids_of(20, seed=seed)]) for seed in range(4)]
    logits = model.forward_prompts(prompts, return_logits=True)
    for prompt, result in zip(prompts, logits, strict=True):
        expected, _ = fresh(model, prompt)
        if model.device.startswith("CPU"):
            np.testing.assert_array_equal(result, expected)
        else:
            np.testing.assert_allclose(result, expected, atol=1e-3 * np.abs(expected).max())


def test_scheduled_texts_match_single_ones(model: Model) -> None:
    prompts = [ids_of(n, seed=n % 3).tolist() for n in (5, 90, 91, 140, 33)]

    def texts(of: list[list[int]]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in of]
        for index, piece in model.stream_many(of, 8):
            assert not isinstance(piece, Exception)
            found[index].append(piece.token)
        return found

    together = texts(prompts)
    for prompt, text in zip(prompts, together, strict=True):
        assert texts([prompt]) == [text]
