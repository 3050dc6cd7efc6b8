"""Conversions between arrays and tensors of PyTorch, which need not be installed."""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill.errors import MissingExtraError


def is_tensor(value: Any) -> bool:
    """Return whether a value is a PyTorch tensor or a list of tensors."""
    torch = sys.modules.get("torch")
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return torch is not None and isinstance(first, torch.Tensor)


def as_tensor(value: Any) -> Any:
    """Convert an array to a tensor of PyTorch, or raise MissingExtraError without it."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(f"tensors need PyTorch: pip install torch ({error})") from error
    return torch.from_numpy(np.asarray(value, order="C"))


def as_array(value: Any) -> npt.NDArray[Any]:
    """Convert an array, a tensor or a list of them to an array."""
    if is_tensor(value) and isinstance(value, (list, tuple)):
        return np.stack([as_array(item) for item in value])
    if not is_tensor(value):
        return np.asarray(value)
    tensor = value.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()  # NumPy lacks it


def like(array: npt.NDArray[Any], *inputs: Any) -> Any:
    """Convert a result to a tensor if one of the inputs is one."""
    return as_tensor(array) if any(map(is_tensor, inputs)) else array
