"""Threads of an engine next to those that use it: residency, writing pipelines, reading a file ahead.

They check results, and are what ThreadSanitizer observes (``tools/check/sanitize.sh thread``).
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.emulated_gpu import require_emulator

from metal_prefill import DeviceError, Model, synth

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_device")]

gpu = require_emulator()
PROMPT = [5 + 7 * i for i in range(12)]
LENGTHS = (40, 70, 130, 190, 250)  # of contexts; each needs more pages, so that the cache grows


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("helper_threads")
    return synth.synthesize(folder / "m.gguf", preset="tiny", layers=2, vocab=320)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def at_once(*tasks: Callable[[], object]) -> None:
    """Run each task on a thread of its own; raises what the first of them raised."""
    errors: list[BaseException] = []

    def run(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    users = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for user in users:
        user.start()
    for user in users:
        user.join()
    if errors:
        raise errors[0]


def test_caches_grow_while_residency_is_requested(path: Path) -> None:
    """A request each half second, and buffers that come and go on two other threads."""
    prompts = [np.arange(n) % 300 for n in LENGTHS]
    with Model(path, device="metal") as model:
        alone = [model.session().forward_prompt_logits(prompt).tobytes() for prompt in prompts]

    gpu.set_limits(gpu.Limits(residency_lapse_ms=200))  # so that requests have an effect
    for _ in range(3):
        with Model(path, device="metal") as model:
            found: dict[int, list[bytes]] = {}

            def run(user: int, model: Model = model, found: dict[int, list[bytes]] = found) -> None:
                with model.session() as session:
                    for prompt in prompts:
                        session.reset()
                        logits = session.forward_prompt_logits(prompt)
                        found.setdefault(user, []).append(logits.tobytes())

            at_once(lambda: run(0), lambda: run(1))
            assert found == {0: alone, 1: alone}
    assert gpu.resident_bytes() == 0


def test_models_are_opened_and_closed_while_archives_are_written(path: Path, own_cache: Path) -> None:
    """All of them write the same file; the last one to rename it wins."""
    logits: list[bytes] = []

    def use() -> None:
        with Model(path, device="metal") as model:
            logits.append(model.session().forward_prompt_logits(PROMPT).tobytes())

    at_once(use, use, use)
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
    before = threads()
    gpu.set_limits(gpu.Limits(broken_kernels={"argmax_stage2"}))
    for _ in range(5):
        with pytest.raises(DeviceError, match="argmax_stage2"):
            Model(path, device="metal")
        assert threads() == before
    assert gpu.live_objects() == 0
