"""CTranslate2 on a converted GGUF file: its logits, and the models that are not converted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.reference import ReferenceModel
from support.small_models import MODELS, write

pytest.importorskip("ctranslate2", reason="needs the package ctranslate2")

import ctranslate2

from metal_prefill import bench
from metal_prefill.bench._engines import Options
from metal_prefill.bench._peers import ctranslate2 as peer

pytestmark = pytest.mark.usefixtures("own_cache")


def options_for(path: Path) -> Options:
    return Options(path=str(path), max_context=64, max_prompt=32, threads=1, device="cpu", compute="f32")


@pytest.mark.parametrize("name", ["gqa 3", "gqa 1"])
def test_a_converted_model_has_the_same_logits(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", MODELS[name])
    ids = np.random.default_rng(0).integers(0, 300, 24).astype(np.int32)
    generator = ctranslate2.Generator(str(peer.convert(path)), compute_type="float32", intra_threads=1)
    view = generator.forward_batch([[str(token) for token in ids]])
    found = np.array(view)[0, -1]
    expected = ReferenceModel(path).forward(ids).logits[-1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_prompt_and_decoding_are_measured(demo_path: Path) -> None:
    results = bench.run(
        demo_path, prompts=[8], n_gen=4, repetitions=1, threads=1, device="cpu", compare=["ctranslate2"]
    )
    for test in ("pp8", "tg4"):
        ratio = results.row("ctranslate2", test).ratio
        assert ratio is not None
        assert ratio.median > 0


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_other_architectures_are_rejected(architecture: str, tmp_path: Path) -> None:
    model = next(model for model in MODELS.values() if model.architecture == architecture)
    path = write(tmp_path / "model.gguf", model)
    with pytest.raises(bench.BenchError, match=f"plain llama models only, not {architecture}"):
        peer.load(options_for(path))
