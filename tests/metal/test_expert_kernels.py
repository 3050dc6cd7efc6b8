"""Kernels of feed-forwards with experts."""

import numpy as np
import pytest
from support.float64 import clamped_silu, gelu, silu
from support.kernel_harness import (
    CONSTANTS,
    STRUCTS,
    Array,
    Output,
    Run,
    Weights,
    ceil_div,
    close,
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
    run(
        "choose_experts_f32", router, norm, added, added_first, rows, routes.buffer, args,
        groups=(tokens, 1), threads=(64, 1),
    )  # fmt: skip
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
    order = np.argsort(-(scores + bias), axis=1)[:, :used]
    np.testing.assert_array_equal(found["expert"], order)
    factors = np.take_along_axis(scores, order, axis=1)
    close(found["factor"], 2.5 * factors / factors.sum(axis=1, keepdims=True))
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
    by_place, tiles = Output([count], np.uint32), Output([most], TILE)
    args = make_args("SortRoutesArgs", experts=experts, used=used, routes=count, tiles=most)
    run("sort_routes", routes, by_place.buffer, tiles.buffer, args, groups=(1, 1), threads=(64, 1))
    order = np.argsort(routes["expert"], kind="stable")
    np.testing.assert_array_equal(routes["place"][order], np.arange(count))
    np.testing.assert_array_equal(by_place.check(), order // used)
    covered: list[int] = []
    for tile in tiles.check():
        places = range(tile["first"], tile["first"] + tile["count"])
        assert len(places) <= PLACES
        assert set(routes["expert"][order[places]]) <= {tile["expert"]}
        covered += places
    assert covered == list(range(count))


def test_add_experts(run: Run) -> None:
    rng = np.random.default_rng(1)
    tokens, used, dim = 5, 3, 136
    routes = np.zeros((tokens, used), ROUTE)
    routes["place"] = rng.permutation(tokens * used).reshape(tokens, used)
    routes["factor"] = rng.standard_normal((tokens, used))
    y = rng.standard_normal((tokens * used, dim)).astype(np.float32)
    x = Output([tokens, dim], initial=rng.standard_normal((tokens, dim)).astype(np.float32))
    before = x.array.astype(np.float64)
    args = make_args("AddExpertsArgs", dim=dim, used=used)
    run("add_experts", routes, y, x.buffer, args, groups=(2, tokens), threads=(32, 1))
    close(
        x.check(), before + np.einsum("tu,tud->td", routes["factor"].astype(np.float64), y[routes["place"]])
    )


def experts_args(
    weights: Weights,
    in_dim: int,
    out_dim: int,
    used: int,
    lanes: int,
    activation: int = SILU,
    has_bias: bool = False,
) -> Array:
    """Make the arguments of a product."""
    return make_args(
        "ExpertsArgs",
        weights=np.array([weights.stacked()], STRUCTS["StackedWeights"])[0],
        in_dim=in_dim,
        out_dim=out_dim,
        used=used,
        lanes_per_row=lanes,
        activation=activation,
        has_bias=has_bias,
    )


def activated(products: Array, form: str) -> Array:
    """Activate ``[matrices, rows, columns]``."""
    if form == "without gates":
        return gelu(products[0])
    gate, up = products
    return clamped_silu(gate, up) if form == "limited" else silu(gate) * up


def random_biases(rng: np.random.Generator, rows: int, present: bool) -> tuple[Array, Array]:
    """Make the biases of rows of experts: those to bind, and those that count."""
    biases = 5 * rng.standard_normal(rows).astype(np.float32)
    return (biases, biases) if present else (np.full(rows, np.nan, np.float32), np.zeros(rows))


# Every type, and some with biases: with limits of gates, which most gates and ups exceed, and without gates.
BIASED = ("limited", "without gates")
kinds = pytest.mark.parametrize(
    ("kind", "form"),
    [*((kind, "gated") for kind in TYPES), *((kind, form) for kind in ("F32", "Q4_0") for form in BIASED)],
)
ACTIVATIONS = {"gated": SILU, "limited": CLAMPED_SILU, "without gates": GELU_ERF}


@kinds
def test_matvec_experts(run: Run, kind: str, form: str) -> None:
    biased, matrices = form in BIASED, 1 if form == "without gates" else 2
    rng = np.random.default_rng(2)
    experts, out_dim, tokens, used = 4, 41, 3, 2  # a threadgroup computes two rows
    in_dim = columns(kind, 72)
    routes = np.zeros((tokens, used), ROUTE)
    routes["expert"] = [[3, 0], [1, 3], [2, 1]]
    flat = routes["expert"].ravel()
    first = Weights(rng, kind, [experts * out_dim] * matrices, in_dim)
    bias, added = random_biases(rng, matrices * experts * out_dim, biased)
    x = rng.standard_normal((tokens, in_dim)).astype(np.float32) * (5 if form == "limited" else 1)
    h = Output([tokens * used, out_dim])
    groups = (ceil_div(out_dim, 2), tokens * used)
    args = experts_args(first, in_dim, out_dim, used, 32, ACTIVATIONS[form], biased)
    name = kind.lower()
    run(
        f"matvec_experts_swiglu_{name}", first.bytes, bias, x, routes, h.buffer, args,
        groups=groups, threads=(64, 1),
    )  # fmt: skip
    rows = np.repeat(x.astype(np.float64), used, axis=0)[:, :, None]
    products = (first.values.reshape(matrices, experts, out_dim, in_dim)[:, flat] @ rows)[..., 0]
    close(h.check(), activated(products + added.reshape(matrices, experts, out_dim)[:, flat], form), 2e-4)

    down = Weights(rng, kind, [experts * out_dim], in_dim)
    inputs = rng.standard_normal((tokens * used, in_dim)).astype(np.float32)
    y = Output([tokens * used, out_dim])
    bias, added = random_biases(rng, experts * out_dim, biased)
    args = experts_args(down, in_dim, out_dim, used, 32, has_bias=biased)
    run(
        f"matvec_experts_{name}", down.bytes, bias, inputs, routes, y.buffer, args,
        groups=groups, threads=(64, 1),
    )  # fmt: skip
    of_routes = down.values.reshape(experts, out_dim, in_dim)[flat]
    expected = np.einsum("rod,rd->ro", of_routes, inputs.astype(np.float64))
    close(y.check(), expected + added.reshape(experts, out_dim)[flat], 2e-4)


@kinds
def test_matmul_experts(run: Run, kind: str, form: str) -> None:
    biased, matrices = form in BIASED, 1 if form == "without gates" else 2
    rng = np.random.default_rng(3)
    experts, out_dim, tokens = 3, 40, 50
    in_dim = columns(kind, 72)
    tiles = np.zeros(5, TILE)  # expert 1 has no rows, and the last tile does not exist
    tiles["expert"], tiles["first"], tiles["count"] = [0, 0, 2, 2, 0], [0, 32, 37, 69, 0], [32, 5, 32, 7, 0]
    of_places = np.concatenate([np.full(tile["count"], tile["expert"]) for tile in tiles])
    by_place = rng.integers(0, tokens, len(of_places)).astype(np.uint32)
    first = Weights(rng, kind, [experts * out_dim] * matrices, in_dim)
    bias, added = random_biases(rng, matrices * experts * out_dim, biased)
    x = rng.standard_normal((tokens, in_dim)).astype(np.float16) * np.float16(5 if form == "limited" else 1)
    h = Output([len(of_places), out_dim], np.float16)
    args = experts_args(first, in_dim, out_dim, 1, 0, ACTIVATIONS[form], biased)
    name = kind.lower()
    run(
        f"matmul_experts_swiglu_{name}", first.bytes, bias, x, by_place, tiles, h.buffer, args,
        groups=(ceil_div(out_dim, 32 // matrices), len(tiles)), threads=(128, 1),
    )  # fmt: skip
    rows = x.astype(np.float64)[by_place][:, :, None]
    products = (first.values.reshape(matrices, experts, out_dim, in_dim)[:, of_places] @ rows)[..., 0]
    near(h.check(), activated(products + added.reshape(matrices, experts, out_dim)[:, of_places], form))

    down = Weights(rng, kind, [experts * out_dim], in_dim)
    inputs = rng.standard_normal((len(of_places), in_dim)).astype(np.float16)
    y = Output([len(of_places), out_dim])
    bias, added = random_biases(rng, experts * out_dim, biased)
    args = experts_args(down, in_dim, out_dim, 1, 0, has_bias=biased)
    run(
        f"matmul_experts_{name}", down.bytes, bias, inputs, tiles, y.buffer, args,
        groups=(ceil_div(out_dim, 32), len(tiles)), threads=(128, 1),
    )  # fmt: skip
    of_routes = down.values.reshape(experts, out_dim, in_dim)[of_places]
    expected = np.einsum("rod,rd->ro", of_routes, inputs.astype(np.float64))
    near(y.check(), expected + added.reshape(experts, out_dim)[of_places])
