"""Kernels of feed-forwards with experts."""

from typing import Any

import numpy as np
import pytest
from support.kernels.kernel_harness import (
    CONSTANTS,
    STRUCTS,
    Array,
    Output,
    Run,
    Weights,
    ceil_div,
    check,
    columns,
    make_args,
    near,
)
from support.small_models import TYPES

ROUTE, TILE = STRUCTS["Route"], STRUCTS["ExpertTile"]
SILU, CLAMPED_SILU = CONSTANTS["ACTIVATION_SILU"], CONSTANTS["ACTIVATION_CLAMPED"]
GELU_ERF = CONSTANTS["ACTIVATION_GELU_ERF"]
PLACES = CONSTANTS["MATMUL_NARROW_TILE"]


def chosen(
    run: Run,
    scores: Array,
    used: int,
    *,
    bias: Array | None = None,
    offset: Array | None = None,
    sigmoid: bool = False,
    scale: float = 1,
    normed: bool = True,
) -> Array:
    """Choose experts by a router whose products with a row are given, as float32 ``[tokens, experts]``."""
    tokens, experts = scores.shape
    router = np.zeros((experts, 32), np.float32)
    rows = np.zeros((tokens, 32), np.float32)
    # A row is a unit vector, of which the norm is sqrt(32) times as long.
    for token in range(tokens):
        rows[token, token] = 1
        router[:, token] = scores[token] / (np.sqrt(32) if normed else 1)
    routes = Output([tokens, used], ROUTE)
    args = make_args(
        "ChooseExpertsArgs",
        dim=32,
        row_bytes=32 * 4,
        experts=experts,
        used=used,
        sigmoid=sigmoid,
        has_bias=bias is not None,
        has_offset=offset is not None,
        normalize=1,
        has_norm=normed,
        scale=scale,
        eps=0,
        norm_threads=32,
    )
    absent = np.full(experts, np.nan)
    added, added_first = ((absent if x is None else x).astype(np.float32) for x in (bias, offset))
    norm = np.full(32, 1 if normed else np.nan, np.float32)
    buffers = (router, norm, added, added_first, rows, routes, args)
    check(run, "choose_experts_f32", *buffers, groups=(tokens, 1), threads=(64, 1))
    return routes.check()


