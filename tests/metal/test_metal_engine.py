"""The Metal engine's use of the GPU: dispatches, storage modes, pools, pipelines, failures.

These tests need the emulator; on a Mac they are skipped, and those of sessions run.
"""

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.kernels.emulated_gpu import require_emulator
from support.small_models import SmallModel, write

from metal_prefill import ContextOverflowError, DeviceError, KVMemoryError, Model, _core

pytestmark = pytest.mark.emulator

gpu = require_emulator()
HOST_BUFFERS = {
    "ids", "rows", "tiles", "pages", "host_logits", "result", "targets", "log_probs", "hidden", "weights",
    "staging", "qkv_bias",
}  # fmt: skip


@pytest.fixture(autouse=True)
def history(own_device: None) -> None:
    gpu.set_history_depth(4)


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model(path, device="metal") as opened:
        yield opened


def prompt(n: int, start: int = 5) -> list[int]:
    return [(start + 7 * i) % 320 for i in range(n)]


def test_a_chunk_is_one_command_buffer(path: Path) -> None:
    with Model(path, device="metal", chunk_tokens=64) as model:
        model.forward_prompt(prompt(64))
        before = gpu.counters()
        model.forward_prompt(prompt(130))
        assert gpu.counters().command_buffers - before.command_buffers == 3
        # A chunk that more follow ends with the K and V of its last layer.
        middle = gpu.history()[-2].dispatches
        assert middle[-1].kernel == "rope_append_f16"
        assert len(middle) == 1 + 8 * (model.config.n_layers - 1) + 3


def test_layers_are_dispatched_in_order(demo_path: Path) -> None:
    with Model(demo_path, device="metal") as model:
        model.forward_prompt(prompt(40))
    layer = [
        "rmsnorm_f16", "matmul_q4_0_narrow", "rope_append_f16", "attention_prefill_f16_64",
        "matmul_q4_0_narrow", "rmsnorm_f16", "matmul_swiglu_q4_0_wide", "matmul_q4_0_narrow",
    ]  # fmt: skip
    assert [dispatch.kernel for dispatch in gpu.history()[-1].dispatches[1:33]] == layer * 4


def test_dependent_dispatches_are_separated_by_barriers(tmp_path: Path) -> None:
    types = {"*": "Q4_K", "*attn_v*": "Q6_K"}
    path = write(tmp_path / "m.gguf", SmallModel(dim=256, head_dim=64, ffn=256, types=types))
    with Model(path, device="metal") as model:
        model.forward_prompt([1, 2, 3])
    overlapping = [d.kernel for d in gpu.history()[-1].dispatches[1:] if not d.after_barrier]
    assert overlapping == ["multi_token_matvec_q6_k"] * model.config.n_layers  # overlaps that of q and k


def private_and_shared() -> tuple[set[str], set[str]]:
    buffers = gpu.live_buffers()
    return (
        {b.label for b in buffers if b.storage_mode == "private"},
        {b.label for b in buffers if b.storage_mode == "shared"},
    )


def test_scratch_is_private_and_host_accessible_buffers_are_shared(model: Model) -> None:
    model.session().forward_prompt_logits(prompt(300))
    model.forward_prompt(prompt(3))
    model.score(prompt(40))
    private, shared = private_and_shared()
    assert shared <= HOST_BUFFERS
    assert private == {
        "x",
        "normed",
        "projected",
        "partial",
        "att",
        "ffn",
        "logits",
        "candidates",
        "kv_pages",
        "rope_table",
    }


def test_weights_are_mapped_not_copied(model: Model, path: Path) -> None:
    model.forward_prompt([1])
    assert {b.label for b in gpu.live_buffers() if b.no_copy} == {"weights"}
    assert model.stats()["weights_mapped_bytes"] <= path.stat().st_size + 65536
    assert model.stats()["weights_copied_bytes"] == 0


