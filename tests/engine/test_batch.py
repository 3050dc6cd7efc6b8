"""Many sequences in one pass: each has the same result as alone."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.closeness import ids_for
from support.kinds import assert_same, contents
from support.small_models import SmallModel, page_bytes, write_with_nan

from metal_prefill import ContextOverflowError, KVMemoryError, Model, NumericalError, Session, _core

PAGE = 64  # positions
Ids = npt.NDArray[np.int32]

FEW = 8  # tokens of a sequence in a pass, up to which Metal is bit-identical to single tokens


def alone(model: Model, *pieces: Ids) -> Session:
    """Compute these pieces in a session without company."""
    session = model.session()
    for piece in pieces:
        session.forward_prompt(piece)
    return session


def test_forks_share_the_pages_of_their_common_prefix(tiny_demo: Model) -> None:
    with alone(tiny_demo, ids_for(tiny_demo, 5 * PAGE)) as origin:
        one = tiny_demo.stats()["kv_pool_bytes"]
        forks = [origin.fork() for _ in range(20)]
        assert tiny_demo.stats()["kv_pool_bytes"] == one
        forks[0].forward_token_greedy(1)
        assert tiny_demo.stats()["kv_pool_bytes"] == one + one / 5
        forks[1].rewind(3 * PAGE - 1)
        forks[1].forward_token_greedy(1)  # writes to a page that others hold: to a copy of it
        assert tiny_demo.stats()["kv_pool_bytes"] == one + 2 * one / 5
        for fork in forks:
            fork.close()
        assert tiny_demo.stats()["kv_pool_bytes"] == one
    assert tiny_demo.stats()["kv_pool_bytes"] == 0


def test_a_failure_ends_one_sequence_and_leaves_others_unchanged(tiny_demo: Model) -> None:
    with tiny_demo.session(max_context=30) as short:
        short.forward_prompt(ids_for(tiny_demo, 25))
        others = [tiny_demo.session() for _ in range(3)]
        tokens = [ids_for(tiny_demo, n, n) for n in (10, 20, 40)]
        sessions = [others[0], short, *others[1:]]
        results = tiny_demo.forward_batch(
            sessions, [tokens[0], ids_for(tiny_demo, 6), *tokens[1:]], output="logits", return_errors=True
        )
        assert isinstance(results[1], ContextOverflowError)
        assert short.tokens == ids_for(tiny_demo, 25).tolist()
        for i, n in ((0, 0), (2, 1), (3, 2)):
            assert_same(tiny_demo, results[i], tiny_demo.session().forward_prompt_logits(tokens[n]))
        with pytest.raises(ContextOverflowError, match="session 0: position 25"):
            tiny_demo.forward_batch([short, others[0]], [ids_for(tiny_demo, 6), [1]])
        assert others[0].position == 11  # the others are computed all the same


@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 3, 7), (17, 30, 40)])
@pytest.mark.parametrize("output", ["logits", "hidden"])
def test_a_nan_sequence_does_not_affect_others(
    device: str, tmp_path: Path, lengths: tuple[int, ...], output: Any
) -> None:
    """The rows of all sequences go through products together, in tiles with rows of several sequences."""
    small = SmallModel(head_dim=64, output_type="Q8_0")
    path = write_with_nan(tmp_path / "m.gguf", small, 7)
    with Model(path, device=device) as model:
        prompts = [np.arange(8, 8 + n, dtype=np.int32) for n in lengths]
        expected = [model.forward_batch([model.session()], [ids], output=output)[0] for ids in prompts]
        broken = prompts[1].copy()
        broken[0] = 7
        sessions = [model.session() for _ in lengths]
        results = model.forward_batch(
            sessions, [prompts[0], broken, prompts[2]], output=output, return_errors=True
        )
        assert isinstance(results[1], NumericalError)
        assert [s.position for s in sessions] == [lengths[0], 0, lengths[2]]
        # The pages that NaN was written to are used again.
        results[1] = model.forward_batch([sessions[1]], [prompts[1]], output=output)[0]
        few = max(lengths) <= FEW
        for session, result, wanted, ids in zip(sessions, results, expected, prompts, strict=True):
            assert_same(model, result, wanted, few)
            for rows, kept in zip(contents(session), contents(alone(model, ids)), strict=True):
                assert_same(model, np.frombuffer(rows, np.float16), np.frombuffer(kept, np.float16), few)


def test_nothing_is_computed_with_invalid_arguments(tiny_demo: Model, tiny_demo_path: Path) -> None:
    one, two = tiny_demo.session(), tiny_demo.session()
    other = Model(tiny_demo_path, device="cpu")
    rows = "session 0: rows of output"
    invalid: list[tuple[list[Any], list[list[int]], dict[str, Any], str]] = [
        ([one, one], [[1], [2]], {}, "a session appears twice"),
        ([one, two], [[1]], {}, "2 sessions, 1 lists of tokens and 2 outputs"),
        ([one, two], [[1], [1 << 30]], {}, "session 1: token id .* outside the vocabulary"),
        ([one, other.session()], [[1], [2]], {}, "sessions of one model"),
        ([one, 3], [[1], [1]], {}, r"^sessions\[1\] must be a Session, got int$"),
        ([one], [[1]], {"output": "best"}, "output must be one of none, greedy, logits, log_probs"),
        ([one], [[1, 2]], {"output": "logits", "rows": 2}, f"{rows} 'logits' must be between 1 and 1, got 2"),
        ([one], [[1, 2]], {"output": "hidden", "rows": 3}, f"{rows} 'hidden' must be between 1 and 2, got 3"),
        ([one], [[1, 2]], {"output": "log_probs", "rows": 2}, f"{rows} 'log_probs' must be between 1 and 1"),
        (
            [one],
            [[1, 2]],
            {"output": "hidden", "rows": "first"},
            "rows 'first' of output 'hidden' is not kn",
        ),
    ]
    for sessions, tokens, options, message in invalid:
        with pytest.raises((TypeError, ValueError), match=message):
            tiny_demo.forward_batch(sessions, tokens, **options)
    assert one.position == 0
    other.close()


def test_a_native_request_has_no_more_rows_than_tokens(tiny_demo: Model) -> None:
    core, ids = tiny_demo.session().native, np.array([1, 2], np.int32)
    for rows in (-1, 0, 3):
        for make in (_core.Request.greedy, _core.Request.hidden):
            with pytest.raises(ValueError, match=f"an output of {rows} rows is wanted of 2 tokens"):
                make(core, ids, rows)
    with pytest.raises(ValueError, match="an output of 2 rows is wanted of 1 tokens"):
        _core.Request.log_probs(core, ids, 2)


def test_a_prompt_that_finds_no_memory_leaves_the_common_prefix(tiny_demo_path: Path) -> None:
    page = page_bytes(tiny_demo_path, "cpu")
    with Model(tiny_demo_path, device="cpu", kv_memory=3 * page) as model:
        ids = ids_for(model, 30)
        other, session = alone(model, ids), alone(model, ids)
        with pytest.raises(KVMemoryError):
            session.forward_prompt([*ids[:5], *ids_for(model, 2 * PAGE, seed=1)], reuse=True)
        assert session.tokens == list(ids[:5])
        other.close()
        expected = model.session().forward_prompt_logits([*ids[:5], 7])
        np.testing.assert_array_equal(session.forward_prompt_logits([7]), expected)


def test_the_memory_limit_is_named_and_nothing_changes(device: str, tiny_demo_path: Path) -> None:
    page = page_bytes(tiny_demo_path, device)
    with Model(tiny_demo_path, device=device, kv_memory=4 * page) as model:
        first = alone(model, ids_for(model, 3 * PAGE))
        second = model.session()
        with pytest.raises(KVMemoryError, match=f"exceeds kv_memory of {4 * page} bytes"):
            second.forward_prompt(ids_for(model, 2 * PAGE))
        assert (first.position, second.position) == (3 * PAGE, 0)
        results = model.forward_batch(
            [first, second], [ids_for(model, 1), ids_for(model, 1)], return_errors=True
        )
        assert isinstance(results[0], int)
        assert isinstance(results[1], KVMemoryError)
        first.rewind(PAGE)
        second.forward_prompt(ids_for(model, 2 * PAGE))


@pytest.mark.parametrize("shared", [20, 64, 100, 128])
def test_an_open_session_shares_its_full_pages(tiny_demo: Model, shared: int) -> None:
    start = ids_for(tiny_demo, shared)
    first, second = tiny_demo.session(), tiny_demo.session()
    first.forward_prompt(np.concatenate([start, ids_for(tiny_demo, 40, 1)]), reuse=True)
    prompt = np.concatenate([start, ids_for(tiny_demo, 30, 2)])
    logits = second.forward_prompt_logits(prompt, reuse=True)
    known = (shared + 40) // PAGE * PAGE  # tokens in full pages
    assert second.stats()["tokens_reused"] == min(known, shared)
    assert_same(tiny_demo, logits, tiny_demo.session().forward_prompt_logits(prompt))


def test_a_thousand_sessions_store_a_shared_prefix_once(tiny_demo_path: Path) -> None:
    shared, own, sessions = 4 * PAGE + 44, 20, 1000  # 300 tokens; the different ones are in one page
    page = page_bytes(tiny_demo_path, "cpu")
    with Model(tiny_demo_path, device="cpu") as model:
        start = ids_for(model, shared)
        each = [model.session() for _ in range(sessions)]
        prompts = [np.concatenate([start, ids_for(model, own, i + 1)]) for i in range(sessions)]
        model.forward_batch(each, prompts, output="none", reuse=True)
        assert model.stats()["kv_pool_bytes"] == page * (4 + sessions)


def test_the_prefix_cache_is_bounded_and_evicts_the_oldest(device: str, tiny_demo_path: Path) -> None:
    page = page_bytes(tiny_demo_path, device)
    with Model(tiny_demo_path, device=device, prefix_memory=3 * page) as model:
        for seed in range(5):
            with model.session() as session:
                session.forward_prompt(ids_for(model, PAGE + 1, seed), reuse=True)
            assert model.stats()["prefix_bytes"] <= 3 * page
        reused = []
        for seed in (4, 0):
            with model.session() as session:
                session.forward_prompt(np.concatenate([ids_for(model, PAGE + 1, seed), [1]]), reuse=True)
                reused.append(session.stats()["tokens_reused"])
        assert reused == [PAGE + 1, 0]


def test_cached_pages_are_evicted_for_prompts(device: str, tiny_demo_path: Path) -> None:
    page = page_bytes(tiny_demo_path, device)
    with Model(tiny_demo_path, device=device, kv_memory=4 * page, prefix_memory=4 * page) as model:
        for seed in range(6):
            with model.session() as session:
                session.forward_prompt(ids_for(model, 3 * PAGE, seed), reuse=True)


def test_a_fork_and_a_loaded_session_have_a_namespace(tiny_demo_path: Path, tmp_path: Path) -> None:
    with Model(tiny_demo_path, device="cpu") as model:
        prompt = ids_for(model, 2 * PAGE)
        with model.session(prefix_namespace="one") as session:
            session.forward_prompt(prompt, reuse=True)
            session.save(tmp_path / "saved")
            copy = session.fork()
        copy.reset()
        copy.forward_prompt(prompt, reuse=True)
        assert copy.stats()["tokens_reused"] == 2 * PAGE - 1
        with model.load_session(tmp_path / "saved", prefix_namespace="two") as session:
            session.forward_prompt(prompt, reuse=True)
        with model.session(prefix_namespace="two") as session:
            session.forward_prompt(prompt, reuse=True)
            assert session.stats()["tokens_reused"] == 2 * PAGE - 1
        with model.session() as session:
            session.forward_prompt(prompt, reuse=True)
            assert session.stats()["tokens_reused"] == 0
        with pytest.raises(TypeError, match="prefix_namespace must be a str, got int"):
            model.session(prefix_namespace=3)  # type: ignore[arg-type]


def test_prompts_of_one_batch_share_nothing_with_other_namespaces(tiny_demo: Model) -> None:
    prompt = ids_for(tiny_demo, 150)
    sessions = [tiny_demo.session(prefix_namespace=n) for n in ("one", "two", "one", "two")]
    results = tiny_demo.forward_batch(sessions, [prompt] * 4, output="logits", reuse=True)
    for logits in results:
        assert_same(tiny_demo, logits, tiny_demo.session().forward_prompt_logits(prompt))
    assert [s.stats()["tokens_reused"] for s in sessions] == [0, 0, 149, 149]


def test_forward_prompts_matches_forward_prompt(tiny_demo: Model) -> None:
    prompts = [ids_for(tiny_demo, n, n % 5) for n in (1, 3, 40, 17, 40, 90)]
    expected = [tiny_demo.session().forward_prompt_logits(p) for p in prompts]
    tokens = tiny_demo.forward_prompts(prompts)
    assert tokens.tolist() == [int(np.argmax(e)) for e in expected]
    logits = tiny_demo.forward_prompts(prompts, return_logits=True)
    assert logits.dtype == np.float32
    for result, wanted in zip(logits, expected, strict=True):
        assert_same(tiny_demo, result, wanted)
    assert tiny_demo.forward_prompts([]).shape == (0,)
    assert tiny_demo.position == 0
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        tiny_demo.forward_prompts([[1], []])


def test_pages_are_found_only_at_their_positions(tiny_demo: Model) -> None:
    """The page that followed a whole page is not used after a part of that page."""
    first, second = ids_for(tiny_demo, PAGE, 1), ids_for(tiny_demo, PAGE, 2)
    with tiny_demo.session() as session:
        session.forward_prompt(np.concatenate([first, second]), reuse=True)
    prompt = np.concatenate([first[:40], second, [5]])
    with tiny_demo.session() as session:
        logits = session.forward_prompt_logits(prompt, reuse=True)
        assert session.stats()["tokens_reused"] == 40
    assert_same(tiny_demo, logits, tiny_demo.session().forward_prompt_logits(prompt))
