"""Normalization of vectors in the native core."""

import numpy as np
import pytest
from support.cpu_testing import cpu_testing

from metal_prefill import _core

WIDTHS = [1, 7, 8, 9, 100, 127, 128, 129, 136, 300, 384, 1000, 8193]


@pytest.mark.parametrize("width", WIDTHS)
def test_squares_are_added_in_the_order_of_numpy(width: int) -> None:
    """Few vectors show it once they are in float32, but those of all versions are the same."""
    sum_of_squares = cpu_testing().sum_of_squares
    for row in np.random.default_rng(width).normal(0, 3, (50, width)).astype(np.float32):
        assert sum_of_squares(row) == np.add.reduce(np.square(row, dtype=np.float64))


@pytest.mark.parametrize("width", WIDTHS)
def test_normalized_vectors_have_the_bits_of_numpy(width: int) -> None:
    vectors = np.random.default_rng(width).normal(0, 3, (20, width)).astype(np.float32)
    vectors[0] = 0
    vectors[1] = 1e-45  # the smallest number above 0
    vectors[2] = np.finfo(np.float32).max
    squares = np.square(vectors, dtype=np.float64)
    length = np.sqrt(np.add.reduce(squares, axis=-1, keepdims=True))
    expected = (vectors / np.maximum(length, np.finfo(np.float64).tiny)).astype(np.float32)
    _core.normalize(vectors)
    np.testing.assert_array_equal(vectors, expected)
    np.testing.assert_allclose(np.linalg.norm(vectors[1:].astype(np.float64), axis=1), 1, rtol=1e-6)
    assert not vectors[0].any()
