"""Fixtures that the tests of the emulator share."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from metal_kernels import KernelLibrary, testing_module
from shader_library import ShaderLibrary, build, find_clang

MISSING = (
    "the module _metal_testing was not built with the emulator: install clang 19 (Debian: apt-get install "
    "clang-19 lld-19 libclang-rt-19-dev) and build and test as README.md says"
)
KERNELS = Path(__file__).parent / "kernels"
SHADERS = Path(__file__).parent / "shaders"


def fail_or_skip() -> NoReturn:
    """Fail where the emulator is required; skip elsewhere."""
    if os.environ.get("METAL_EMULATOR_REQUIRED"):
        pytest.fail(MISSING)
    pytest.skip(MISSING)


@pytest.fixture(scope="session")
def metal_testing() -> Any:
    """Return the module through which tests call Metal, with a separate emulator.

    On a Mac the module calls Apple's Metal and has no emulator.
    """
    try:
        module = testing_module()
    except ImportError:
        module = None
    if not hasattr(module, "emulator"):
        fail_or_skip()
    return module


@pytest.fixture
def emulator(metal_testing: Any) -> Iterator[Any]:
    """Yield the emulator's introspection; afterwards nothing may be alive and no misuse unnoticed."""
    introspection = metal_testing.emulator
    introspection.take_violations()
    yield introspection
    introspection.clear_faults()
    introspection.set_options(introspection.Options())
    introspection.set_limits(introspection.Limits())
    introspection.set_history_depth(0)
    gc.collect()
    assert introspection.live_objects_by_class() == {}
    assert introspection.take_violations() == []


@pytest.fixture
def checked_mode(metal_testing: Any, emulator: Any) -> None:
    """Make the emulator record the memory accesses of each dispatch; skip builds with a sanitizer."""
    if metal_testing.emulator.sanitizer:
        pytest.skip("builds with a sanitizer have no checked mode")
    emulator.set_options(emulator.Options(checked=True))


@pytest.fixture(params=[False, True], ids=["bound ranges", "checked"])
def checked(request: pytest.FixtureRequest) -> bool:
    """Run a test in both modes."""
    if request.param:
        request.getfixturevalue("checked_mode")
    return bool(request.param)


@pytest.fixture
def guards(emulator: Any) -> None:
    """Require that the emulator itself finds accesses past a buffer's end."""
    if emulator.sanitizer == "address":
        pytest.skip("AddressSanitizer reports it and ends the process")


@pytest.fixture
def device(metal_testing: Any, emulator: Any) -> Iterator[Any]:
    """Yield an emulated device."""
    device = metal_testing.Device()
    yield device
    device.release()


@pytest.fixture
def library(emulator: Any) -> Iterator[KernelLibrary]:
    """Yield the kernels that the tests of the API run."""
    library = KernelLibrary((KERNELS / "host_api.metal").read_text())
    yield library
    library.close()


@pytest.fixture(scope="session")
def clang() -> str:
    """Return clang's path, for tests that compile shaders themselves."""
    return find_clang() or fail_or_skip()


@pytest.fixture(scope="session")
def load_shaders(
    clang: str, metal_testing: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], ShaderLibrary]:
    """Return a function that builds shaders/<name>.metal with the executor and loads it, once.

    With the sanitizers that the emulator is built with, if any. All of pytest's processes share an executor.
    """
    assert clang
    folder = tmp_path_factory.mktemp("shaders")
    executor = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    loaded: dict[str, ShaderLibrary] = {}
    sanitizers = {"address": "address,undefined"}.get(
        sanitizer := metal_testing.emulator.sanitizer, sanitizer
    )

    def load(name: str) -> ShaderLibrary:
        if name not in loaded:
            source = SHADERS / f"{name}.metal"
            loaded[name] = ShaderLibrary(build(source, folder, sanitizers, executor / "executor"))
        return loaded[name]

    return load
