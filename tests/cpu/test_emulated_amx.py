"""The CPU engine on the matrix unit of AMX, emulated where the processor has AVX512-BF16 but no AMX."""

import os
import re
import sys

import pytest
from support.kernels.cpu_testing import EMULATE_AMX, native_sets
from support.places import TESTS
from support.programs import finished

from metal_prefill import _core

ENGINE = TESTS / "engine" / "test_engine.py"
# Small models: an instruction that is emulated takes microseconds.
SELECTED = (
    "test_bfloat16_models_stay_near_the_reference_for_any_split",
    "test_the_cpu_is_bit_identical_for_any_split_of_a_prompt and f16 and not f32 and not int16 "
    "and (mixed and (int8 or not K-quants) or 16-bit and bf16)",
)


@pytest.mark.skipif("amx" in _core.kernel_sets(), reason="the processor has AMX: test_engine.py runs on it")
@pytest.mark.skipif("amx" not in native_sets(), reason="emulated AMX needs AVX512-BF16 and a build for tests")
@pytest.mark.parametrize("tests", SELECTED)
def test_the_engine_keeps_its_guarantees_on_an_emulated_matrix_unit(tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, str(ENGINE)]
    environment = {**os.environ, EMULATE_AMX: "1"}
    environment.pop("METAL_PREFILL_CPU_ISA", None)
    done = finished(command, env=environment)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 4
