"""Norms, biases, activations and outputs."""

import numpy as np

from metal_prefill.gpu._kernel_checks.captured import (
    Captured,
    Expected,
    Values,
    activate,
    activate_gated,
    rms_normed,
)
from metal_prefill.gpu._trace import layout_of

_CANDIDATE = layout_of("Candidate")


def rmsnorm(d: Captured) -> Expected:
    dim = d.args["dim"]
    y_binding = 1 if d.kernel == "rmsnorm_in_place" else 2
    weight = d.floats(0, dim)
    for row in d.places(d.grid[0], dim, d.args["stride"]):
        x = d.floats(1, row)
        # Without a weight, it is a copy.
        expected = rms_normed(x, weight, d.args["eps"]) if d.args["has_weight"] else x
        yield d.after(y_binding, d.out)[row], expected


def rmsnorm_add(d: Captured) -> Expected:
    a, dim, has_next = d.args, d.args["dim"], d.kernel.startswith("rmsnorm_add_norm_")
    weight, second = d.floats(0, dim), d.floats(1, dim)
    scale = second[0] if a["has_scale"] else 1.0
    for row in d.places(d.grid[0], dim):
        y = (d.floats(3, row) + rms_normed(d.floats(2, row), weight, a["eps"])) * scale
        yield d.after(3, np.float32)[row], y
        if has_next:
            yield d.after(4, d.out)[row], rms_normed(y, second, a["next_eps"]) if a["has_next"] else y


def _layer_normed(x: Values, width: int, weight: Values, eps: float) -> Values:
    """Return the norm of the first `width` values; those after them are zeros, as are their weights."""
    normed = np.zeros_like(x)
    normed[:width] = rms_normed(x[:width] - x[:width].mean(), weight[:width], eps)
    return normed


def layernorm(d: Captured) -> Expected:
    dim, stream = d.args["dim"], d.kernel == "layernorm_stream"
    in_place = stream or d.kernel == "layernorm_in_place"
    weight, bias = d.floats(0, dim), d.floats(1, dim)
    addend = d.floats(2, dim) if in_place and d.args["has_addend"] else 0.0
    x_binding, y_binding = (3, 3) if in_place else (2, 3)
    for row in d.places(d.grid[0], dim, d.args["stride"]):
        normed = _layer_normed(d.floats(x_binding, row) + addend, d.args["width"], weight, d.args["eps"])
        expected = normed + (bias if d.args["has_bias"] else 0.0)
        yield d.after(y_binding, d.out)[row], expected
        if stream:
            yield d.after(4, np.float16)[row], expected


def layernorm_twice(d: Captured) -> Expected:
    dim, width, eps = d.args["dim"], d.args["width"], d.args["eps"]
    weight, bias, addend, second_weight, second_bias = (d.floats(binding, dim) for binding in range(5))
    for row in d.places(d.grid[0], dim):
        x = d.floats(6, row)
        attended = x + d.floats(5, row) + (addend if d.args["has_addend"] else 0.0)
        stream = x + _layer_normed(attended, width, weight, eps) + (bias if d.args["has_bias"] else 0.0)
        expected = _layer_normed(stream, width, second_weight, eps)
        expected = expected + (second_bias if d.args["has_second_bias"] else 0.0)
        yield d.after(5, np.float32)[row], stream
        yield d.after(6, np.float32)[row], expected
        yield d.after(7, np.float16)[row], expected


def add_bias(d: Captured) -> Expected:
    dim = d.args["dim"]
    for row in d.places(d.grid[1], dim):
        yield d.after(1, np.float32)[row], d.floats(1, row) + d.floats(0, dim)


def swiglu(d: Captured) -> Expected:
    n, activation, gated = d.args["ffn_dim"], d.args["activation"], d.args["gated"]
    tokens, columns = d.args["tokens"], 2 * n if gated else n
    bias = d.floats(0, columns) if d.args["has_bias"] else 0.0
    for row, out in zip(d.places(tokens, columns), d.places(tokens, n), strict=True):
        x = d.floats(1, row) + bias
        expected = activate_gated(x[:n], x[n:], activation) if gated else activate(x, activation)
        yield d.after(2, d.out)[out], expected


def layer_inputs(d: Captured) -> Expected:
    a, dim, layers = d.args, d.args["dim"], d.args["layers"]
    for row in d.places(d.grid[1], layers * dim):
        added, x = (d.floats(binding, row).reshape(layers, dim) for binding in (1, 2))
        mean = (x * x).sum(1, keepdims=True) / (dim * a["filled"])
        expected = (x / np.sqrt(mean + a["eps"]) * d.floats(0, dim) + added) / np.sqrt(2.0)
        yield d.after(2, np.float32)[row], expected.ravel()


def gate_input(d: Captured) -> Expected:
    dim, tokens = d.args["dim"], d.args["tokens"]
    values = d.places(tokens, dim, d.args["input_stride"])
    for row, value in zip(d.places(tokens, dim), values, strict=True):
        expected = activate_gated(d.floats(0, row), d.floats(1, value), d.args["activation"])
        yield d.after(2, d.out)[row], expected


def gate_heads(d: Captured) -> Expected:
    a = d.args
    heads, width, step = a["n_heads"], a["value_dim"], a["query_step"]
    queries = d.places(a["tokens"], heads * step, a["q_stride"])
    for query, row in zip(queries, d.places(a["tokens"], heads * width), strict=True):
        gate = d.floats(0, query).reshape(heads, step)[:, step // 2 :][:, :width].ravel()
        yield d.after(1, d.out)[row], d.before(1, d.out)[row] / (1.0 + np.exp(-gate))


def soft_cap(d: Captured) -> Expected:
    n, cap = d.args["n"], d.args["cap"]
    yield d.after(0, np.float32)[:n], cap * np.tanh(d.floats(0, n) / cap)


def argmax_stage1(d: Captured) -> Expected:
    groups, n = d.grid[0], d.args["n"]
    for row in range(d.grid[1]):
        logits = d.before(0, np.float32)[row * n : (row + 1) * n]
        found = d.after(1, _CANDIDATE)[row * groups : (row + 1) * groups]
        inside = found["index"] < n
        yield (
            np.where(inside, found["value"], -np.inf).max(keepdims=True),
            np.fmax.reduce(logits, initial=-np.inf, keepdims=True),
        )
        yield found["value"][inside], logits[found["index"][inside]]


def argmax_stage2(d: Captured) -> Expected:
    n = d.args["n"]
    for row in range(d.grid[0]):
        candidates = d.before(0, _CANDIDATE)[row * n : (row + 1) * n]
        best = candidates[np.lexsort((candidates["index"], -candidates["value"]))[:1]]
        found = d.after(1, _CANDIDATE)[row : row + 1]
        yield found["value"], best["value"]
        yield found["index"].astype(np.float64), best["index"].astype(np.float64)


def log_prob(d: Captured) -> Expected:
    n, targets = d.args["vocab_size"], d.before(1, np.int32)
    for token in d.some(d.grid[0]):
        logits = d.floats(0, slice(token * n, (token + 1) * n))
        best = logits.max()
        log_prob = logits[targets[token]] - best - np.log(np.exp(logits - best).sum())
        yield d.after(2, np.float32)[token : token + 1], np.array([log_prob if targets[token] >= 0 else 0.0])
