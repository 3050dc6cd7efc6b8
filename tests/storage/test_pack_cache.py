"""Packed weights stored in files: used if they equal the result of packing, rebuilt otherwise."""

import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs import Run
from support.small_models import MODELS, write

from metal_prefill import Model
from metal_prefill._support.choices import COMPUTE
from metal_prefill.storage import _pack_cache
from metal_prefill.storage._cache_folder import stored_files
from metal_prefill.storage._session_file import fingerprint

IDS = np.random.default_rng(0).integers(0, 320, 37)
HEADER = 16384  # bytes before the weights
UNSAMPLED = HEADER + 6000  # samples of the weights of such small models, 4096 to 6,000 bytes apart


@pytest.fixture(autouse=True)
def folder(own_cache: Path) -> Path:
    """Return the folder of entries, which each test has for itself."""
    return own_cache / "packed"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose matrices are packed in several ways, 0.8 MB in total."""
    return write(tmp_path_factory.mktemp("packed") / "model.gguf", MODELS["mixed types"])


def opened(path: Path, pack_cache: bool = True, **options: Any) -> tuple[bytes, bool]:
    """Logits, and whether the weights came from the cache."""
    with Model(path, device="cpu", pack_cache=pack_cache, **({"threads": 1} | options)) as model:
        logits = model.session().forward_prompt_logits(IDS).tobytes()
        return logits, bool(model.stats()["weights_from_cache"])


def only_entry(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def test_cached_weights_are_bit_identical(path: Path, folder: Path) -> None:
    expected, _ = opened(path, pack_cache=False)
    assert not folder.exists()
    assert opened(path) == (expected, False)
    before = only_entry(folder).read_bytes()
    assert opened(path) == (expected, True)
    assert opened(path, threads=2, chunk_tokens=8) == (expected, True)
    assert only_entry(folder).read_bytes() == before


def test_unpacked_weights_are_not_cached(path: Path, folder: Path, tmp_path: Path) -> None:
    opened(path, compute="f32")
    opened(write(tmp_path / "m.gguf", MODELS["dimensions that fit no block"]))
    assert not folder.exists()
    opened(path)
    assert not opened(path, compute="f32")[1]


def test_each_compute_mode_has_its_own_entry(path: Path, folder: Path) -> None:
    expected = {mode: opened(path, pack_cache=False, compute=mode)[0] for mode in COMPUTE[1:]}
    assert len({*expected.values()}) > 1
    for _ in range(2):
        assert {mode: opened(path, compute=mode)[0] for mode in expected} == expected
    cached = [mode for mode in expected if opened(path, compute=mode)[1]]
    assert {"int8", "w8a8"} <= {*cached}
    assert len(list(folder.iterdir())) == len(cached)


def test_a_deleted_entry_remains_usable_while_it_is_open(path: Path, folder: Path) -> None:
    expected, _ = opened(path)
    with Model(path, device="cpu", pack_cache=True) as model:
        only_entry(folder).unlink()
        assert model.session().forward_prompt_logits(IDS).tobytes() == expected


def flip(entry: Path, at: int) -> None:
    content = bytearray(entry.read_bytes())
    content[at] ^= 1
    entry.write_bytes(content)


# Ways to damage an entry, and whether the file keeps its times, as on a failing disk.
DAMAGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "hash": (partial(flip, at=40), True),
    "rest of the header": (partial(flip, at=HEADER - 1), True),
    "sample": (partial(flip, at=HEADER + 10), True),
    "half": (lambda entry: os.truncate(entry, entry.stat().st_size // 2), True),
    "part of the header": (lambda entry: os.truncate(entry, 1000), True),
    "empty": (lambda entry: os.truncate(entry, 0), True),
    "longer": (lambda entry: entry.write_bytes(entry.read_bytes() + b"\0"), True),
    "written later": (partial(flip, at=UNSAMPLED), False),
    "nonsense": (lambda entry: entry.write_text("{}"), False),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt(
    path: Path, folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = opened(path)
    entry, (change, keeps_times) = only_entry(folder), DAMAGES[damage]
    status = entry.stat()
    change(entry)
    if keeps_times:
        os.utime(entry, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert opened(path) == (expected, False)
    assert f"rebuilding packed weights in {entry}: " in caplog.text
    assert opened(path) == (expected, True)


def test_an_entry_with_a_wrong_name_is_ignored(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = opened(path)
    name = only_entry(folder)
    name.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(_pack_cache, "version", lambda: "99.0")
        opened(path)
    only_entry(folder).rename(name)
    assert opened(path) == (expected, False)
    assert "rebuilding packed weights" in caplog.text
    assert opened(path) == (expected, True)


def test_entries_are_specific_to_version_module_and_instruction_set(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = opened(path)
    monkeypatch.setattr(_pack_cache, "version", lambda: "99.0")
    assert opened(path) == (expected, False)
    assert opened(path) == (expected, True)
    monkeypatch.setenv("METAL_PREFILL_CPU_ISA", "scalar")
    assert not opened(path)[1]
    assert opened(path)[1]
    assert len(list(folder.iterdir())) == 3


def test_a_model_changed_between_samples_gets_its_own_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", MODELS["mixed types"])
    before, _ = opened(path)
    with Model(path, device="cpu") as model:
        tensor = model.gguf.tensors["blk.0.ffn_gate.weight"]
        known = fingerprint(model.gguf)
    with open(path, "r+b") as file:
        file.seek(tensor.offset + 4096)
        file.write(bytes(range(100)))
    with Model(path, device="cpu") as model:
        assert fingerprint(model.gguf) == known
    after, cached = opened(path)
    assert not cached
    assert after != before
    assert opened(path, pack_cache=False)[0] == after


def test_nothing_is_cached_on_a_full_disk(path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected, _ = opened(path, pack_cache=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert opened(path) == (expected, False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot store packed weights" in caplog.text
    assert list(folder.iterdir()) == []
    assert opened(path) == (expected, False)
    assert opened(path) == (expected, True)


def test_nothing_is_cached_without_a_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("METAL_PREFILL_CACHE", str(tmp_path / "file"))
    assert opened(path) == (opened(path, pack_cache=False)[0], False)
    assert "cannot store packed weights" in caplog.text


def test_the_least_recently_used_entry_is_evicted_first(
    path: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    paths = [path, tmp_path / "1.gguf", tmp_path / "2.gguf"]
    for other in paths[1:]:
        other.write_bytes(path.read_bytes())
    opened(paths[0])
    size = only_entry(folder).stat().st_size
    monkeypatch.setenv("METAL_PREFILL_PACK_CACHE_BYTES", str(2 * size))
    for other in paths[1], paths[0], paths[2]:  # the first is used once more, so the second goes
        opened(other)
    names = [entry.path.name.rpartition("-")[0] for entry in stored_files(_pack_cache.PATTERN)]
    assert names == ["2.gguf", "model.gguf"]
    monkeypatch.setenv("METAL_PREFILL_PACK_CACHE_BYTES", str(size - 1))
    opened(paths[1])
    assert f"{size} bytes exceed the cache limit of {size - 1} bytes" in caplog.text
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setenv("METAL_PREFILL_PACK_CACHE_BYTES", "1 GB")
    with pytest.raises(
        ValueError, match="METAL_PREFILL_PACK_CACHE_BYTES must be a number of bytes, got '1 GB'"
    ):
        opened(paths[1])


def test_the_command_lists_and_clears(path: Path, folder: Path, tmp_path: Path, output: Run) -> None:
    assert output("cache") == "entries: 0; 0.0 MiB of at most 8,192 MiB\n"
    opened(path)
    used = only_entry(folder).stat().st_atime_ns
    assert opened(write(tmp_path / "second.gguf", MODELS["qwen3"])) is not None
    listed = output("cache")
    assert "entries: 2;" in listed
    assert "model.gguf-" in "".join(listed.split())
    assert max(entry.stat().st_atime_ns for entry in folder.glob("model*")) == used  # a list is not a use
    cleared = output("cache", "--clear")
    assert cleared.count("deleted") == 2
    assert "entries: 0 of 2 kept; 0.0 MiB" in cleared
    assert list(folder.iterdir()) == []
