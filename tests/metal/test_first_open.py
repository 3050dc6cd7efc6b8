"""Opening a model compiles the kernels of its types, and none that an earlier process compiled."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.engine_options import set_engine_options
from support.kernels.emulated_gpu import require_cpu_executor, require_emulator
from support.threads import running_threads

from metal_prefill import Model, synth
from metal_prefill.files import GGUFFile
from metal_prefill.storage import _cache_folder

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_device")]

gpu = require_emulator()
PROMPT = [5 + 7 * i for i in range(12)]


def compiled_by_opening(path: Path) -> tuple[int, bytes]:
    """Return how many pipelines opening the model compiles, and the logits of a prompt."""
    before = gpu.counters().compiled_pipelines
    with Model(path, device="metal") as model:
        assert (gpu.counters().compiled_pipelines > before) == (model.stats()["pipelines_compiled"] > 0)
        compiled = int(model.stats()["pipelines_compiled"])
        return compiled, model.session().forward_prompt_logits(PROMPT).tobytes()


def archives(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.pipelines"))


def test_shaders_for_the_types_and_heads_of_the_model_are_compiled_on_all_threads(path: Path) -> None:
    with GGUFFile(path) as file:
        types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) == 2}
    gpu.forget_compiled_libraries()
    with Model(path, device="metal"):
        libraries = gpu.compiled_libraries()
    assert {library.concurrent for library in libraries} == {True}
    kernels = {library.name: library.kernels for library in libraries}
    assert kernels["matmul.metal"] == 5 * len(types)
    assert kernels["matvec.metal"] == 9 * len(types)  # of them four with 2 or 4 rows a simdgroup
    assert kernels["embed.metal"] == len(types)
    # With and without rope, and the kernel that combines the shares.
    assert kernels["attention_decode.metal"] == 2 + 1
    assert kernels["attention_prefill.metal"] == 1


def checksum(content: bytes) -> int:
    """FNV-1a of 64 bits."""
    value = 14695981039346656037
    for byte in content:
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


def rewritten(archive: Path, changed: bytes, damage: str) -> tuple[Path, bytes]:
    """Return the file of an archive with other contents, and its name."""
    lines = changed.splitlines(keepends=True)  # the last one is the emulator's own checksum
    if damage == "a pipeline is missing":  # of an archive whose name has the right checksum
        content = b"".join(lines[:-2])
        content += f"{checksum(content)}\n".encode()
        return archive.with_name(f"{archive.name.split('-')[0]}-{checksum(content):016x}.pipelines"), content
    if damage == "another checksum":  # the emulator opens it: macOS may do that with any bytes
        content = b"".join([*lines[:-1], b"something else\n"])
        return archive, content + f"{checksum(content)}\n".encode()
    half = len(changed) // 2
    flipped = changed[:half] + bytes([changed[half] ^ 1]) + changed[half + 1 :]
    return archive, {"a byte": flipped, "half": changed[:half], "nothing left": b""}[damage]


@pytest.mark.parametrize(
    "damage", ["a byte", "half", "nothing left", "another checksum", "a pipeline is missing"]
)
def test_nothing_is_compiled_the_second_time_unless_the_archive_is_damaged(
    path: Path, own_cache: Path, damage: str
) -> None:
    wanted = compiled_by_opening(path)
    assert wanted[0] > 20
    (archive,) = archives(own_cache)
    whole = archive.read_bytes()
    archive.unlink()
    name, content = rewritten(archive, whole, damage)
    name.write_bytes(content)
    assert compiled_by_opening(path) == wanted
    assert [found.read_bytes() for found in archives(own_cache)] == [whole]
    assert compiled_by_opening(path) == (0, wanted[1])
    assert not list(own_cache.rglob("*.part"))


def test_archives_are_specific_to_device_version_and_kernels(
    path: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = synth.synthesize(tmp_path / "other.gguf", preset="tiny", layers=2, vocab=320, tensor_type="Q8_0")
    compiled = Counter[str]()
    compiled["first"] = compiled_by_opening(path)[0]
    compiled["model"] = compiled_by_opening(other)[0]
    gpu.set_limits(gpu.Limits(name="Apple M9"))
    compiled["device"] = compiled_by_opening(path)[0]
    gpu.set_limits(gpu.Limits())
    monkeypatch.setattr(_cache_folder, "version", lambda: "99.0")
    compiled["version"] = compiled_by_opening(path)[0]
    assert all(compiled.values()), compiled
    assert len(archives(own_cache)) == len(compiled)
    monkeypatch.undo()
    monkeypatch.setenv("METAL_PREFILL_CACHE", str(own_cache))
    assert compiled_by_opening(path)[0] == compiled_by_opening(other)[0] == 0


def test_the_least_recently_used_archives_are_deleted(
    path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_by_opening(path)
    (used,) = archives(own_cache)
    others = [own_cache / "pipelines" / name / f"{name}.pipelines" for name in ("older", "newer", "newest")]
    for days, other in zip((30, 20, 10), others, strict=True):
        other.parent.mkdir()
        other.write_bytes(bytes(1000))
        os.utime(other, (time.time() - days * 86400,) * 2)
    os.utime(used, (0, 0))
    notes = own_cache / "pipelines" / "older" / "notes.txt"
    notes.write_text("not ours")
    os.utime(notes, (0, 0))
    monkeypatch.setattr("metal_prefill.engine.PIPELINE_LIMIT", used.stat().st_size + 1500)
    assert compiled_by_opening(path)[0] == 0  # reading makes it the most recently used one
    assert archives(own_cache) == sorted([used, others[2]])
    assert notes.exists()
    assert not others[1].parent.exists()


def test_pipelines_are_compiled_each_time_without_a_writable_folder(path: Path, own_cache: Path) -> None:
    own_cache.write_text("this is a file")
    first = compiled_by_opening(path)
    assert first[0] > 20
    assert compiled_by_opening(path) == first
    assert own_cache.read_text() == "this is a file"


def test_shader_validation_neither_reads_nor_writes_archives(
    path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTL_SHADER_VALIDATION", "1")
    assert compiled_by_opening(path)[0] > 20
    assert archives(own_cache) == []
    monkeypatch.setenv("MTL_SHADER_VALIDATION", "0")
    compiled_by_opening(path)
    monkeypatch.setenv("MTL_SHADER_VALIDATION", "1")
    assert compiled_by_opening(path)[0] > 20


def blocked_archive(path: Path, own_cache: Path) -> Path:
    """Delete the archive of a model; return a pipe without a reader in place of the next one's file."""
    compiled_by_opening(path)
    (archive,) = archives(own_cache)
    archive.unlink()
    pipe = archive.with_name(f"{archive.name.partition('-')[0]}.{os.getpid()}.part")
    os.mkfifo(pipe)
    return pipe


