"""Passes and dispatches that are divided by their work, so that no command buffer runs too long.

On a Mac these tests are skipped.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.closeness import states_of_texts
from support.engine_options import set_engine_options
from support.kernels.emulated_gpu import open_with, require_emulator
from support.small_models import ENCODERS, MODELS, SmallModel, write

from metal_prefill import DeviceError

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_device")]

gpu = require_emulator()
PROMPT = [5 + 7 * i for i in range(40)]


def steps() -> list[int]:
    """Return the steps of each command buffer of the last pass, as the watchdog counts them."""
    label = gpu.history()[-1].label
    return [
        sum(d.threads + d.barriers * d.group[0] for d in buffer.dispatches)
        for buffer in gpu.history()
        if buffer.label == label
    ]


LONG = [3 + i for i in range(96)]
WORK = 6e6  # multiply-adds of a command buffer: about a tenth of that prompt


def test_a_long_pass_is_split_by_its_work_and_is_bit_identical(
    deep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_with(deep_path) as model, model.session() as session:
        whole = session.forward_prompt_logits(LONG)
        most = max(steps())
    limit = most // 4
    with open_with(deep_path, watchdog_steps=limit) as model, model.session() as session:
        with pytest.raises(
            DeviceError,
            match=r"96 tokens at position 0: .*GPU Timeout.*AGX_RELAX_CDM_CTXSTORE_TIMEOUT is '1'",
        ):
            session.forward_prompt_logits(LONG)
        assert session.position == 0
    set_engine_options(monkeypatch, metal_buffer_work=WORK)
    with open_with(deep_path, watchdog_steps=limit) as model, model.session() as session:
        np.testing.assert_array_equal(session.forward_prompt_logits(LONG), whole)
        assert session.stats()["command_buffers"] == len(steps()) > 4


@pytest.mark.parametrize(
    ("shape", "lengths", "work", "family"),
    [
        # Three heads to a head of K, so that the heads of a token may be in two dispatches.
        (SmallModel(dim=64, heads=9, kv_heads=3, head_dim=64), (240,), WORK / 2, 9),
        (replace(MODELS["gemma3"], layers=3, window=64), (240,), WORK / 2, 9),
        # Tiles of texts of unequal lengths, the longest first, with ALiBi, and on matrix units.
        (ENCODERS["jina-bert-v2"], (200, 9, 77, 130), WORK / 4, 9),
        (replace(ENCODERS["nomic-bert"], dim=192, head_dim=64), (200, 9, 77, 130), WORK / 4, 10),
    ],
    ids=["heads", "window", "texts", "texts on matrix units"],
)
def test_attention_is_split_by_its_work_and_is_bit_identical(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: SmallModel,
    lengths: tuple[int, ...],
    work: float,
    family: int,
) -> None:
    file, texts = write(tmp_path / "m.gguf", shape), [np.arange(5, 5 + n) for n in lengths]

    def run() -> tuple[list[Any], list[int]]:
        with open_with(file, apple_family=family) as opened:
            states = states_of_texts(opened, texts)
        kernel = "attention_tensor" if family == 10 else "attention_prefill"
        return states, [d.threads for b in gpu.history() for d in b.dispatches if d.kernel.startswith(kernel)]

    whole, threads = run()
    set_engine_options(monkeypatch, metal_buffer_work=work)
    cut, cut_threads = run()
    for state, expected in zip(cut, whole, strict=True):
        np.testing.assert_array_equal(state, expected)
    assert len(cut_threads) >= len(threads) + 2 > 2
    assert max(cut_threads) < max(threads)


def test_a_failure_in_any_command_buffer_of_a_pass_changes_nothing(
    deep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_engine_options(monkeypatch, metal_buffer_work=WORK)
    with open_with(deep_path) as model, model.session() as session:
        session.forward_prompt(PROMPT)
        wanted = session.forward_prompt_logits(LONG)
        buffers = int(session.stats()["command_buffers"])
        session.rewind(len(PROMPT))
        for nth, dispatches in ((1, 0), (1, 7), (2, 0), (buffers, 3)):
            gpu.fail_command_buffer(nth, message="the GPU had enough", dispatches=dispatches)
            with pytest.raises(DeviceError, match=r"96 tokens at position 40: the GPU had enough"):
                session.forward_prompt(LONG)
            assert session.position == len(PROMPT)
        np.testing.assert_array_equal(session.forward_prompt_logits(LONG), wanted)


def test_an_error_during_encoding_waits_for_committed_work(
    deep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer of the results is made late in a pass: without it, command buffers are already running."""
    set_engine_options(monkeypatch, metal_buffer_work=WORK)
    with open_with(deep_path) as model, model.session() as session:
        session.forward_prompt_logits(LONG)
        before = gpu.counters()
        gpu.fail_allocation(2)  # after that of the logits
        with pytest.raises(DeviceError, match=r"cannot allocate .* 'candidates'"):
            session.forward_prompt(LONG)
        committed = gpu.counters().command_buffers - before.command_buffers
        assert committed > 2
        assert session.position == len(LONG)
