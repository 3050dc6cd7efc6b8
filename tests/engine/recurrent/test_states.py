"""States of recurrent layers: a session that was split, rewound, forked or batched equals a fresh one."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.native_requests import choose
from support.programs import finished
from support.recurrent import (
    NAMES,
    Array,
    assert_equals_fresh,
    contents,
    fresh,
    ids_of,
    interval,
    kinds_of,
    long_ids,
    page_bytes,
    state_bytes,
)
from support.reference import ReferenceModel
from support.small_models import MODELS, with_tensor, write
from support.tiny_models import TINY_RECURRENT

from metal_prefill import Model, NumericalError
from metal_prefill.files._model_tensors import core_config


@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_results_are_bit_identical_for_any_split_and_number_of_threads(
    name: str, kv_dtype: str, model_path: Callable[[str], Path]
) -> None:
    if kv_dtype == "q8_0" and MODELS[name].head_dim % 32:
        pytest.skip("heads that are no blocks")
    outcomes = []
    ids = ids_of(300)
    for threads, cuts in [
        (1, [300]),
        (2, [300]),
        (3, [1, 1, 1, 60, 1, 1, 135, 100]),
        (2, [1] * 10 + [64] + [2] * 113),
    ]:
        with Model(model_path(name), device="cpu", threads=threads, kv_dtype=kv_dtype) as model:
            session = model.session()
            done = 0
            for n in cuts:
                logits = session.forward_prompt_logits(ids[done : done + n])
                done += n
            outcomes.append((logits.tobytes(), contents(session)))
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_that_of_the_reference(
    device: str, name: str, model_path: Callable[[str], Path]
) -> None:
    """Inputs of the next convolution, and the matrices of recurrences."""
    path = model_path(name)
    for n in (1, 2, 70):
        ids = ids_of(n)
        expected = ReferenceModel(path).forward(ids)
        with Model(path, device=device, compute="f32", kv_dtype="f32") as model, model.session() as session:
            session.forward_prompt(ids)
            parts = iter(session.native.export_state()[2])
            for layer, kind in enumerate(kinds_of(model)):
                if "attention" in kind:
                    next(parts), next(parts)
                if kind == "attention":
                    continue
                held = np.asarray(next(parts)).view(np.float32)
                last = expected.products[layer][-(model.config.conv_taps - 1) :]
                missing = (model.config.conv_taps - 1 - len(last)) * last.shape[1]  # before the first token
                wanted = np.concatenate(
                    [np.zeros(missing), last.ravel(), expected.states.get(layer, np.zeros(0)).ravel()]
                )
                assert len(held) == len(wanted) == core_config(model.config).state_values(layer)
                error = np.square(held - wanted).sum() / np.square(wanted).sum()
                assert error < (1e-9 if device == "cpu" else 5e-6)


def test_pages_hold_only_layers_with_attention(model: Model) -> None:
    with model.session() as session:
        session.forward_prompt(ids_of(64))
        page, states = page_bytes(model), state_bytes(model)
        assert page < session.stats()["kv_cache_bytes"] <= 1.5 * page + 2 * (states + 4096)


def test_a_rewound_session_continues_like_a_fresh_one(model: Model) -> None:
    """Only tokens after the last snapshot are computed again."""
    ids, rest = long_ids(model.device), ids_of(40, seed=1)
    session = model.session()
    session.forward_prompt(ids)
    last = len(ids) - 1
    for position in (last, *(p for p in (256, 255, 200, 128, 127, 65, 64, 63, 2, 1, 0) if p < last)):
        session.rewind(position)
        logits = session.forward_prompt_logits(rest)
        assert_equals_fresh(model, session, np.concatenate([ids[:position], rest]), logits)
        assert session.stats()["tokens_recomputed"] == position % interval(model)
        session.forward_token(3)
        assert session.stats()["tokens_recomputed"] == 0


def test_repeated_rewinds_discard_later_tokens(model: Model) -> None:
    session = model.session()
    kept: list[int] = []
    for round_, position in enumerate([0, 80, 70, 130, 64, 30]):
        session.rewind(position)
        added = ids_of(90, seed=round_)
        kept = [*kept[:position], *added.tolist()]
        logits = session.forward_prompt_logits(added)
    assert_equals_fresh(model, session, np.array(kept), logits)


def test_a_fork_and_its_origin_do_not_see_each_other(model: Model) -> None:
    ids, one, other = ids_of(100), ids_of(30, seed=1), ids_of(30, seed=2)
    session = model.session()
    session.forward_prompt(ids)
    fork = session.fork()
    logits = session.forward_prompt_logits(one)
    of_fork = fork.forward_prompt_logits(other)
    assert_equals_fresh(model, session, np.concatenate([ids, one]), logits)
    assert_equals_fresh(model, fork, np.concatenate([ids, other]), of_fork)
    again = fork.fork()
    again.rewind(90)
    session.close()
    fork.close()
    assert_equals_fresh(model, again, np.append(ids[:90], 5), again.forward_token(5))


def test_a_fork_in_a_progress_callback_has_the_finished_chunks(
    device: str, name: str, model_path: Callable[[str], Path]
) -> None:
    ids, forks = long_ids(device), []
    with Model(model_path(name), device=device, chunk_tokens=64) as model:
        session = model.session()
        logits = session.forward_prompt_logits(ids, progress=lambda done, total: forks.append(session.fork()))
        assert [fork.position for fork in forks] == [*range(64, len(ids), 64), len(ids)]
        for fork in forks:
            assert_equals_fresh(model, fork, np.append(ids[: fork.position], 9), fork.forward_token(9))
        assert_equals_fresh(model, session, ids, logits)


def test_a_stopped_prompt_keeps_its_chunks(device: str, name: str, tiny_path: Callable[[str], Path]) -> None:
    def stop(done: int, total: int) -> None:
        if done >= 128:
            raise KeyError(done)

    ids = long_ids(device)
    with Model(tiny_path(name), device=device, chunk_tokens=64) as model:
        session = model.session()
        with pytest.raises(KeyError):
            session.forward_prompt(ids, progress=stop)
        assert session.position == 128
        assert_equals_fresh(model, session, ids, session.forward_prompt_logits(ids[128:]))


def test_a_failed_prompt_restores_the_state(device: str, name: str, tmp_path: Path) -> None:
    """The second chunk fails: a token's embedding is NaN."""
    shape = replace(TINY_RECURRENT[name], embedding="F32", output_type="F32")
    plain = write(tmp_path / "plain.gguf", shape)

    def spoil(values: Array) -> None:
        values.reshape(shape.vocab, shape.dim)[319] = np.nan

    path = with_tensor(tmp_path / "nan.gguf", plain, "token_embd.weight", spoil)
    ids = ids_of(150) % 319
    with Model(path, device=device, chunk_tokens=64) as model, model.session() as session:
        session.forward_prompt(ids[:70])
        before = contents(session)
        for spoilt in ([*ids[70:], 319], [319], [1, 319]):
            with pytest.raises(NumericalError):
                session.forward_prompt_logits(spoilt)
            assert session.position == 70
            assert contents(session) == before
        assert_equals_fresh(model, session, np.append(ids[:70], 5), session.forward_token(5))
        session.rewind(68)
        logits = session.forward_prompt_logits(ids[68:100])
        assert_equals_fresh(model, session, ids[:100], logits)


