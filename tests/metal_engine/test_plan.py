"""The plan that the cost model makes without an engine is what the engine encodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import kernel_harness as harness
from support import small_models

from metal_prefill import Model, _core, synth
from metal_prefill.cost_model import plan, shape_of
from metal_prefill.cost_model.planner import TUNINGS, Shape, Tuning
from metal_prefill.dispatches import STRUCTS, Dispatch, decode_args, from_core
from metal_prefill.gguf_file import GGUFFile

pytestmark = pytest.mark.emulator

if not _core.has_emulator:
    pytest.skip("needs a build with the Metal emulator", allow_module_level=True)

gpu = _core.emulator

MODELS = {
    "as SmolLM-135M": {"preset": "smollm-135m", "layers": 3},
    "larger norms": {"preset": "tinyllama-1.1b", "layers": 2, "vocab": 512},
    "another type of V": {"overrides": {"*.attn_v.weight": "Q8_0"}, "layers": 2, "vocab": 512},
    "F16": {"tensor_type": "F16", "layers": 2, "vocab": 512},
    "gate and up apart": {"overrides": {"*.ffn_up.weight": "Q5_0"}, "layers": 2, "vocab": 512},
    "wide heads": {
        "dim": 512,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 128,
        "ffn": 640,
        "layers": 2,
        "vocab": 512,
    },
}


@pytest.fixture
def family() -> Iterator[Any]:
    def claim(n: int) -> None:
        gpu.set_limits(gpu.Limits(apple_family=n))

    yield claim
    gpu.set_limits(gpu.Limits())


def shape_in(path: Path) -> Shape:
    with GGUFFile(path) as gguf:
        return shape_of(gguf)


def native(model: Model) -> Any:
    return model._open()._core


def comparable(dispatches: list[Dispatch]) -> list[Dispatch]:
    """Leave out what a plan does not know, and round what is a float32 in the engine's arguments."""

    def rounded(value: Any) -> Any:
        return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value

    return [
        replace(d, buffers=(), start=0.0, end=0.0, args={k: rounded(v) for k, v in d.args.items()})
        for d in dispatches
    ]


@pytest.mark.parametrize("n", sorted(TUNINGS))
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_what_the_engine_encodes(tmp_path: Path, family: Any, name: str, n: int) -> None:
    path = synth.synthesize(tmp_path / "m.gguf", **MODELS[name])  # type: ignore[arg-type]
    shape = shape_in(path)
    family(n)
    choices: list[dict[str, Any]] = [
        {},
        {"fused_norm": True, "fused_silu": True},
        {"kv_dtype": "f32", "chunk_tokens": 100},
    ]
    for options in choices:
        with Model(path, device="metal", **options) as model:
            for tokens in (1, 2, 8, 9, 32, 33, 100, 300, 512, 1100):
                planned = plan(
                    shape,
                    tokens,
                    family=n,
                    kv_type=options.get("kv_dtype", "f16"),
                    chunk_tokens=options.get("chunk_tokens", 512),
                    fused_norm="fused_norm" in options,
                    fused_silu="fused_silu" in options,
                )
                engine = from_core(native(model).plan(tokens))
                assert planned == comparable(engine), f"{tokens} tokens, {options}"


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "smollm3"])
def test_plans_of_other_architectures(tmp_path: Path, family: Any, name: str) -> None:
    found = [model for model in small_models.MODELS.values() if model.architecture == name]
    assert found
    path = small_models.write(tmp_path / "m.gguf", found[0])
    family(9)
    with Model(path, device="metal") as model:
        for tokens in (1, 5, 40):
            assert plan(shape_in(path), tokens) == comparable(from_core(native(model).plan(tokens)))


def test_a_plan_goes_on_from_the_position(demo_path: Path, family: Any) -> None:
    family(9)
    with Model(demo_path, device="metal") as model:
        model.forward_prompt(range(1, 301))
        for tokens in (1, 20):
            engine = from_core(native(model).plan(tokens))
            assert plan(shape_in(demo_path), tokens, position=300) == comparable(engine)
        assert model.position == 300
        assert model.stats()["dispatches"] == 0
    assert "attention_combine" in {d.kernel for d in engine}


def test_tunings_are_the_engine_s() -> None:
    text = (harness.SHADERS.parent / "cpp" / "metal" / "tuning.h").read_text()
    rows = re.findall(r"\{MTLGPUFamilyApple(\d), ([\d, ]+)\}", text)
    assert {int(n): Tuning(*map(int, values.split(","))) for n, values in rows} == TUNINGS


def test_arguments_are_laid_out_as_the_shaders_have_them() -> None:
    structs = {
        "embed": "EmbedArgs",
        "matvec": "MatvecArgs",
        "rmsnorm_matvec": "MatvecArgs",
        "silu_matvec": "MatvecArgs",
        "multi_token_matvec": "MultiTokenArgs",
        "matmul": "MatmulArgs",
        "rmsnorm": "RmsnormArgs",
        "rope_append": "RopeArgs",
        "rope_attention": "RopeAttentionArgs",
        "attention": "AttentionArgs",
        "swiglu": "SwigluArgs",
        "argmax": "ArgmaxArgs",
        "log_prob": "LogProbArgs",
    }
    assert {stem: harness.STRUCTS[name] for stem, name in structs.items()} == STRUCTS
    with pytest.raises(ValueError, match="arguments of rmsnorm_f16 have 8 bytes, got 3"):
        decode_args("rmsnorm_f16", b"abc")
    with pytest.raises(ValueError, match="unknown kernel 'conv2d'"):
        decode_args("conv2d", b"")
