"""LoRA adapters (arXiv:2106.09685) as peft saves them, merged into the weights of a folder."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from metal_prefill.conversion._body import ADAPTER
from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._weights import Computed, FloatArray, Weight, listed_tensors
from metal_prefill.errors import GGUFError

FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(
    rf"{re.escape(_PREFIX)}(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B)(\.weight)?"
)


def merged(weights: Mapping[str, Weight], adapter: Path, prefixes: tuple[str, ...]) -> dict[str, Weight]:
    """Return the weights of a folder with those of an adapter added.

    Parameters
    ----------
    weights
        Those of the folder.
    adapter
        Folder of the adapter.
    prefixes
        Beginnings of names that the folder or the adapter may lack.

    Raises
    ------
    GGUFError
        A file of the adapter is missing or damaged, or a matrix does not fit the folder.
    UnsupportedModelError
        The adapter is not LoRA, or changes more than matrices.
    """
    config = Fields.read(adapter / ADAPTER)
    _check(config)
    if not (adapter / FILE).is_file():
        raise GGUFError(f"{adapter}: has no {FILE}")
    names = {_bare(name, prefixes): name for name in weights}
    found = dict(weights)
    for module, down, up in _pairs(config, adapter):
        name = names.get(f"{_bare(module, prefixes)}.weight")
        if name is None:
            raise GGUFError(f"{down.file}: changes {module}, which the model does not have")
        weight, of_embedding = found[name], "embedding" in down.name
        shape = (down.shape[1], up.shape[0]) if of_embedding else (up.shape[0], down.shape[1])
        if down.shape[0] != up.shape[1] or weight.shape != shape:
            raise GGUFError(
                f"{down.file}: the matrices {down.shape} and {up.shape} of {module} do not fit its shape "
                f"{weight.shape}"
            )
        scale = _scale(config, module, down.shape[0])
        found[name] = Computed(
            *(weight.file, weight.name, weight.dtype, weight.shape, 0, math.prod(shape)),
            partial(_sum, weight, down, up, scale, of_embedding),
        )
    return found


def _check(config: Fields) -> None:
    config.require("peft_type", ("LORA",), None)
    config.require("bias", ("none",), "none")
    for name in (
        *("use_dora", "fan_in_fan_out", "alora_invocation_tokens", "layer_replication"),
        "modules_to_save",
    ):
        config.require(name, (False, None, []), False)


def _pairs(config: Fields, adapter: Path) -> Iterator[tuple[str, Weight, Weight]]:
    """Yield the name of each module, and its two matrices: ``[rank, in]`` and ``[out, rank]``."""
    parts: dict[str, dict[str, Weight]] = {}
    for weight in listed_tensors(adapter / FILE):
        match = _NAME.fullmatch(weight.name)
        if match is None or len(weight.shape) != 2:
            raise config.unsupported(f"{FILE} has the tensor {weight.name}, which is not a matrix of LoRA")
        parts.setdefault(match["module"], {})[match["part"][-1]] = weight
    for module, pair in parts.items():
        if set(pair) != {"A", "B"}:
            raise GGUFError(f"{adapter / FILE}: {module} has one of two matrices")
        yield module, pair["A"], pair["B"]


def _bare(name: str, prefixes: tuple[str, ...]) -> str:
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)


def _scale(config: Fields, module: str, rank: int) -> float:
    """Return the factor of the product of two matrices."""
    patterns = config.object("alpha_pattern")
    key = next((key for key in patterns.values if module == key or module.endswith(f".{key}")), None)
    alpha = config.number("lora_alpha") if key is None else patterns.number(key)
    return alpha / (math.sqrt(rank) if config.boolean("use_rslora", default=False) else rank)


def _sum(weight: Weight, down: Weight, up: Weight, scale: float, of_embedding: bool) -> FloatArray:
    change = up.values() @ down.values()
    return weight.values() + scale * (change.T if of_embedding else change)
