"""No dispatch accesses the same bytes through two bindings, through one of them to write.

Metal's compiler assumes that the buffers of a kernel do not overlap. In checked mode, the emulator ends a
pass with an error if they do.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import small_models
from support.emulated_gpu import require_cpu_executor, require_emulator
from support.kinds import KINDS, STEPS
from support.tiny_models import TINY_RECURRENT

from metal_prefill import Model

gpu = require_emulator()
if gpu.sanitizer:
    pytest.skip("builds with a sanitizer have no checked mode", allow_module_level=True)
pytestmark = pytest.mark.emulator

# One for each kind of layer, of norm, and of rotation, with and without biases.
GENERATORS = {
    "mixed types": replace(small_models.MODELS["mixed types"], ffn=256),
    **{
        name: replace(small_models.MODELS[name], layers=1)
        for name in ("all biases", "16-bit floats", "qwen3", "olmo2", "phi3", "exaone4")
    },
    **{name: kind.shape for name, kind in (KINDS | STEPS).items()},
    "granitehybrid": TINY_RECURRENT["granitehybrid"],
}
LONG = 300  # tokens in the context, so that attention of one token is divided
ENCODERS = ("bert", "nomic-bert", "jina-bert-v2", "jina-bert-v2, code", "modern-bert")


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    require_cpu_executor("has a checked mode")
    gpu.set_options(gpu.Options(checked=True))
    yield
    gpu.set_options(gpu.Options())


def ids(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(1, 280, n).astype(np.int32)


@pytest.mark.parametrize("name", GENERATORS)
def test_bindings_of_a_pass_do_not_overlap(tmp_path: Path, name: str) -> None:
    path = small_models.write(tmp_path / "model.gguf", GENERATORS[name])
    with Model(path, device="metal") as model:
        sessions = [model.session() for _ in range(3)]
        for session, tokens in zip(sessions, (17, 9, 2), strict=True):
            session.forward_prompt(ids(tokens))
        sessions[0].forward_token_greedy(3)
        model.forward_batch(sessions, [[5]] * 3)
        model.forward_batch(sessions, [[5, 6, 7]] * 3)
        sessions[1].reset()
        sessions[1].score(ids(10))


def test_bindings_of_a_divided_attention_do_not_overlap(tmp_path: Path) -> None:
    path = small_models.write(tmp_path / "model.gguf", small_models.MODELS["long context"])
    with Model(path, device="metal") as model, model.session() as session:
        session.forward_prompt(ids(LONG))
        session.forward_token_greedy(3)


@pytest.mark.parametrize("name", ENCODERS)
def test_bindings_of_an_encoder_do_not_overlap(tmp_path: Path, name: str) -> None:
    path = small_models.write(tmp_path / "model.gguf", small_models.ENCODERS[name])
    with Model(path, device="metal") as model:
        model.embed(["one text", "another text that is a little longer than the first"])
