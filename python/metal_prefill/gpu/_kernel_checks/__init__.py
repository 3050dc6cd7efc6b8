"""Comparison of individual dispatches with the same step computed in float64.

A trace with contents contains the buffers of each dispatch before and after it ran. The step is recomputed
from the earlier contents, so that kernels that read results of a faulty one are not reported. The CPU
engine's code unpacks the weights. For matrix products, only some rows are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from metal_prefill import _core
from metal_prefill.gpu._kernel_checks import attention, products, recurrences, steps
from metal_prefill.gpu._kernel_checks.captured import Captured, Expected

# Relative to the largest result. Kernels for few tokens are within 2e-4 of float64, those with operands in
# half precision within a few 1e-3; errors of a faulty kernel are larger by orders of magnitude.
_BOUND = 1e-2


@dataclass(frozen=True)
class Difference:
    """A result that differs from the expected value."""

    kernel: str
    index: int
    got: float
    expected: float

    def __str__(self) -> str:
        return f"{self.kernel}: value {self.index} is {self.got:.6g}, expected {self.expected:.6g}"


# By the prefix of the kernel's name.
_STEPS: dict[str, Callable[[Captured], Expected]] = {
    "embed_": products.embed,
    "rmsnorm_matvec_": products.product,
    "rmsnorm_add": steps.rmsnorm_add,
    "rmsnorm_": steps.rmsnorm,
    "layernorm_twice": steps.layernorm_twice,
    "layernorm_": steps.layernorm,
    "add_bias": steps.add_bias,
    "choose_experts_": products.choose_experts,
    "sort_routes": products.sort_routes,
    "matvec_experts_": products.matvec_experts,
    "matmul_experts_": products.matmul_experts,
    "add_experts": products.add_experts,
    "matvec_": products.product,
    "multi_token_matvec_": products.product,
    "matmul_": products.product,
    "swiglu_": steps.swiglu,
    "layer_inputs": steps.layer_inputs,
    "gate_input_": steps.gate_input,
    "causal_conv_": recurrences.causal_conv,
    "scan_norm_": recurrences.scan_norm,
    "scan_": recurrences.scan,
    "gated_delta": recurrences.gated_delta,
    "gated_norm_": recurrences.gated_norm,
    "gate_heads_": steps.gate_heads,
    "rope_append_conv_": recurrences.rope_append_conv,
    "rope_append_": attention.rope_append,
    "rope_attention_decode_": attention.attention,
    "relative_scores_": attention.relative_scores,
    "attention_combine": attention.combine,
    "attention_": attention.attention,
    "soft_cap_in_place": steps.soft_cap,
    "argmax_stage1": steps.argmax_stage1,
    "argmax_stage2": steps.argmax_stage2,
    "log_prob": steps.log_prob,
}


def results(dispatch: Captured) -> Expected:
    """Yield results of a dispatch, each with the expected values; raises KeyError without a reference."""
    step = next((step for start, step in _STEPS.items() if dispatch.kernel.startswith(start)), None)
    if step is None:
        raise KeyError(dispatch.kernel)
    return step(dispatch)


def difference(dispatch: _core.Dispatch) -> Difference | None:
    """Return the first incorrect result of a dispatch, or None if all are correct."""
    with np.errstate(invalid="ignore", over="ignore"):  # after a faulty kernel, inputs may be NaN
        for got, expected in results(Captured(dispatch)):
            bound = _BOUND * max(float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)), 1e-6)
            both_nan = np.isnan(got) & np.isnan(expected)
            wrong = ~(np.abs(got.astype(np.float64) - expected) <= bound) & (got != expected) & ~both_nan
            if wrong.any():
                index = int(np.argmax(wrong))
                return Difference(dispatch.kernel, index, float(got[index]), float(expected[index]))
    return None
