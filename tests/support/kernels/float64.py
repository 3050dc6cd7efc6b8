"""Steps of models in float64, from their definitions: the oracle of engines and kernels."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]


def sigmoid(x: npt.ArrayLike) -> Array:
    with np.errstate(over="ignore"):
        share: Array = 1 / (1 + np.exp(-np.asarray(x, np.float64)))
    return share


def silu(x: npt.ArrayLike) -> Array:
    return np.asarray(x, np.float64) * sigmoid(x)


def gelu(x: Array) -> Array:
    """Return ``x * P(X <= x)`` for a standard normal X."""
    return x * np.vectorize(math.erfc)(-x / math.sqrt(2)) / 2


def gelu_tanh(x: Array) -> Array:
    """Return the usual approximation of `gelu`."""
    with np.errstate(over="ignore"):
        share: Array = 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * share


# By the names of the kernels.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu": gelu_tanh,
    "gelu_erf": gelu,
    "relu": lambda x: np.maximum(x, 0),
}


def clamped_silu(gate: Array, up: Array) -> Array:
    """Return the gated activation of gpt-oss, which limits the gate and the factor."""
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate * sigmoid(1.702 * gate) * (up + 1)


# Infinite, largest and subnormal floats of both signs.
_ENDS: list[float] = [np.inf, float(np.finfo(np.float32).max), 1e38, 1e32, 200, 1e-37, 1e-40, 1e-45, 0]
EXTREME = np.array([sign * end for end in _ENDS for sign in (1, -1)], np.float32)


def extreme_activations() -> dict[str, Array]:
    """Return the gated activations of EXTREME with a factor of 1, in the order of their numbers.

    The activation of -inf is the limit, 0.
    """
    g = np.clip(EXTREME.astype(np.float64), -1e4, np.inf)  # 0 times infinity is NaN
    found = {name: activation(g) for name, activation in ACTIVATIONS.items()}
    return {**found, "clamped silu": clamped_silu(g, np.ones_like(g))}


def softmax(x: npt.ArrayLike) -> Array:
    """Return shares over the last axis."""
    wide = np.asarray(x, np.float64)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def soft_limit(x: Array, cap: float) -> Array:
    """Limit values softly, unless the limit is 0."""
    return cap * np.tanh(x / cap) if cap else x


def visible(distance: npt.NDArray[np.int64], window: int, causal: bool) -> npt.NDArray[np.bool_]:
    """Return whether attention sees keys `distance` positions before the query; window 0: unlimited."""
    if causal:
        return (distance >= 0) & (distance < (window or np.inf))
    return np.abs(distance) <= (window // 2 if window else np.inf)


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    added: Iterable[Array | float] = itertools.repeat(0.0),
    *,
    cap: float = 0.0,
    sinks: npt.NDArray[np.floating] | None = None,
) -> Array:
    """Return attention of ``[n, heads, key_dim]`` over ``[m, kv_heads, ...]``, ``[n, heads, value_dim]``.

    Consecutive heads share keys and values. `added` has addends of each head's limited scores ``[n, m]``:
    minus infinity hides a key. A sink is a score without a value.
    """
    out = np.empty((*q.shape[:2], v.shape[2]))
    for head, bias in zip(range(q.shape[1]), added, strict=False):
        shared = head // (q.shape[1] // k.shape[1])
        scores = soft_limit(scale * (q[:, head] @ k[:, shared].T), cap) + bias
        if sinks is not None:
            scores = np.concatenate([scores, np.full((len(q), 1), sinks[head])], axis=1)
        out[:, head] = softmax(scores)[:, : len(k)] @ v[:, shared]
    return out


def rms(x: Array, eps: float) -> Array:
    """Normalize the last axis to a root mean square of 1."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def layer_norm(x: npt.ArrayLike, eps: float) -> Array:
    """Normalize the last axis to a mean of 0 and a variance of 1."""
    wide = np.asarray(x, np.float64)
    return rms(wide - wide.mean(axis=-1, keepdims=True), eps)


def rotate(x: Array, turns: npt.NDArray[np.complex128], halves: bool) -> Array:
    """Rotate ``[tokens, heads, dim]`` by the complex numbers ``[tokens, pairs]``.

    Pairs are columns of two halves, or neighbours. Later dimensions are unchanged.
    """
    out: Array = x.copy()
    pairs = turns.shape[-1]
    first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    if not halves:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    turned = (x[..., first] + 1j * x[..., second]) * turns[:, None]
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def alibi_slope(head: int, heads: int) -> float:
    """Return the slope of ALiBi; heads beyond a power of two use every other slope of twice as many."""
    whole = 2 ** math.floor(math.log2(heads))
    power = (head + 1) / whole if head < whole else (2 * (head - whole) + 1) / (2 * whole)
    return float(2.0 ** (-8 * power))


def position_bucket(distance: int, buckets: int = 32, furthest: int = 128) -> int:
    """Return T5's bucket of a key `distance` positions after the query (arXiv:1910.10683)."""
    half, n = buckets // 2, abs(distance)
    exact = half // 2
    far = exact + int(math.log(max(n, 1) / exact) / math.log(furthest / exact) * (half - exact) + 1e-9)
    return (half if distance > 0 else 0) + (n if n < exact else min(far, half - 1))


def scan_step(
    state: Array, x: Array, b: Array, c: Array, step: Array, a: Array, skip: Array
) -> tuple[Array, Array]:
    """Update the state ``[heads, rows, dim]`` of Mamba-2 by a token; return its output (arXiv:2405.21060).

    A token has x ``[heads, dim]``, b and c ``[heads, rows]``, and a step of each head before softplus.
    """
    step = np.logaddexp(0.0, step)
    state = np.exp(step * a)[:, None, None] * state + np.einsum("h,hr,hd->hrd", step, b, x)
    return state, np.einsum("hr,hrd->hd", c, state) + skip[:, None] * x


def gated_delta_step(
    state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array
) -> tuple[Array, Array]:
    """Update the state ``[heads, keys, columns]`` of a gated delta rule by a token (arXiv:2412.06464).

    Also return the token's output ``[heads, columns]``.
    """
    state = decay[:, None, None] * state
    error = v - np.einsum("hk,hkv->hv", k, state)
    state = state + np.einsum("hk,hv->hkv", k, beta[:, None] * error)
    return state, np.einsum("hk,hkv->hv", q, state)
