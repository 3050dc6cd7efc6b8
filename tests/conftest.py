"""Shared by all tests: devices, the bundled model, small synthetic models."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.missing import REQUIRE_METAL, fail_or_skip, skip_where_the_cpu_is_selected
from support.programs import Run
from support.small_models import MODELS, with_tokenizer_of, write
from support.tiny_models import TINY

import metal_prefill
from metal_prefill import MissingExtraError, Model, _core, cli, synth
from metal_prefill.hub import resolve_model

if TYPE_CHECKING:
    from support.encoder_tasks import FileOf
    from support.folders.model_folders import Folder

    from metal_prefill.text import Tokenizer

METAL_MISSING = (
    "there is neither Metal nor its emulator: install clang 19 (Debian: apt-get install clang-19 lld-19 "
    "libclang-rt-19-dev) and run `make test`"
)

# Files and folders (by prefix) that take more than two seconds of processor time.
SLOW_FILES = (
    "bench/", "fuzz/", "serve/", "soak/", "cli/test_chat", "cli/test_demo", "cli/test_first_errors",
    "cli/test_run_many", "conversion/test_minilm", "cpu/test_arm_engine", "cpu/test_emulated_amx",
    "cpu/test_packing_rows", "cpu/test_pair_speed", "engine/test_allocation_faults",
    "engine/test_concurrency", "engine/test_fork", "engine/test_smollm2", "files/test_replacing",
    "generation/test_constraint_limits", "hub/", "packaging/test_build", "packaging/test_examples",
    "packaging/test_guide", "packaging/test_older_macs", "synth/", "text/test_encoder_tokenizers",
    "text/test_template_limits",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need the Metal engine, and those of slow files and folders."""
    slow = tuple(f"tests/{name}" for name in SLOW_FILES)
    for item in items:
        if item.nodeid.startswith(slow):
            item.add_marker("slow")
        if "metal" in getattr(item, "fixturenames", ()):
            item.add_marker("emulator")


@pytest.fixture(scope="session", autouse=True)
def as_users_have_it() -> None:
    """Give tests and their subprocesses the environment of a terminal: Ctrl-C, and buffered output.

    A process that a shell script starts in the background ignores Ctrl-C. Without buffers, faults in flushing
    them do not show.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(scope="session", autouse=True)
def no_first_contact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Open models without tests and measurements of the GPU, and with a cache folder of the suite.

    Folders that an earlier run converted would hide errors of the conversion. The emulator compiles each
    pipeline anew, unless a test sets ``METAL_PREFILL_CACHE``. On a busy machine one of its command buffers
    can take minutes; a lost one would fail all later tests of the process.
    """
    settings = {"METAL_PREFILL_CHECK": "0", "METAL_PREFILL_TUNE": "0", "METAL_PREFILL_PATIENCE": "900"}
    cache = "XDG_CACHE_HOME" if _core.has_emulator else "METAL_PREFILL_CACHE"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache, str(tmp_path_factory.mktemp("cache")))
        for name, value in settings.items():
            if name not in os.environ:
                patch.setenv(name, value)
        yield


@pytest.fixture
def metal() -> None:
    """Require the Metal engine, real or emulated."""
    skip_where_the_cpu_is_selected()
    if problem := _core.metal_device().get("problem"):
        fail_or_skip(f"{problem}\n{METAL_MISSING}", *REQUIRE_METAL)


@pytest.fixture(params=["cpu", "metal"])
def device(request: pytest.FixtureRequest) -> str:
    """Run a test with each engine."""
    name: str = request.param
    if name == "metal":
        request.getfixturevalue("metal")
    return name


@pytest.fixture(scope="session")
def demo_path() -> Path:
    return metal_prefill.default_model_path()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write each model of the catalogue once."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def path(name: str) -> Path:
        return write(folder / f"{name.replace(' ', '_').replace(',', '')}.gguf", MODELS[name])

    return path


@pytest.fixture(scope="session")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> "FileOf":
    """Return a function that converts a folder; each is converted once for each type of tensors."""
    from metal_prefill.conversion import convert

    @cache
    def file_of(make: "Callable[[Path], Folder]", tensor_type: str = "auto") -> Path:
        path = tmp_path_factory.mktemp("folder")
        return convert(make(path / "folder").write(), path / "model.gguf", tensor_type=tensor_type)

    return file_of


def real_model(name: str) -> Path:
    """Return the path of a model that a package contains."""
    try:
        return resolve_model(name)
    except MissingExtraError as error:
        fail_or_skip(str(error), "METAL_PREFILL_REQUIRE_MODEL")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Path of a real model, where its package is installed."""
    return real_model("smollm2")


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """Path of a real model folder, where its package is installed."""
    return real_model("minilm")


@pytest.fixture
def smollm(tmp_path: Path) -> "Tokenizer":
    """Return the tokenizer of SmolLM, from the recorded vocabularies."""
    from support import comparison

    return comparison.open_variant(tmp_path / "smollm.gguf", comparison.TOKENIZERS["smollm"])


@pytest.fixture(scope="module")
def tiny_demo_path(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a tiny model with the tokenizer and the context of the bundled one."""
    shape = replace(TINY, vocab=1024)
    return with_tokenizer_of(tmp_path_factory.mktemp("tiny") / "demo.gguf", shape, demo_path)


@pytest.fixture
def fast_demo_path(device: str, demo_path: Path, tiny_demo_path: Path) -> Path:
    """Path of the bundled model, or of a tiny one for Metal: an emulated GPU is slow."""
    return tiny_demo_path if device == "metal" else demo_path


@pytest.fixture
def demo(device: str, fast_demo_path: Path) -> Iterator[Model]:
    """Open the bundled model on the CPU, and a tiny one with its tokenizer on Metal."""
    with Model(fast_demo_path, device=device) as model:
        yield model


@pytest.fixture
def tiny_demo(device: str, tiny_demo_path: Path) -> Iterator[Model]:
    """Open a tiny model, for tests in which the weights do not matter."""
    with Model(tiny_demo_path, device=device) as model:
        yield model


@pytest.fixture(scope="module")
def bundled(demo_path: Path) -> Iterator[Model]:
    """Open the bundled model on the CPU for the tests of a module."""
    with Model(demo_path, device="cpu", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a small embedding model."""
    return synth.synthesize(tmp_path_factory.mktemp("m") / "small.gguf", preset="tiny-embedding")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache folder of the package, which the test has for itself."""
    monkeypatch.setenv("METAL_PREFILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must succeed; return what it prints to standard output."""

    def run(*arguments: object) -> str:
        assert cli.main(list(map(str, arguments))) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return what it prints to standard error."""

    def run(*arguments: object, code: int = 2) -> str:
        assert cli.main(list(map(str, arguments))) == code
        return capsys.readouterr().err

    return run
