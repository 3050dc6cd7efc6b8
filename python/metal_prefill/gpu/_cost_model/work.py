"""The work of a dispatch: bytes, operations and dependent steps, from its kernel, arguments and geometry.

Instructions are counted from the source of the shaders, by kind: those of the inner loops, with a fixed
allowance for the loop itself. The code that Apple's compiler generates for them has not been seen. Bytes,
each counted once, agree with the emulator's counts (`tests/metal/test_trace.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from metal_prefill.gpu._cost_model import attention, products, recurrences, steps
from metal_prefill.gpu._cost_model.operations import UnknownKernelError, Work
from metal_prefill.gpu._dispatches import Dispatch

# By the prefix of a kernel's name.
_WORK: dict[str, Callable[[Dispatch], Work]] = {
    "embed": steps.embed,
    "matvec": products.matvec,
    "rmsnorm_matvec": products.matvec,
    "multi_token_matvec": products.matvec,
    "matmul": products.matmul,
    "rmsnorm": steps.rmsnorm,
    "layernorm": steps.layernorm,
    "layernorm_twice": steps.layernorm_twice,
    "add_bias": steps.add_bias,
    "rope_append": attention.rope,
    "rope_append_conv": recurrences.rope_append_conv,
    "rope_attention_decode": attention.rope_attention_decode,
    "attention_decode": attention.attention_decode,
    "attention_combine": attention.attention_combine,
    "attention_prefill": attention.attention_prefill,
    "attention_tensor": attention.attention_tensor,
    "swiglu": steps.swiglu,
    "causal_conv": recurrences.causal_conv,
    "scan": recurrences.scan,
    "scan_norm": recurrences.scan_norm,
    "gated_delta": recurrences.gated_delta,
    "gated_norm": recurrences.gated_norm,
    "gate_heads": steps.gate_heads,
    "argmax": steps.argmax,
    "log_prob": steps.log_prob,
}


def find_work(dispatch: Dispatch) -> Work | None:
    """Return the work of a dispatch, or None if its kernel or tensor type is not known."""
    try:
        return work_of(dispatch)
    except UnknownKernelError:
        return None


def work_of(dispatch: Dispatch) -> Work:
    """Return the work of a dispatch.

    Raises
    ------
    UnknownKernelError
        The kernel or its tensor type is not known.
    """
    known = [stem for stem in _WORK if dispatch.kernel.startswith(stem)]
    if not known:
        raise UnknownKernelError(f"unknown kernel {dispatch.kernel!r}; known are {', '.join(_WORK)}")
    return _WORK[max(known, key=len)](dispatch)