def test_opening_does_not_wait_until_the_archive_is_written(path: Path, own_cache: Path) -> None:
    """The writer blocks on a pipe without a reader."""
    pipe = blocked_archive(path, own_cache)
    models: list[Model] = []
    user = threading.Thread(target=lambda: models.append(Model(path, device="metal")))
    user.start()
    user.join(60)
    opened = not user.is_alive()
    end = os.open(pipe, os.O_RDWR)  # the writer continues
    pipe.unlink()
    os.close(end)
    user.join()
    models[0].close()
    assert opened


# Unblocks the writer when its input ends; after a while in any case, if this process cannot run.
UNBLOCK = """
import os, select, sys, time
select.select([0], [], [], 20)
end = os.open(sys.argv[1], os.O_RDWR)
os.unlink(sys.argv[1])
time.sleep(0.5)
"""


@pytest.mark.parametrize("closes", [True, False], ids=["close", "last reference"])
def test_other_threads_run_while_a_model_waits_for_the_archive(
    path: Path, own_cache: Path, closes: bool
) -> None:
    pipe = blocked_archive(path, own_cache)
    models = [Model(path, device="metal")]
    with subprocess.Popen([sys.executable, "-S", "-c", UNBLOCK, str(pipe)], stdin=subprocess.PIPE) as child:
        ending = threading.Thread(target=models[0].close if closes else models.clear)
        ending.start()
        ending.join(0.5)
        runs_meanwhile = ending.is_alive() and pipe.exists()
        assert child.stdin is not None
        child.stdin.close()
        ending.join()
    assert runs_meanwhile


def mapped_bytes_in_memory(path: Path) -> int:
    """Return how much of a file the pages of this process have, by the mapping with the most of it."""
    found = [0]
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
                is_file = line.rstrip().endswith(str(path))
            elif is_file and line.startswith("Rss:"):
                found.append(1024 * int(line.split()[1]))
    return max(found)


