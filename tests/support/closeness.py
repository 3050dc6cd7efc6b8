"""Random tokens, and results of engines compared with the float64 reference."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill import Model, Session

# Bounds of a normalized squared error with float32 compute. Errors of float32 exponentials, and of sums of a
# few hundred products, are far below the first. The Metal engine multiplies in half (11 bits) with float32
# sums: a relative error of 2^-11 for each operand, averaged over products, is below the second after a few
# layers.
NMSE = {"cpu": 1e-9, "metal": 5e-6}
LOWEST_COSINE = 0.9995  # of states computed with activations in 8 bits or bfloat16


def random_ids(n: int, vocab: int = 320, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, vocab, n)


def ids_for(model: Model, n: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return random_ids(n, model.config.vocab_size, seed).astype(np.int32)


def nmse(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Return the squared error relative to the squared size of the expected values."""
    a, e = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert a.shape == e.shape
    return float(np.square(a - e).sum() / np.square(e).sum())


def correlation(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Return the Pearson correlation over all elements."""
    return float(np.corrcoef(np.ravel(actual), np.ravel(expected))[0, 1])


def assert_close(device: str, actual: npt.ArrayLike, expected: npt.ArrayLike) -> None:
    """Check an engine with float32 compute against its bound; NaN never passes."""
    assert nmse(actual, expected) <= NMSE[device]


def assert_keeps(bound: float, session: Session, expected: Sequence[npt.NDArray[np.float64]]) -> None:
    """Check keys, values and states of a session, whose cache may be in half or single precision."""
    for row, wanted in zip(session.native.export_state()[2], expected, strict=True):
        values = row.view(f"f{row.nbytes // wanted.size}")
        assert nmse(values.reshape(wanted.shape), wanted) <= bound


def hidden_states(model: Model, ids: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Compute the states of all tokens of a text."""
    return states_of_texts(model, [ids])[0]


def states_of_texts(model: Model, texts: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[np.float32]]:
    """Compute the states of all tokens of several texts in one batch."""
    sessions = [model.session() for _ in texts]
    states: list[npt.NDArray[np.float32]] = model.forward_batch(sessions, texts, output="hidden", rows="all")
    for session in sessions:
        session.close()
    return states


def lowest_cosine(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Return the lowest cosine of a row with the expected one."""
    a, e = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    return float(((a * e).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(e, axis=1))).min())
