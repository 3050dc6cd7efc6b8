"""One small model of each kind of layer and cache, and comparisons of sessions with fresh ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill import Model, Session
from metal_prefill.synth import LayerShape
from support.recurrent import ARCHITECTURES
from support.small_models import MODELS, SmallModel
from support.tiny_models import TINY, TINY_EXPERTS, TINY_MODELS, TINY_RECURRENT

Array = npt.NDArray[Any]
VOCAB = 320
METAL_TOLERANCE = 1e-3  # relative to the largest value


class Kind(NamedTuple):
    """A model, and the type of its cache."""

    shape: SmallModel
    kv_dtype: str = "f16"


_SIZE: dict[str, Any] = {"dim": 32, "heads": 2, "ffn": 32}
_ODD: dict[str, Any] = {"layers": 4, "heads": 2, "kv_heads": 1, "ffn": 35}
# Models for tests of sessions: one for each kind of a session's state.
KINDS = {
    "biases": Kind(replace(TINY, **_SIZE, qkv_bias=True, value_dim=64)),
    "layers that differ": Kind(replace(TINY_MODELS["gemma4"], vocab=VOCAB)),
    **{name: Kind(TINY_RECURRENT[name]) for name in ARCHITECTURES},
}
# Models for tests of passes: their kernels treat few and many rows differently.
STEPS = {
    "windows": Kind(replace(TINY_MODELS["gemma3"], vocab=VOCAB)),
    "limits of scores": Kind(replace(TINY_MODELS["gemma2"], vocab=VOCAB)),
    "layers without rotation": Kind(replace(TINY, **_SIZE, architecture="smollm3", layers=4)),
    "layers that differ, odd dimensions": Kind(
        replace(
            MODELS["gemma4, odd dimensions"],
            **_ODD,
            layered=LayerShape(2, 24, 1, inputs=10, shared=2, shared_ffn=70),
        )
    ),
    "experts": Kind(replace(TINY_EXPERTS["granitemoe"], vocab=VOCAB)),
}
# Caches that the Metal engine does not support, or that differ only in the size of an element.
CACHES = {
    "blocks": Kind(replace(TINY, value_dim=64), "q8_0"),
    "layers that differ, blocks": Kind(
        replace(
            TINY_MODELS["gemma4"],
            vocab=VOCAB,
            head_dim=64,
            layered=LayerShape(2, 32, 1, inputs=32, shared=1, shared_ffn=64),
        ),
        "q8_0",
    ),
    "layers that differ, float32": Kind(replace(TINY_MODELS["gemma4"], vocab=VOCAB), "f32"),
}
ALL_KINDS = KINDS | STEPS | CACHES


def ids_of(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, VOCAB, n)


def long_ids(device: str) -> Array:
    """Return random tokens of three pages, or of five on the CPU, more than it computes in a chunk."""
    return ids_of(300 if device.lower().startswith("cpu") else 140)


def contents(session: Session) -> list[bytes]:
    """Return K and V of each layer with attention, and the states of the others."""
    return [np.asarray(part).tobytes() for part in session.native.export_state()[2]]


def fresh(model: Model, ids: Sequence[int] | Array) -> tuple[Array, list[bytes]]:
    """Return logits and contents of a session that computes the tokens in one call."""
    with model.session() as session:
        return session.forward_prompt_logits(ids), contents(session)


def assert_same(model: Model, actual: Any, expected: Any, few: bool = False) -> None:
    """Compare bits, or values on Metal unless passes had only a few tokens.

    Kernels for few and many tokens add in different orders (docs/kernels.md).
    """
    if model.backend == "cpu" or few:
        np.testing.assert_array_equal(actual, expected)
    else:
        bound = METAL_TOLERANCE * float(np.abs(expected).max(initial=0))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


def assert_same_logits(model: Model, logits: Array, expected: Array) -> None:
    assert np.argmax(logits) == np.argmax(expected)
    assert_same(model, logits, expected)


def assert_equals_fresh(model: Model, session: Session, ids: Array, logits: Array) -> None:
    """Compare a session with one that computed the same tokens in one call."""
    expected, parts = fresh(model, ids)
    assert session.tokens == list(ids)
    assert_same_logits(model, logits, expected)
    if model.backend == "cpu":
        assert contents(session) == parts
