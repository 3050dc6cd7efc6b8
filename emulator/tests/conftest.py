"""Fixtures that the tests of the emulator share."""

import gc
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest
from metal_kernels import KernelLibrary, testing_module
from scanner.preprocess import find_clang
from scanner.tokens import SourceError

MISSING = (
    "the module _metal_testing was not built with the emulator: install clang 19 (Debian: apt-get install "
    "clang-19 lld-19 libclang-rt-19-dev) and build and test as README.md says"
)
KERNELS = Path(__file__).parent / "kernels"


def fail_or_skip() -> NoReturn:
    """Fail if the emulator is required, otherwise skip."""
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
    """Yield the emulator's introspection; afterwards require that no objects live and no misuse occurred."""
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
def library(request: pytest.FixtureRequest, emulator: Any) -> Iterator[KernelLibrary]:
    """Yield the kernels of the test module's source, by default host_api.metal."""
    source = getattr(request.module, "KERNEL_SOURCE", "host_api.metal")
    with closing(KernelLibrary((KERNELS / source).read_text())) as library:
        yield library


@pytest.fixture(scope="session")
def clang() -> str:
    """Return clang's path, for tests that compile shaders themselves."""
    try:
        return find_clang()
    except SourceError:
        fail_or_skip()