def test_closed_sessions_release_their_states(model: Model) -> None:
    with model.session() as session, session.fork() as fork:
        session.forward_prompt(ids_of(200))
        fork.forward_prompt(ids_of(100))
        session.rewind(100)
    assert model.stats()["kv_pool_bytes"] == 0
    with model.session() as session:
        session.forward_prompt(ids_of(200), reuse=True)
    stats = model.stats()
    assert stats["kv_pool_bytes"] == stats["prefix_bytes"] > 0


GENERATING = """
import sys, threading
from metal_prefill import Model, _core

class Poisoned(_core.EngineOptions):
    def __init__(self):
        super().__init__()
        self.poison_cache = True  # whatever takes a slot waits for passes in flight, as where slots grow

def text(model, i):
    with model.session() as session:
        return "".join(session.generate([1 + i] * 20, 12))

_core.EngineOptions = Poisoned
with Model(sys.argv[1], device=sys.argv[2], threads=2) as model:
    alone = [text(model, i) for i in range(4)]
    found = [[] for _ in alone]

    def work(i):
        for _ in range(3):
            found[i].append(text(model, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected] * 3 for expected in alone], found
"""


@pytest.mark.parametrize("name", ["mamba2", "lfm2"])
def test_threads_generate_at_the_same_time(name: str, device: str, tiny_path: Callable[[str], Path]) -> None:
    program = [sys.executable, "-c", GENERATING, str(tiny_path(name)), device]
    done = finished(program)
    assert (done.returncode, done.stderr) == (0, "")


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
