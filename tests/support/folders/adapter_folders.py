"""Folders of LoRA adapters as peft saves them, and model folders that have several."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from support.folders.decoder_folders import qwen3, sized
from support.folders.model_folders import Folder, Values, llama, values
from support.places import DATA

RECORD = DATA / "peft_vectors.npz"
TEXTS = ["who is the king?", "A rose, by any other name", "x", "Long live the King! He is dead."]
TASKS = ["retrieval", "text-matching", "clustering", "classification"]
RANK = 4
CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 8,
    "bias": "none",
    "base_model_name_or_path": "owner/base",
}
QUERY, WORDS = "encoder.layer.0.attention.self.query", "embeddings.word_embeddings"
PROMPTS = {"query": "Query: ", "document": "Document: "}


def adapter(
    path: Path, shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0, size: float = 1, **config: Any
) -> Path:
    """Write an adapter of matrices ``[out, in]`` of modules; of embeddings, ``[tokens, dim]``."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    tensors: dict[str, Values] = {}
    for i, (module, (rows, columns)) in enumerate(shapes.items(), seed):
        name = f"base_model.model.{module}."
        if module.endswith(WORDS):
            tensors |= {f"{name}lora_embedding_A": values((RANK, rows), i)}
            tensors |= {f"{name}lora_embedding_B": values((columns, RANK), i)}
        else:
            tensors |= {f"{name}lora_A.weight": size * values((RANK, columns), i)}
            tensors |= {f"{name}lora_B.weight": size * values((rows, RANK), i)}
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def _jina_v5(folder: Folder, **config: Any) -> Folder:
    """Make a folder as jina-embeddings-v5 has it: an adapter for each task, and a class that pools."""
    folder.config |= {
        "architectures": ["JinaEmbeddingsV5Model"],
        "model_type": "jina_embeddings_v5",
        "task_names": TASKS,
        "max_position_embeddings": 200,
        **config,
    }
    folder.tensors.pop("lm_head.weight", None)
    sized(folder)
    module = {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}
    folder.json("modules.json", [{**module, "kwargs": ["task", "truncate_dim"]}])
    folder.json("config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": "document"})
    shapes = {
        name.removeprefix("model.").removesuffix(".weight"): tensor.shape
        for name, tensor in folder.tensors.items()
        if name.endswith("_proj.weight")
    }
    for i, task in enumerate(TASKS):
        added = folder.path / "adapters" / task
        adapter(
            added, shapes, seed=100 * i, size=3, target_modules="all-linear", task_type="FEATURE_EXTRACTION"
        )
    return folder


def small(path: Path) -> Folder:
    """Make a folder of the model with a decoder, whose weights have the prefix of one with a head."""
    return _jina_v5(qwen3(path, use_sliding_window=False))


def nano(path: Path) -> Folder:
    """Make a folder of the model with an encoder."""
    folder = llama(path, "EuroBertModel")
    folder.tensors = {name.removeprefix("model."): tensor for name, tensor in folder.tensors.items()}
    return _jina_v5(folder, is_decoder=False, pad_token_id=0)


RECORDED: dict[str, Callable[[Path], Folder]] = {"small": small, "nano": nano}