@pytest.mark.parametrize(("sigmoid", "normed"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize(("experts", "used"), [(3, 1), (5, 5), (64, 8), (100, 3)])
def test_choose_experts(run: Run, experts: int, used: int, sigmoid: bool, normed: bool) -> None:
    rng = np.random.default_rng(experts)
    products = 2 * rng.standard_normal((4, experts))
    bias, offset = rng.standard_normal((2, experts))
    found = chosen(run, products, used, bias=bias, offset=offset, sigmoid=sigmoid, scale=2.5, normed=normed)
    powers = np.exp(products + offset)
    scores = 1 / (1 + 1 / powers) if sigmoid else powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(found["expert"], np.argsort(-(scores + bias), axis=1)[:, :used])
    np.testing.assert_array_equal(found["place"].ravel(), np.arange(4 * used))


def test_of_equal_scores_the_first_experts_are_chosen(run: Run) -> None:
    np.testing.assert_array_equal(chosen(run, np.zeros((2, 70)), 3)["expert"], [[0, 1, 2]] * 2)


def test_a_score_that_is_nan_is_the_smallest(run: Run) -> None:
    bias = np.zeros(40)
    bias[[0, 33]] = np.nan
    experts = chosen(run, np.zeros((1, 40)), 40, bias=bias)["expert"]
    assert sorted(experts[0]) == list(range(40))
    assert list(experts[0][-2:]) == [0, 33]


@pytest.mark.parametrize(("experts", "used", "tokens"), [(3, 1, 100), (64, 8, 33), (300, 2, 9), (4, 4, 64)])
def test_sort_routes(run: Run, experts: int, used: int, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    count = tokens * used
    routes = np.zeros(count, ROUTE)
    routes["expert"] = np.concatenate([rng.permutation(experts)[:used] for _ in range(tokens)])
    begun = min(count, experts)
    most = begun + (count - begun) // PLACES
    outputs = (Output([count], np.uint32), Output([most], TILE))
    args = make_args("SortRoutesArgs", experts=experts, used=used, routes=count, tiles=most)
    check(run, "sort_routes", routes, *outputs, args, groups=(1, 1), threads=(64, 1))


def test_add_experts(run: Run) -> None:
    rng = np.random.default_rng(1)
    tokens, used, dim = 5, 3, 136
    routes = np.zeros((tokens, used), ROUTE)
    routes["place"] = rng.permutation(tokens * used).reshape(tokens, used)
    routes["factor"] = rng.standard_normal((tokens, used))
    y = rng.standard_normal((tokens * used, dim)).astype(np.float32)
    x = Output([tokens, dim], initial=rng.standard_normal((tokens, dim)).astype(np.float32))
    args = make_args("AddExpertsArgs", dim=dim, used=used)
    check(run, "add_experts", routes, y, x, args, groups=(2, tokens), threads=(32, 1))


# Matrices of gates and ups, and the activation: with limits, which most gates and ups exceed, without gates.
FORMS = {"gated": (2, SILU), "limited": (2, CLAMPED_SILU), "without gates": (1, GELU_ERF)}
# Every type, and some with biases.
BIASED = ("limited", "without gates")
kinds = pytest.mark.parametrize(
    ("kind", "form"),
    [*((kind, "gated") for kind in TYPES), *((kind, form) for kind in ("F32", "Q4_0") for form in BIASED)],
)


def product(
    rng: np.random.Generator, kind: str, form: str, shape: tuple[int, int, int, int], rows: int, **fields: int
) -> tuple[Weights, Array, Array, Array]:
    """Make stacked weights, their biases, rows to multiply, and arguments.

    `shape` is the numbers of matrices, of experts, and of an expert's rows and columns.
    """
    count, experts, out_dim, in_dim = shape
    biased = form in BIASED
    weights = Weights(rng, kind, [experts * out_dim] * count, in_dim)
    bias = rng.standard_normal(count * experts * out_dim) * (5 if biased else np.nan)
    x = rng.standard_normal((rows, in_dim)) * (5 if form == "limited" else 1)
    args = make_args(
        "ExpertsArgs",
        weights=np.array([weights.stacked()], STRUCTS["StackedWeights"])[0],
        in_dim=in_dim,
        out_dim=out_dim,
        activation=FORMS[form][1],
        has_bias=biased,
        **fields,
    )
    return weights, bias.astype(np.float32), x.astype(np.float32), args


@kinds
def test_matvec_experts(run: Run, kind: str, form: str) -> None:
    rng = np.random.default_rng(2)
    experts, out_dim, tokens, used = 4, 41, 3, 2  # a threadgroup computes two rows
    in_dim = columns(kind, 72)
    routes = np.zeros((tokens, used), ROUTE)
    routes["expert"] = [[3, 0], [1, 3], [2, 1]]
    grid: Any = {"groups": (ceil_div(out_dim, 2), tokens * used), "threads": (64, 1), "within": 2e-4}
    for step, count, rows in (("swiglu_", FORMS[form][0], tokens), ("", 1, tokens * used)):
        shape = (count, experts, out_dim, in_dim)
        weights, bias, x, args = product(rng, kind, form, shape, rows, used=used, lanes_per_row=32)
        buffers = (weights.bytes, bias, x, routes, Output([tokens * used, out_dim]), args)
        check(run, f"matvec_experts_{step}{kind.lower()}", *buffers, **grid)


@kinds
def test_matmul_experts(run: Run, kind: str, form: str) -> None:
    rng = np.random.default_rng(3)
    experts, out_dim, tokens, places = 3, 40, 50, 76
    in_dim = columns(kind, 72)
    tiles = np.zeros(5, TILE)  # expert 1 has no rows, and the last tile does not exist
    tiles["expert"], tiles["first"], tiles["count"] = [0, 0, 2, 2, 0], [0, 32, 37, 69, 0], [32, 5, 32, 7, 0]
    by_place = rng.integers(0, tokens, places).astype(np.uint32)
    for step, count, rows in (("swiglu_", FORMS[form][0], tokens), ("", 1, places)):
        shape = (count, experts, out_dim, in_dim)
        weights, bias, x, args = product(rng, kind, form, shape, rows, used=1, lanes_per_row=0)
        inputs = (x.astype(np.float16), *([by_place] if step else []), tiles)
        out = Output([places, out_dim], "f16" if step else "f32")
        grid: Any = {"groups": (ceil_div(out_dim, 32 // count), len(tiles)), "threads": (128, 1)}
        name = f"matmul_experts_{step}{kind.lower()}"
        check(run, name, weights.bytes, bias, *inputs, out, args, compare=near, **grid)
