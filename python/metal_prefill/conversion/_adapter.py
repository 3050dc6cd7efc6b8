"""LoRA adapters (arXiv:2106.09685), merged into the weights of a folder.

An adapter is a folder as peft saves it, which may be in that of the model, as those of jina-embeddings-v5
(arXiv:2602.15547); or one of several within the weights, as jina-embeddings-v3 has them (arXiv:2409.10173):
next to a matrix, ``lora_A`` and ``lora_B`` have one matrix for each adapter.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from metal_prefill.conversion._folder import ADAPTER, Fields, adapters_of
from metal_prefill.conversion._weights import FloatArray, Index, Stack, Weight, listed_tensors
from metal_prefill.errors import GGUFError

FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(
    rf"{re.escape(_PREFIX)}(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B)(\.weight)?"
)

_ORIGINAL = ".parametrizations.weight.original"
_OWN = re.compile(r"(?P<module>.+)\.parametrizations\.weight\.0\.lora_(?P<part>[AB])")


def adapted(
    config: Fields,  # configuration of the folder, which names the adapters within its weights
    weights: Mapping[str, Weight],
    adapter: Path | None,  # folder of the adapter, or the name of one within the weights
    prefixes: tuple[str, ...],  # beginnings of names that the folder or the adapter may lack
) -> Mapping[str, Weight]:
    """Return the weights of a folder with those of an adapter added, if there is one."""
    own = [str(name) for name in config.sequence("lora_adaptations")]
    index = own.index(str(adapter)) if str(adapter) in own else None
    if index is None and adapter is not None and not adapter.is_dir():
        known = ", ".join(own or adapters_of(config.path.parent))
        problem = f"is neither a folder nor one of {known}" if known else "is not a folder"
        raise config.error(f"adapter {adapter} {problem}")
    if own:
        weights = _with_own(config, weights, len(own), index)
        adapter = adapter if index is None else None
    return weights if adapter is None else merged(weights, adapter, prefixes)


def _with_own(
    config: Fields, weights: Mapping[str, Weight], count: int, index: int | None
) -> dict[str, Weight]:
    """Return the weights with the product of one of the pairs within them added, or of none."""
    found: dict[str, Weight] = {}
    pairs: dict[str, dict[str, Weight]] = {}
    for name, weight in weights.items():
        match = _OWN.fullmatch(name)
        if match is not None:
            if len(weight.shape) != 3 or weight.shape[0] != count:
                raise weight.error(
                    f"has shape {weight.shape}, expected {count} matrices, one for each adapter"
                )
            pairs.setdefault(match["module"], {})[match["part"]] = weight
        else:
            bare = f"{name.removesuffix(_ORIGINAL)}.weight" if name.endswith(_ORIGINAL) else name
            found[bare] = replace(weight, name=bare)
    if index is None:
        return found
    for module, pair in pairs.items():
        base = found.get(f"{module}.weight")
        if base is None or set(pair) != {"A", "B"}:
            raise config.error(f"{module} lacks one of its weight and the two matrices of adapters")
        down, up = (Stack.divided(pair[part]).matrices[index] for part in "AB")
        if module.endswith("_embeddings"):  # A has its rows, and B its columns
            down, up = up, down
        scale = config.number("lora_alpha", default=1.0) / down.shape[0]
        found[f"{module}.weight"] = _sum(base, module, down, up, scale)
    return found


def merged(
    weights: Mapping[str, Weight],
    adapter: Path,  # folder of the adapter
    prefixes: tuple[str, ...],  # beginnings of names that the folder or the adapter may lack
) -> dict[str, Weight]:
    """Return the weights of a folder with those of an adapter added."""
    config = Fields.read(adapter / ADAPTER)
    config.require("peft_type", ("LORA",), None)
    config.require("bias", ("none",), "none")
    for option in (
        *("use_dora", "fan_in_fan_out", "alora_invocation_tokens", "layer_replication"),
        "modules_to_save",
    ):
        config.require(option, (False, None, []), False)
    if not (adapter / FILE).is_file():
        raise GGUFError(f"{adapter}: has no {FILE}")
    patterns = config.object("alpha_pattern")
    names = {_bare(name, prefixes): name for name in weights}
    found = dict(weights)
    for module, down, up in _pairs(config, adapter):
        name = names.get(f"{_bare(module, prefixes)}.weight")
        if name is None:
            raise GGUFError(f"{down.file}: changes {module}, which the model does not have")
        key = next((key for key in patterns.values if module == key or module.endswith(f".{key}")), None)
        rank = down.shape[0]
        scale = config.number("lora_alpha") if key is None else patterns.number(key)
        scale /= math.sqrt(rank) if config.boolean("use_rslora", default=False) else rank
        found[name] = _sum(found[name], module, down, up, scale, transposed="embedding" in down.name)
    return found


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


def _sum(
    weight: Weight, module: str, down: Weight, up: Weight, scale: float, *, transposed: bool = False
) -> Weight:
    """Return a weight plus the product of two matrices, or plus its transpose."""
    shape = (up.shape[0], down.shape[1])
    if down.shape[0] != up.shape[1] or weight.shape != (shape[::-1] if transposed else shape):
        raise GGUFError(
            f"{down.file}: the matrices {down.shape} and {up.shape} of {module} do not fit its shape "
            f"{weight.shape}"
        )

    def compute(index: Index) -> FloatArray:
        product = down.columns(index) @ up.rows().T if transposed else up.rows(index) @ down.rows()
        return weight.rows(index) + scale * product

    return weight.computed(compute)
