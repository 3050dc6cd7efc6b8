"""The engine's kernels for tests, one dispatch at a time, on a Mac's GPU or on the emulator."""

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from metal_kernels import KernelLibrary, testing_module
from support.kernels.kernel_harness import SHADERS, Array, Run, flat_source, language_of
from support.missing import REQUIRE_METAL, fail_or_skip, skip_where_the_cpu_is_selected

from metal_prefill import Model, _core, synth

MISSING = "the package was built without the means to dispatch single kernels: run `make test`"
SHUFFLED = 7  # seed of the order of threads


COMPILED = Path(_core.__file__).with_name("metal_prefill.metallib")  # where Apple's compiler made one


def open_source(path: Path) -> KernelLibrary | None:
    """Compile a source as the engine does; None: it is too new for this Mac."""
    language = language_of(path)
    try:
        return KernelLibrary(flat_source(path), fast_math=False, language=language)
    except RuntimeError:
        if _core.has_emulator or language < (4, 0):
            raise
        return None


@pytest.fixture
def own_device() -> Iterator[None]:
    """Reset what a test set on the emulated GPU, which must have found no violation."""
    yield
    gpu = _core.emulator
    gpu.clear_faults()
    gpu.set_history_depth(0)
    gpu.set_limits(gpu.Limits())
    gpu.set_options(gpu.Options())
    assert gpu.take_violations() == []


@pytest.fixture
def checking(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the emulator as if it were an unknown GPU."""
    monkeypatch.setenv("METAL_PREFILL_CHECK", "1")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small model; some files of tests have another `path`."""
    file = tmp_path_factory.mktemp("tiny") / "m.gguf"
    return synth.synthesize(file, preset="tiny", layers=2, vocab=320, context=512)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path, device="metal", prefix_memory=0) as model:  # no session finds pages of another
        yield model


@pytest.fixture(scope="module")
def deep_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model whose passes have more than 64 dispatches."""
    return synth.synthesize(tmp_path_factory.mktemp("deep") / "m.gguf", preset="tiny", layers=12, vocab=320)


@pytest.fixture(scope="module", params=["source", *["metallib"] * COMPILED.exists()])
def libraries(request: pytest.FixtureRequest) -> Iterator[dict[str, KernelLibrary]]:
    """Yield each kernel's library by its name: compiled as the engine does, and as the package has it."""
    skip_where_the_cpu_is_selected()
    try:
        testing_module()
    except ImportError:
        fail_or_skip(MISSING, *REQUIRE_METAL)
    if request.param == "source":
        compiled = [open_source(path) for path in sorted(SHADERS.glob("*.metal"))]
        opened = [library for library in compiled if library is not None]
    else:
        opened = [KernelLibrary(None, compiled=str(COMPILED))]
    yield {name: library for library in opened for name in library.library.function_names}
    for library in opened:
        library.close()
    gc.collect()


@pytest.fixture
def run(libraries: dict[str, KernelLibrary]) -> Iterator[Run]:
    """Dispatch kernels.

    The emulator shuffles the threads of a threadgroup, and its fast functions have the largest error that
    Metal allows. Tests of the engine run threads in order.
    """
    emulator: Any = getattr(testing_module(), "emulator", None)
    if emulator is not None:
        emulator.set_options(emulator.Options(seed=SHUFFLED, fast_errors=True))

    def dispatch(
        kernel: str,
        *buffers: Array,
        groups: Sequence[int],
        threads: Sequence[int],
        threadgroup_bytes: int = 0,
    ) -> None:
        *arrays, args = buffers
        if "_tensor" in kernel and kernel not in libraries and emulator is None:
            pytest.skip("this system does not compile tensors of Metal 4, or the library is older")
        libraries[kernel].dispatch(
            kernel,
            [*arrays, args.tobytes()],
            groups=tuple(groups),
            threads=tuple(threads),
            threadgroup=[threadgroup_bytes] if threadgroup_bytes else [],
        )

    yield dispatch
    if emulator is not None:
        emulator.set_options(emulator.Options())
