"""Norms, biases, activations and outputs."""

import numpy as np

from metal_prefill.gpu._kernel_checks.captured import (
    SAMPLED_TOKENS,
    Captured,
    Expected,
    Values,
    activate,
    activate_gated,
    rms_normed,
    some_of,
)
from metal_prefill.gpu._trace import layout_of

_CANDIDATE = layout_of("Candidate")


def rmsnorm(d: Captured) -> Expected:
    dim, stride = d.args["dim"], d.args["stride"]
    y_binding = 1 if d.kernel == "rmsnorm_in_place" else 2
    weight = d.before(0, np.float32)[:dim].astype(np.float64)
    x = d.before(1, np.float32)
    for token in some_of(d.grid[0], SAMPLED_TOKENS):
        row = slice(token * stride, token * stride + dim)
        expected = x[row].astype(np.float64)
        if d.args["has_weight"]:  # else a copy
            expected = rms_normed(expected, weight, d.args["eps"])
        yield d.after(y_binding, d.out)[row], expected


def rmsnorm_add(d: Captured) -> Expected:
    a, dim, has_next = d.args, d.args["dim"], d.kernel.startswith("rmsnorm_add_norm_")
    weight, second = (d.before(binding, np.float32)[:dim].astype(np.float64) for binding in (0, 1))
    scale = second[0] if a["has_scale"] else 1.0
    for token in some_of(d.grid[0], SAMPLED_TOKENS):
        row = slice(token * dim, (token + 1) * dim)
        x, y = (d.before(binding, np.float32)[row].astype(np.float64) for binding in (2, 3))
        y = (y + rms_normed(x, weight, a["eps"])) * scale
        yield d.after(3, np.float32)[row], y
        if has_next:
            yield d.after(4, d.out)[row], rms_normed(y, second, a["next_eps"]) if a["has_next"] else y


def _layer_normed(x: Values, width: int, weight: Values, eps: float) -> Values:
    """Return the norm of the first `width` values; those after them are zeros, as are their weights."""
    normed = np.zeros_like(x)
    normed[:width] = rms_normed(x[:width] - x[:width].mean(), weight[:width], eps)
    return normed


def layernorm(d: Captured) -> Expected:
    dim, stride, stream = d.args["dim"], d.args["stride"], d.kernel == "layernorm_stream"
    in_place = stream or d.kernel == "layernorm_in_place"
    weight, bias = (d.before(binding, np.float32)[:dim].astype(np.float64) for binding in (0, 1))
    addend = d.before(2, np.float32)[:dim] if in_place and d.args["has_addend"] else 0.0
    x_binding, y_binding = (3, 3) if in_place else (2, 3)
    x = d.before(x_binding, np.float32)
    for token in some_of(d.grid[0], SAMPLED_TOKENS):
        first = token * stride
        row = slice(first, first + dim)
        values = x[row].astype(np.float64) + addend
        expected = _layer_normed(values, d.args["width"], weight, d.args["eps"])
        expected = expected + (bias if d.args["has_bias"] else 0.0)
        yield d.after(y_binding, d.out)[row], expected
        if stream:
            yield d.after(4, np.float16)[row], expected


def layernorm_twice(d: Captured) -> Expected:
    dim, width, eps = d.args["dim"], d.args["width"], d.args["eps"]
    vectors = [d.before(binding, np.float32)[:dim].astype(np.float64) for binding in range(5)]
    weight, bias, addend, second_weight, second_bias = vectors
    for token in some_of(d.grid[0], SAMPLED_TOKENS):
        row = slice(token * dim, (token + 1) * dim)
        attended, x = (d.before(binding, np.float32)[row].astype(np.float64) for binding in (5, 6))
        attended = x + attended + (addend if d.args["has_addend"] else 0.0)
        stream = x + _layer_normed(attended, width, weight, eps) + (bias if d.args["has_bias"] else 0.0)
        expected = _layer_normed(stream, width, second_weight, eps)
        expected = expected + (second_bias if d.args["has_second_bias"] else 0.0)
        yield d.after(5, np.float32)[row], stream
        yield d.after(6, np.float32)[row], expected
        yield d.after(7, np.float16)[row], expected


def add_bias(d: Captured) -> Expected:
    dim = d.args["dim"]
    bias = d.before(0, np.float32)[:dim].astype(np.float64)
    for token in some_of(d.grid[1], SAMPLED_TOKENS):
        row = slice(token * dim, (token + 1) * dim)
        yield d.after(1, np.float32)[row], d.before(1, np.float32)[row] + bias


def swiglu(d: Captured) -> Expected:
    n = d.args["ffn_dim"]
    columns = 2 * n if d.args["gated"] else n
    bias = d.before(0, np.float32)[:columns] if d.args["has_bias"] else 0.0
    for token in some_of(d.args["tokens"], SAMPLED_TOKENS):
        row = d.before(1, np.float32)[token * columns : (token + 1) * columns].astype(np.float64) + bias
        activation = d.args["activation"]
        expected = (
            activate_gated(row[:n], row[n:], activation) if d.args["gated"] else activate(row, activation)
        )
        yield d.after(2, d.out)[token * n : (token + 1) * n], expected


def layer_inputs(d: Captured) -> Expected:
    a, dim, layers = d.args, d.args["dim"], d.args["layers"]
    weight = d.before(0, np.float32)[:dim].astype(np.float64)
    for token in some_of(d.grid[1], SAMPLED_TOKENS):
        row = slice(token * layers * dim, (token + 1) * layers * dim)
        added, x = (
            d.before(binding, np.float32)[row].reshape(layers, dim).astype(np.float64) for binding in (1, 2)
        )
        mean = (x * x).sum(1, keepdims=True) / (dim * a["filled"])
        expected = (x / np.sqrt(mean + a["eps"]) * weight + added) / np.sqrt(2.0)
        yield d.after(2, np.float32)[row], expected.ravel()


def gate_input(d: Captured) -> Expected:
    dim, stride = d.args["dim"], d.args["input_stride"]
    for token in some_of(d.args["tokens"], SAMPLED_TOKENS):
        row = slice(token * dim, (token + 1) * dim)
        gate = d.before(0, np.float32)[row].astype(np.float64)
        value = d.before(1, np.float32)[token * stride :][:dim]
        yield d.after(2, d.out)[row], activate_gated(gate, value, d.args["activation"])


def gate_heads(d: Captured) -> Expected:
    a = d.args
    heads, width, step = a["n_heads"], a["value_dim"], a["query_step"]
    for token in some_of(a["tokens"], SAMPLED_TOKENS):
        q = d.before(0, np.float32)[token * a["q_stride"] :][: heads * step].reshape(heads, step)
        gate = q[:, step // 2 :][:, :width].astype(np.float64).ravel()
        row = slice(token * heads * width, (token + 1) * heads * width)
        yield d.after(1, d.out)[row], d.before(1, d.out)[row] / (1.0 + np.exp(-gate))


def soft_cap(d: Captured) -> Expected:
    n, cap = d.args["n"], d.args["cap"]
    yield d.after(0, np.float32)[:n], cap * np.tanh(d.before(0, np.float32)[:n].astype(np.float64) / cap)


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
    for token in some_of(d.grid[0], SAMPLED_TOKENS):
        logits = d.before(0, np.float32)[token * n : (token + 1) * n].astype(np.float64)
        best = logits.max()
        log_prob = logits[targets[token]] - best - np.log(np.exp(logits - best).sum())
        yield d.after(2, np.float32)[token : token + 1], np.array([log_prob if targets[token] >= 0 else 0.0])
