"""Dispatches of models of every kind: compared with float64 as at first contact, and their bindings.

No dispatch accesses the same bytes through two bindings, through one of them to write: Metal's compiler
assumes that the buffers of a kernel do not overlap. In checked mode, the emulator ends a pass with an error
if they do.
"""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support.kernels.emulated_gpu import open_metal, require_emulator
from support.small_models import ENCODERS, MODELS, TYPES, write

from metal_prefill import Model, _core
from metal_prefill.gpu import _self_test
from metal_prefill.gpu._kernel_checks.captured import Captured
from metal_prefill.gpu._self_test import QUICK, kernel_differences

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("own_cache")]

gpu = require_emulator()


@pytest.fixture(autouse=True)
def checked(own_device: None) -> None:
    """Use the checked mode, which only the CPU executor has, and builds with a sanitizer have not."""
    gpu.set_options(gpu.Options(checked=not gpu.sanitizer and "(CPU)" in _core.metal_device()["name"]))


# Models whose dispatches have the kernels, the set arguments and the checks of others, with other values.
COMPARED_WITH_OTHERS = {
    *(f"type {kind}" for kind in TYPES),
    *("head_dim 32", "head_dim 64", "separate output", "sentencepiece"),
    *("vocabulary of 301", "vocabulary of 1021, separate", "long context", "wide feed-forward", "rope base"),
    *("linear rope scaling", "yarn rope scaling", "rope frequency factors", "smollm3", "granite", "bert"),
    *("ernie4_5", "phi3", "phi3, long rope", "minicpm", "minicpm, long rope", "mistral3", "qwen3vl", "phi2"),
    *("gptneox, blocks in sequence", "stablelm", "lfm2, attention last", "gemma3, scaled", "bert, cls"),
    *("gemma4, without inputs", "granitemoe", "qwen3moe", "nomic-bert"),
}
# Kernels of every type, each in a layer of its own.
EVERY_TYPE = replace(
    MODELS["type F32"], layers=len(TYPES), types={f"blk.{i}.*": kind for i, kind in enumerate(TYPES)}
)
ALL = {name: m for name, m in (MODELS | ENCODERS).items() if name not in COMPARED_WITH_OTHERS}
ALL["every type"] = EVERY_TYPE


@pytest.mark.parametrize("architecture", sorted({model.architecture for model in ALL.values()}))
def test_no_kernel_of_a_correct_gpu_is_reported(architecture: str, tmp_path: Path) -> None:
    """A false report would reject the GPU of every Mac for this kind of model."""
    for name, shape in ALL.items():
        if shape.architecture == architecture:
            path = write(tmp_path / "m.gguf", shape)
            with open_metal(path) as model, model.session() as session, warnings.catch_warnings():
                warnings.simplefilter("error")
                needed = {d.kernel for n in QUICK for d in session.plan(n)}
                checked, wrong = kernel_differences(session.native, model.config, QUICK)
            assert wrong == [], name
            assert checked == needed, name


def test_each_kind_of_layer_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with and without windows have other arguments for the same kernel."""
    compared: list[Captured] = []

    def note(dispatch: _core.Dispatch) -> None:
        compared.append(Captured(dispatch))

    monkeypatch.setattr(_self_test, "difference", note)
    path = write(tmp_path / "m.gguf", replace(MODELS["olmo2, windows"], layers=8))
    with open_metal(path) as model, model.session() as session:
        kernel_differences(session.native, model.config, (9,))
    windows = [d.args["window"] for d in compared if d.kernel.startswith("attention_prefill")]
    assert sorted(windows) == [0, 16]


@pytest.mark.parametrize("name", ["long context", "mixed types", "lfm2moe", "qwen35", "gemma4"])
def test_bindings_of_batches_and_scores_do_not_overlap(tmp_path: Path, name: str) -> None:
    """After a prompt of 300 tokens, attention of a token is divided."""
    path = write(tmp_path / "m.gguf", MODELS[name])
    with Model(path, device="metal") as model:
        sessions = [model.session() for _ in range(3)]
        for session, n in zip(sessions, (300 if name == "long context" else 17, 9, 2), strict=True):
            session.forward_prompt(range(n))
        for tokens in ([5], [5, 6, 7]):
            model.forward_batch(sessions, [tokens] * 3)
        model.score(range(10))