def test_debug_mode_makes_every_intermediate_readable(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The host reads memory of the GPU alone by copies, which a trace makes in either mode."""
    tokens = []
    for value in ("0", "1"):
        monkeypatch.setenv("GPU_DEBUG", value)
        with Model(path, device="metal") as model, model.session() as session:
            tokens.append(session.forward_prompt(prompt(40)))
            session.reset()
            private, _ = traced(session)
            assert ("projected" in private) == (value == "0")
            if value == "1":
                assert private == set()
    assert tokens[0] == tokens[1]


def traced(session: Any) -> tuple[set[str], Any]:
    """Trace a prompt; return the labels of private buffers, and the dispatch of attention in a layer."""
    inspector = session.native.inspector()
    kernels = [d.kernel for d in inspector.plan(40)]
    attention, head = kernels.index("attention_prefill_f16_64"), kernels.index("argmax_stage1")
    token, dispatches = inspector.trace(np.array(prompt(40), np.int32), contents={attention, head})
    logits = dispatches[head].before(0).view(np.float32)
    assert int(np.argmax(logits[:320])) == token
    return private_and_shared()[0], dispatches[attention]


def test_a_trace_copies_each_buffer_of_a_dispatch_once(model: Model) -> None:
    """The pages of keys and of values are in one."""
    gpu.set_history_depth(256)
    with model.session() as session:
        _, attention = traced(session)
    copied = {"projected", "kv_pages", "rope_table", "att", *("logits", "candidates")}
    copies = [buffer.label for buffer in gpu.history()].count("a download")
    assert copies == 2 * len(copied)
    keys, values, out = (attention.buffers.index(name) for name in ("keys", "values", "att"))
    np.testing.assert_array_equal(attention.before(keys), attention.after(keys))
    assert len(attention.after(keys)) > len(attention.after(values)) > 0
    assert not np.array_equal(attention.before(out), attention.after(out))


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_second_prompt_of_the_same_size_allocates_nothing(model: Model, tokens: int) -> None:
    session = model.session()
    session.forward_prompt(prompt(tokens))
    session.reset()
    before = gpu.counters().buffers
    session.forward_prompt(prompt(tokens, 11))
    assert gpu.counters().buffers == before
    assert session.stats()["allocations"] == 0


def test_memory_of_one_token_is_small(model: Model) -> None:
    token = model.forward_prompt([3])
    model.forward_token_greedy(token)
    assert 0 < model.stats()["pass_memory_bytes"] < 1_000_000


def test_buffers_are_freed_with_the_last_session(path: Path) -> None:
    with Model(path, device="metal") as model:
        model.forward_prompt(prompt(200))
        with model.session() as other:
            other.forward_prompt([1])
        assert "ffn" in private_and_shared()[0], "freed while a session is open"
    assert gpu.live_buffers() == []
    assert gpu.live_objects() == 0


def test_hundreds_of_mixed_calls_leak_nothing(tmp_path: Path) -> None:
    shape = SmallModel(layers=1, dim=32, heads=1, kv_heads=1, ffn=32)
    model = Model(write(tmp_path / "m.gguf", shape), device="metal")
    session = model.session()
    too_long = prompt(model.config.context_length + 1)

    def calls() -> int:
        session.reset()
        token = session.forward_prompt(prompt(2))
        token = session.forward_token_greedy(token)
        session.forward_token(token)
        session.forward_prompt_logits(prompt(10))
        session.rewind(1)
        with model.session() as other:
            with pytest.raises(ContextOverflowError):
                other.forward_prompt(too_long)
            other.forward_token(3)
        with pytest.raises(ValueError, match="empty"):
            session.forward_prompt([])
        return 11  # two of them open and close a session

    made = calls()
    objects, memory = gpu.live_objects(), [buffer.length for buffer in gpu.live_buffers()]
    while made < 300:
        made += calls()
    assert gpu.live_objects() == objects
    assert [buffer.length for buffer in gpu.live_buffers()] == memory
    model.close()


@pytest.mark.parametrize("family", [7, 8, 9])
def test_every_family_gives_the_same_token(path: Path, family: int) -> None:
    gpu.set_limits(gpu.Limits(apple_family=family))
    with Model(path, device="metal") as model, Model(path, device="cpu", compute="f32") as reference:
        assert model.forward_prompt(prompt(90)) == reference.forward_prompt(prompt(90))


def test_a_file_larger_than_a_buffer_is_mapped_in_overlapping_views(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", compute="f32") as reference:
        expected = reference.forward_prompt(prompt(40))
    gpu.set_limits(gpu.Limits(max_buffer_length=512 * 1024))
    with Model(demo_path, device="metal") as model:
        views = [b for b in gpu.live_buffers() if b.no_copy]
        assert len(views) > 4
        assert all(view.length <= 512 * 1024 for view in views)
        assert model.forward_prompt(prompt(40)) == expected


def test_a_tensor_larger_than_a_buffer_is_an_error_that_names_it(demo_path: Path) -> None:
    gpu.set_limits(gpu.Limits(max_buffer_length=64 * 1024))
    with pytest.raises(DeviceError, match=r"token_embd\.weight|blk\.\d"):
        Model(demo_path, device="metal")
    assert gpu.live_objects() == 0


def test_every_failed_allocation_is_an_error_and_the_next_call_works(path: Path) -> None:
    with Model(path, device="metal") as model:
        before = gpu.counters().buffers
        expected = model.forward_prompt(prompt(70))
        needed = gpu.counters().buffers - before
    assert needed >= 10  # rope table, pages, the tables of the pass, and the activations
    for nth in range(1, needed + 1):
        with Model(path, device="metal") as model:
            gpu.fail_allocation(nth)
            with pytest.raises(DeviceError, match=r"cannot allocate .* out of memory"):
                model.forward_prompt(prompt(70))
            assert model.position == 0
            assert model.forward_prompt(prompt(70)) == expected


LARGE_PAGES = SmallModel(  # of 2 MiB: the first four fill the initial pool
    layers=4, heads=8, kv_heads=8, head_dim=256, ffn=64, vocab=1024, context=640
)


@pytest.fixture
def large_pages(tmp_path: Path) -> Iterator[Model]:
    path = write(tmp_path / "large.gguf", LARGE_PAGES)
    with Model(path, device="metal", chunk_tokens=64) as opened:
        yield opened


@pytest.mark.parametrize("failure", ["allocation", "command buffer"])
def test_a_failure_while_the_cache_grows_keeps_its_contents(large_pages: Model, failure: str) -> None:
    model = large_pages
    session = model.session()
    token = session.forward_prompt(prompt(60))
    expected = session.forward_token_greedy(token)
    session.rewind(60)
    if failure == "allocation":
        gpu.fail_allocation()
    else:
        gpu.fail_command_buffer(message="no room to grow")
    with pytest.raises(
        DeviceError, match=r"'kv_pages': out of memory|growth of the KV cache.*no room to grow"
    ):
        session.forward_prompt(prompt(250))
    assert session.position == 60
    assert session.forward_token_greedy(token) == expected


def test_a_growing_cache_keeps_its_contents(large_pages: Model) -> None:
    first = large_pages.session()
    logits = first.forward_prompt_logits(prompt(66))
    first.rewind(65)
    others = [large_pages.session() for _ in range(3)]
    for other in others:
        other.forward_prompt(prompt(66, 9))
    labels = [b.label for b in gpu.live_buffers()]
    assert labels.count("kv_pages") == 1
    np.testing.assert_allclose(first.forward_token(prompt(66)[65]), logits, atol=1e-3 * np.abs(logits).max())


def test_the_pool_is_no_larger_than_a_buffer(tmp_path: Path) -> None:
    path = write(tmp_path / "large.gguf", LARGE_PAGES)
    gpu.set_limits(gpu.Limits(max_buffer_length=5 << 20))
    with Model(path, device="metal") as model:
        model.forward_prompt(prompt(128))
        with model.session() as other, pytest.raises(KVMemoryError, match=f"{4 << 20} bytes .2 pages"):
            other.forward_prompt(prompt(1))
        assert model.position == 128


@pytest.mark.parametrize(
    ("options", "alone", "per_layer"), [({}, 7, 7), ({"fused_norm": True}, 5, 7)], ids=str
)
def test_the_number_of_dispatches_does_not_grow_with_the_number_of_sequences(
    path: Path, options: dict[str, Any], alone: int, per_layer: int
) -> None:
    """The exception is one token alone, whose norms are part of the products."""
    with Model(path, device="metal", **options) as model:
        layers = model.config.n_layers
        sessions = [model.session() for _ in range(9)]
        for session in sessions[::3]:
            session.forward_prompt(prompt(5))
        counts: dict[str, set[float]] = {"tokens": set(), "a few": set(), "prompts": set(), "scores": set()}
        model.forward_batch(sessions[:1], [[3]])
        assert sessions[0].stats()["dispatches"] == alone * layers + 5
        for n in (2, 9):
            some = sessions[:n]
            model.forward_batch(some, [[3]] * n)
            counts["tokens"].add(some[0].stats()["dispatches"])
            model.forward_batch(some, [prompt(2 + i % 7) for i in range(n)], output="logits")
            counts["a few"].add(some[0].stats()["dispatches"])
            model.forward_batch(some, [prompt(9 + i % 7) for i in range(n)])
            counts["prompts"].add(some[0].stats()["dispatches"])
            assert some[0].stats()["command_buffers"] == 1
            model.forward_batch(some, [prompt(3)] * n, output="log_probs")
            counts["scores"].add(some[0].stats()["dispatches"])
        assert counts["tokens"] == {per_layer * layers + 5}  # embedding, norm, head and argmax
        assert {len(c) for c in counts.values()} == {1}, counts


def test_a_table_of_sequences_is_written_once_for_all_layers(model: Model) -> None:
    """The host copies ids and tables before the pass; a second pass of this size creates no buffers."""
    sessions = [model.session() for _ in range(4)]
    for _ in range(2):
        before = gpu.counters().buffers
        model.forward_batch(sessions, [prompt(n) for n in (1, 8, 3, 2)])
    assert gpu.counters().buffers == before
    assert sessions[0].stats()["allocations"] == 0
    assert {b.label for b in gpu.live_buffers()} >= {"ids", "rows", "pages"}
    assert "tiles" not in {b.label for b in gpu.live_buffers()}  # of prompts alone


@pytest.mark.parametrize(("sequences", "each"), [(8, 1), (17, 1), (5, 3)])
def test_tiles_of_many_sequences_have_the_bits_that_each_has_alone(
    model: Model, sequences: int, each: int
) -> None:
    tile = _core.shader_constants["MANY_TOKEN_TILE"]
    rng = np.random.default_rng(sequences)
    sessions = [model.session() for _ in range(sequences)]
    tokens = [rng.integers(1, 300, each) for _ in sessions]
    for i, session in enumerate(sessions):
        session.forward_prompt(rng.integers(1, 300, 1 + i % 5))
    forks = [session.fork() for session in sessions]
    alone = [fork.forward_prompt_logits(ids) for fork, ids in zip(forks, tokens, strict=True)]
    together = model.forward_batch(sessions, tokens, output="logits")
    (grid, *_) = [
        d.grid for d in gpu.history()[-1].dispatches if d.kernel.startswith("multi_token_matvec_swiglu")
    ]
    for logits, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(logits, expected)
    rows = sequences * each
    assert grid[0] == (1 if rows <= 8 else ceil(rows / tile))
