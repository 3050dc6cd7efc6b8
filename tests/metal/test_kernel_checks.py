"""The comparison of kernels with float64 at first contact, on models of every kind."""

import warnings
from pathlib import Path

import pytest
from support.emulated_gpu import open_metal, require_emulator
from support.small_models import ENCODERS, MODELS, write

from metal_prefill.gpu._self_test import QUICK, kernel_differences

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_cache", "own_device")]

require_emulator()


ALL = MODELS | ENCODERS


@pytest.mark.parametrize("architecture", sorted({model.architecture for model in ALL.values()}))
def test_no_kernel_of_a_correct_gpu_is_reported(architecture: str, tmp_path: Path) -> None:
    """A false report would reject the GPU of every Mac for this kind of model."""
    for name, shape in ALL.items():
        if shape.architecture == architecture:
            path = write(tmp_path / "m.gguf", shape)
            with open_metal(path) as model, model.session() as session, warnings.catch_warnings():
                warnings.simplefilter("error")
                checked, wrong = kernel_differences(session.native, model.config, QUICK)
            assert wrong == [], name
            assert checked, name