def test_a_file_is_read_completely_before_it_becomes_resident(tmp_path: Path) -> None:
    require_cpu_executor("leaves pages of a file unread")
    path = synth.synthesize(tmp_path / "m.gguf", preset="tiny", layers=8, dim=256, ffn=1024, vocab=320)
    with Model(path, device="metal"):
        assert mapped_bytes_in_memory(path) >= path.stat().st_size
    gpu.set_limits(gpu.Limits(working_set_bytes=path.stat().st_size // 2))
    with Model(path, device="metal"):  # its start would be evicted again
        assert mapped_bytes_in_memory(path) < path.stat().st_size // 2


def test_the_emulator_stores_pipelines_only_on_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METAL_PREFILL_CACHE", raising=False)
    assert _cache_folder.pipeline_folder(emulated=True) == ""
    assert Path(_cache_folder.pipeline_folder(emulated=False)).parent.name == "pipelines"


def test_weights_and_cache_stay_resident(path: Path) -> None:
    with Model(path, device="metal") as model:
        weights = model.stats()["weights_mapped_bytes"] + model.stats()["weights_copied_bytes"]
        assert model.stats()["resident_bytes"] == gpu.resident_bytes() == weights
        model.forward_prompt(PROMPT)
        pages = [buffer.length for buffer in gpu.live_buffers() if buffer.label == "kv_pages"]
        assert gpu.resident_bytes() == weights + sum(pages) > weights
        model.forward_prompt(np.arange(200))  # the pages move to a larger buffer
        grown = [buffer.length for buffer in gpu.live_buffers() if buffer.label == "kv_pages"]
        assert model.stats()["resident_bytes"] == gpu.resident_bytes() == weights + sum(grown)
    assert gpu.resident_bytes() == 0


@pytest.mark.parametrize(("seconds", "faults"), [(None, 0), (0.1, 1)], ids=["default", "a long idle time"])
def test_memory_stays_resident_during_pauses(
    path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float | None, faults: int
) -> None:
    if seconds is not None:
        set_engine_options(monkeypatch, metal_resident_seconds=seconds)
    gpu.set_limits(gpu.Limits(residency_lapse_ms=1500))
    with Model(path, device="metal") as model:
        model.forward_prompt(PROMPT)
        before = gpu.counters().residency_faults
        time.sleep(2)
        model.forward_prompt(PROMPT)
        assert gpu.counters().residency_faults - before == faults


def test_the_residency_thread_ends_with_the_model(path: Path) -> None:
    with Model(path, device="metal") as model:  # the emulator starts its own
        model.forward_prompt(PROMPT)
    before = running_threads()
    model = Model(path, device="metal")
    assert running_threads() == before
    for _ in range(2):
        model.forward_prompt(PROMPT)
        assert running_threads() == before + 1
    model.close()
    assert running_threads() == before


@pytest.mark.parametrize("limits", [{"residency_sets": False}, {"working_set_bytes": 1 << 16}])
def test_memory_is_not_kept_resident_without_support(path: Path, limits: dict[str, int]) -> None:
    gpu.set_limits(gpu.Limits(**limits))
    with Model(path, device="metal") as model:
        model.forward_prompt(PROMPT)
        assert model.stats()["resident_bytes"] == gpu.resident_bytes() < model.stats()["weights_mapped_bytes"]


def test_models_of_a_process_share_the_memory_that_may_stay_resident(path: Path) -> None:
    weights = path.stat().st_size
    gpu.set_limits(gpu.Limits(working_set_bytes=weights * 3 // 2))
    with Model(path, device="metal") as one, Model(path, device="metal") as other:
        held = [model.stats()["resident_bytes"] for model in (one, other)]
        assert sum(held) == gpu.resident_bytes() <= weights * 3 // 2
        assert held[0] > 0.9 * weights
    assert gpu.resident_bytes() == 0
    with Model(path, device="metal") as model:
        assert model.stats()["resident_bytes"] == held[0]


def test_a_lost_set_is_a_small_part_of_the_model(tmp_path: Path) -> None:
    """A Mac takes and returns sets and buffers whole; layers stay whole, too."""
    path = synth.synthesize(tmp_path / "m.gguf", preset="tiny", layers=24, dim=128, vocab=320)
    working_set = path.stat().st_size * 5 // 4
    gpu.set_limits(gpu.Limits(working_set_bytes=working_set))
    with Model(path, device="metal") as model:
        views = [buffer.length for buffer in gpu.live_buffers() if buffer.no_copy]
        assert 10 < len(views) < 32
        assert max(views) < 0.1 * working_set
        before = gpu.counters()
        gpu.lose_residency()
        model.forward_prompt(PROMPT)
        after = gpu.counters()
        assert 0 < after.residency_fault_bytes - before.residency_fault_bytes < 0.1 * working_set
        dispatches = after.dispatches - before.dispatches
        logits = model.forward_token(7)
    gpu.set_limits(gpu.Limits())
    with Model(path, device="metal") as model:
        before = gpu.counters().dispatches
        model.forward_prompt(PROMPT)
        assert gpu.counters().dispatches - before == dispatches
        np.testing.assert_array_equal(model.forward_token(7), logits)


def test_memory_of_a_model_that_was_not_used_is_released(path: Path) -> None:
    """A Mac keeps it wired if the GPU has run nothing."""
    gpu.set_limits(gpu.Limits(keeps_unused=True))
    Model(path, device="metal").close()
    assert gpu.resident_bytes() == 0
