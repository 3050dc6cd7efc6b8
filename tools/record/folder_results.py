"""Record results of transformers and peft for small models with random weights.

Results are logits of decoders, hidden states of encoders, and vectors of models with adapters and of decoders
with bidirectional attention. Run it when such a folder, encoder or text of ``tests/support`` changes.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from record import Records, written
from safetensors.torch import load_file
from support import comparison, small_models
from support.folders import (
    adapter_folders,
    bidirectional_folders,
    decoder_folders,
    encoder_folders,
    model_folders,
)
from tokenizers import Tokenizer

from metal_prefill.bench._peers.padded_texts import load_encoder

ADAPTED = {"small": "Qwen3", "nano": "EuroBert"}  # classes of the bodies
OWN = ("architectures", "model_type", "task_names")  # fields specific to the class of the model


def config_of(folder: Path) -> dict[str, Any]:
    """Return the configuration of a folder."""
    return json.loads((folder / "config.json").read_text())


def tensors_of(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of the tensors that transformers saves for a configuration."""
    kind = getattr(transformers, config["architectures"][0])
    with tempfile.TemporaryDirectory() as folder:
        kind(kind.config_class(**config)).save_pretrained(folder)
        return {name: list(tensor.shape) for name, tensor in load_file(f"{folder}/model.safetensors").items()}


def logits_of(folder: Path) -> Any:
    """Return the logits after some tokens of a prompt, ``[len(ROWS), vocab]``."""
    name = config_of(folder)["architectures"][0]
    made = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager")
    ids = torch.tensor(decoder_folders.IDS[None].astype(np.int64))
    with torch.no_grad():
        return made.float().eval()(ids).logits[0, decoder_folders.ROWS].numpy()


def encoder_states() -> dict[str, Any]:
    """Return the hidden states of encoders, and vectors over the vocabulary."""
    record: dict[str, Any] = {}
    for name, path in written(encoder_folders.RECORDED):
        kind = getattr(transformers, config_of(path)["architectures"][0])
        model = kind.from_pretrained(path, attn_implementation="eager").float().eval()
        routed: dict[str, Any] = (
            {"output_router_logits": True} if name in encoder_folders.PRIVACY_FILTERS else {}
        )
        for ids in encoder_folders.texts():
            with torch.inference_mode():
                output = model(input_ids=torch.from_numpy(ids)[None], **routed)
            record[f"{name}/{len(ids)}"] = encoder_folders.rows_of(output.last_hidden_state[0].numpy())
            if routed:
                best = torch.stack(output.router_logits).sort(descending=True).values
                used = model.config.num_experts_per_tok
                margins = (best[..., used - 1] - best[..., used]).amin(dim=0)
                record[f"{name}/{len(ids)}/margins"] = encoder_folders.rows_of(margins.numpy())
    folders = {name: partial(encoder_folders.masked, name=name) for name in encoder_folders.MASKED}
    for name, path in written(folders):
        masked = transformers.AutoModelForMaskedLM.from_pretrained(path).float().eval()
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        rows = []
        for text in encoder_folders.TEXTS:
            with torch.inference_mode():
                logits = masked(torch.tensor([tokenizer.encode(text).ids])).logits[0]
            rows.append(torch.log1p(logits.relu()).amax(dim=0).numpy())
        record[f"{name}, masked"] = np.stack(rows)
    return record


def states_of_files() -> dict[str, Any]:
    """Return the hidden states of the catalogue's encoders with float32 matrices, by lengths of texts."""
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for name, model in comparison.OF_TRANSFORMERS.items():
            made = load_encoder(small_models.write(Path(folder) / "model.gguf", model), "eager")
            has_types = any("token_type_embeddings" in name for name in made.state_dict())
            for tokens in comparison.encoder_tokens(model):
                inputs = {"input_ids": torch.from_numpy(tokens)[None]}
                if has_types:
                    inputs["token_type_ids"] = torch.from_numpy(comparison.segments_of(tokens))[None]
                record[f"{name}/{len(tokens)}"] = made(**inputs).last_hidden_state[0].numpy()
    return record


def body_of(folder: Path, kind: str, tensors: dict[str, torch.Tensor], **settings: Any) -> Any:
    """Return a transformers model without a head, made of the tensors of a folder."""
    fields = {name: value for name, value in config_of(folder).items() if name not in OWN}
    config = getattr(transformers, f"{kind}Config")(**fields)
    config.update(settings)
    model = getattr(transformers, f"{kind}Model")(config).float().eval()
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return model


def states_of(model: Any, folder: Path, texts: Sequence[str]) -> list[Any]:
    """Return the hidden states of the tokens of each text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.inference_mode():
        ids = (torch.tensor([tokenizer.encode(text).ids]) for text in texts)
        return [model(input_ids=row).last_hidden_state[0] for row in ids]


def adapted(folder: Path, kind: str) -> Any:
    """Return the vector of each text with each adapter: the normalized state of its last token."""
    base = body_of(folder, kind, load_file(folder / "model.safetensors"))
    first, *others = adapter_folders.TASKS
    model = peft.PeftModel.from_pretrained(base, folder / "adapters" / first, adapter_name=first).eval()
    for task in others:
        model.load_adapter(folder / "adapters" / task, adapter_name=task)
    texts = [adapter_folders.PROMPTS["document"] + text for text in adapter_folders.TEXTS]
    found = []
    for task in adapter_folders.TASKS:
        model.set_adapter(task)
        last = [states[-1] for states in states_of(model, folder, texts)]
        found.append(np.stack([(state / state.norm()).numpy() for state in last]))
    return np.stack(found)


def bidirectional(folder: Path, last: bool, normalized: bool) -> Any:
    """Return the vector of each text: the mean of the states, or the last one."""
    name = config_of(folder)["model_type"]
    kind = name.removesuffix("_bidirec").removeprefix("bidirectional_pplx_").title().replace("_", "")
    tensors = load_file(folder / "model.safetensors")
    projection = tensors.pop("linear.weight", None)
    tensors.pop("lm_head.weight", None)
    # Gemma3Text has a setting of its own: with is_causal, it would use a different window.
    model = body_of(folder, kind, tensors, **({} if kind == "Gemma3Text" else {"is_causal": False}))
    found = []
    for states in states_of(model, folder, bidirectional_folders.TEXTS):
        projected = states if projection is None else states @ projection.T
        vector = projected[-1] if last else projected.mean(dim=0)
        found.append((vector / vector.norm() if normalized else vector).numpy())
    return np.stack(found)


def records() -> Records:
    """Yield shapes of tensors, logits, states and vectors."""
    configs = decoder_folders.CONFIGS | encoder_folders.CONFIGS
    yield model_folders.TENSORS, {name: json.dumps(tensors_of(config)) for name, config in configs.items()}
    decoders = {name: logits_of(folder) for name, folder in written(decoder_folders.RECORDED)}
    yield decoder_folders.RECORD, decoders
    yield encoder_folders.RECORD, encoder_states()
    yield comparison.TRANSFORMERS_ENCODERS, states_of_files()
    with_adapters = {
        name: adapted(folder, ADAPTED[name]) for name, folder in written(adapter_folders.RECORDED)
    }
    yield adapter_folders.RECORD, with_adapters
    vectors = {
        name: bidirectional(folder, name.endswith("last"), not name.endswith("integers"))
        for name, folder in written(bidirectional_folders.RECORDED)
    }
    yield bidirectional_folders.RECORD, vectors
