"""The work of a dispatch: bytes, operations and dependent steps, from its kernel, arguments and geometry.

Products and attention take nearly all of the time. Their instructions are counted from the source of the
shaders, by kind; the code that Apple's compiler generates has not been seen. Their bytes, each counted once,
agree with the emulator's counts (`tests/metal/test_trace.py`). All other steps share one estimate.
"""

from __future__ import annotations

from collections.abc import Callable

from metal_prefill.gpu._cost_model import attention, products
from metal_prefill.gpu._cost_model.operations import (
    FLOAT,
    LOOP,
    SIMD,
    Ops,
    UnknownKernelError,
    Work,
    dispatch_work,
)
from metal_prefill.gpu._dispatches import Dispatch

# By the prefix of a kernel's name.
_COUNTED: dict[str, Callable[[Dispatch], Work]] = {
    "matvec_experts": products.matvec_experts,
    "matmul_experts": products.matmul_experts,
    "matvec": products.matvec,
    "rmsnorm_matvec": products.matvec,
    "multi_token_matvec": products.matvec,
    "matmul": products.matmul,
    "rope_attention_decode": attention.rope_attention_decode,
    "attention_decode": attention.attention_decode,
    "attention_combine": attention.attention_combine,
    "attention_prefill": attention.attention_prefill,
    "attention_tensor": attention.attention_tensor,
}


def find_work(d: Dispatch) -> Work | None:
    """Return the work of a product or of attention; None for other steps and for types without counts."""
    try:
        return next((count(d) for stem, count in _COUNTED.items() if d.kernel.startswith(stem)), None)
    except UnknownKernelError:
        return None


def work_of(d: Dispatch) -> Work:
    """Return the work of a dispatch.

    Raises
    ------
    UnknownKernelError
        The instructions for the tensor type of a product have not been counted.
    """
    for stem, count in _COUNTED.items():
        if d.kernel.startswith(stem):
            return count(d)
    # A thread reads and writes a value, four of a norm, or a share of a head. Recurrences are in order.
    values = 4 if "norm" in d.kernel else d.args["key_dim"] / SIMD if "rope" in d.kernel else 1
    in_order = max((n for _, n in d.runs), default=0) if d.kernel.startswith(("scan", "gated_delta")) else 0
    ops = (Ops(alu=12, slow=1, memory=3) + LOOP) * max(in_order, 1) + Ops(alu=20, slow=3.5, shuffle=10)
    return dispatch_work(d, ops, 2 + in_order, cached=2 * values * FLOAT * d.groups * d.threads)
