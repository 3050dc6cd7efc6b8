"""Threads of an engine next to those that use it: residency, writing pipelines, reading a file ahead.

They check results, and are what ThreadSanitizer observes (``tools/check/sanitize.sh thread``).
"""

from pathlib import Path

import numpy as np
import pytest
from support.kernels.emulated_gpu import require_emulator
from support.threads import at_once, running_threads

from metal_prefill import DeviceError, Model, synth

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_device")]

gpu = require_emulator()
PROMPT = [5 + 7 * i for i in range(12)]
LENGTHS = (40, 70, 130, 190, 250)  # of contexts; each needs more pages, so that the cache grows


def test_caches_grow_while_residency_is_requested(path: Path) -> None:
    """A thread requests residency each half second; two others make and release buffers."""
    prompts = [np.arange(n) % 300 for n in LENGTHS]
    with Model(path, device="metal") as model:
        alone = [model.session().forward_prompt_logits(prompt).tobytes() for prompt in prompts]

    gpu.set_limits(gpu.Limits(residency_lapse_ms=200))  # so that requests have an effect
    for _ in range(3):
        with Model(path, device="metal") as model:

            def run(user: int, model: Model = model) -> list[bytes]:
                with model.session() as session:
                    found = []
                    for prompt in prompts:
                        session.reset()
                        found.append(session.forward_prompt_logits(prompt).tobytes())
                return found

            assert at_once(run, 2) == [alone, alone]
    assert gpu.resident_bytes() == 0


def test_models_are_opened_and_closed_while_archives_are_written(path: Path, own_cache: Path) -> None:
    """All of them write the same file; the last one to rename it wins."""

    def use(user: int) -> bytes:
        with Model(path, device="metal") as model:
            return model.session().forward_prompt_logits(PROMPT).tobytes()

    logits = at_once(use, 3)
    with Model(path, device="metal") as model:
        assert model.stats()["pipelines_compiled"] == 0
        logits.append(model.session().forward_prompt_logits(PROMPT).tobytes())
    assert len(set(logits)) == 1
    assert [file.suffix for file in own_cache.rglob("*") if file.is_file()] == [".pipelines"]


def test_a_failed_open_ends_the_thread_that_reads_the_file(tmp_path: Path) -> None:
    """It must not read a mapping that is gone."""
    path = synth.synthesize(
        tmp_path / "m.gguf", preset="tiny", layers=8, dim=512, heads=8, kv_heads=2, head_dim=64, vocab=320
    )
    with Model(path, device="metal") as model:  # the emulator starts its own threads
        model.forward_prompt(PROMPT)
    before = running_threads()
    gpu.set_limits(gpu.Limits(broken_kernels={"argmax_stage2"}))
    for _ in range(5):
        with pytest.raises(DeviceError, match="argmax_stage2"):
            Model(path, device="metal")
        assert running_threads() == before
    assert gpu.live_objects() == 0
