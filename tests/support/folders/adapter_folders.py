"""Folders of LoRA adapters as peft saves them, and model folders with several adapters."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from support.folders.decoder_folders import folder
from support.folders.model_folders import Folder, Values, filled, llama, values
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


def _jina_v5(made: Folder, **config: Any) -> Folder:
    """Make a folder in the form of jina-embeddings-v5: an adapter for each task, and a class that pools."""
    made.config |= {
        "architectures": ["JinaEmbeddingsV5Model"],
        "model_type": "jina_embeddings_v5",
        "task_names": TASKS,
        "max_position_embeddings": 200,
        **config,
    }
    made.tensors.pop("lm_head.weight", None)
    module = {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}
    made.json("modules.json", [{**module, "kwargs": ["task", "truncate_dim"]}])
    made.json("config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": "document"})
    shapes = {
        name.removeprefix("model.").removesuffix(".weight"): tensor.shape
        for name, tensor in made.tensors.items()
        if name.endswith("_proj.weight")
    }
    for i, task in enumerate(TASKS):
        added = made.path / "adapters" / task
        adapter(
            added, shapes, seed=100 * i, size=3, target_modules="all-linear", task_type="FEATURE_EXTRACTION"
        )
    return made


def small(path: Path) -> Folder:
    """Make a folder of the decoder model, whose weights have the prefix of a model with a head."""
    return _jina_v5(folder(path, "qwen3"))


def nano(path: Path) -> Folder:
    """Make a folder of the encoder model."""
    made = llama(path, "EuroBertModel")
    made.tensors = filled({name.removeprefix("model."): t.shape for name, t in made.tensors.items()})
    return _jina_v5(made, is_decoder=False, pad_token_id=0)


RECORDED: dict[str, Callable[[Path], Folder]] = {"small": small, "nano": nano}
