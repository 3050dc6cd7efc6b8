"""Model file to measure, which is found or synthesized and cached."""

import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import model_weight_count_rounded_notation

from metal_prefill.bench._cases import TASK
from metal_prefill.engine import chosen_mode
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.hub._local_file import local_file
from metal_prefill.storage._cache_folder import cache_folder
from metal_prefill.text._tokenizer import Tokenizer

SHAPE = "smollm-135m"


def found(model: str | os.PathLike[str] | None) -> Path:
    """Return the file of a model; by default one that is written on first use, with random weights.

    It has SmolLM-135M's shape, tensor types and vocabulary size. Speed depends on the shape and not on the
    words.
    """
    if model is not None:
        return local_file(model)
    from metal_prefill import __version__, synth

    path = cache_folder() / f"{SHAPE}-{__version__}.Q4_0.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        synth.synthesize(path, preset=SHAPE)
    return path


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model; columns of a benchmark have llama-bench's names."""

    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    vocab_size: int
    context_length: int
    generates: bool  # whether the model predicts text
    compute: str  # mode that ``"auto"`` selects


def task_ids(path: str | Path) -> npt.NDArray[np.int32]:
    """Return the ids of `cases.TASK` as a prompt of the model."""
    with GGUFFile(path) as gguf:
        tokenizer = Tokenizer(gguf)
        return np.array(tokenizer.apply_chat_template([{"role": "user", "content": TASK}]), np.int32)


def read_facts(path: Path) -> ModelFacts:
    """Read facts from the file; `model_type` names the type of most weights in the layers."""
    with GGUFFile(path) as gguf:
        config = read_config(gguf)
        sizes: Counter[str] = Counter()
        for tensor in gguf.tensors.values():
            if tensor.name.startswith("blk."):
                sizes[tensor.type_name] += prod(tensor.shape)
        n_params = sum(prod(tensor.shape) for tensor in gguf.tensors.values())
        kind, count = sizes.most_common(1)[0][0], model_weight_count_rounded_notation(n_params)
        return ModelFacts(
            model_filename=str(path),
            model_type=f"{config.architecture} {count} {kind}",
            model_size=sum(tensor.nbytes for tensor in gguf.tensors.values()),
            model_n_params=n_params,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            generates=config.generates,
            compute=chosen_mode(gguf, config),
        )
