"""Record hidden states of Hugging Face transformers on the small encoders of the tests.

Writes ``tests/data/transformers_encoders.npz``, which the tests compare with without needing transformers.
Run it when an encoder of the catalogue changes::

    pip install . torch transformers
    python tools/record_encoders.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGUFReader

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support import comparison, small_models  # noqa: E402
from support.small_models import SmallModel  # noqa: E402

LLAMA = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDINGS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
NAMES: dict[str, dict[str, str]] = {
    "bert": EMBEDDINGS
    | {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    "nomic-bert": LLAMA
    | EMBEDDINGS
    | {"attn_output_norm": "post_attention_layernorm", "layer_output_norm": "post_mlp_layernorm"},
    "modern-bert": {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
        "output_norm": "final_norm",
    },
    "eurobert": LLAMA,
}
MODEL_TYPES = {"nomic-bert": "nomic_bert", "modern-bert": "modernbert"}


def config_of(model: SmallModel) -> transformers.PreTrainedConfig:
    """Convert the file's metadata to a transformers configuration."""
    rope = {"rope_type": "default", "rope_theta": model.rope_base}
    settings: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.context,
        "layer_norm_eps": model.norm_eps,
        "rms_norm_eps": model.norm_eps,
        "norm_eps": model.norm_eps,
        "attn_implementation": "eager",
        "pad_token_id": 0,
    }
    if model.architecture != "bert":
        settings["rope_parameters"] = rope
    if model.architecture == "modern-bert":
        windowed = {"rope_type": "default", "rope_theta": 10000.0}
        settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": windowed}
        settings["local_attention"] = model.window
    model_type = MODEL_TYPES.get(model.architecture, model.architecture)
    return transformers.AutoConfig.for_model(model_type, **settings)


def weights_of(path: Path, model: SmallModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert the tensors of a file to the names and layout of transformers."""
    names = NAMES[model.architecture]
    layers = "encoder.layer" if model.architecture == "bert" else "layers"
    for tensor in GGUFReader(path).tensors:
        stem, kind = tensor.name.rsplit(".", 1)
        *layer, part = stem.split(".")
        data = torch.from_numpy(np.array(tensor.data, dtype=np.float32))
        prefix = f"{layers}.{layer[1]}." if layer else ""
        if part == "attn_qkv" and part not in names:
            for name, rows in zip(("attn_q", "attn_k", "attn_v"), data.chunk(3), strict=True):
                yield f"{prefix}{names[name]}.{kind}", rows
        else:
            yield f"{prefix}{names[part]}.{kind}", data


def states_of(path: Path, model: SmallModel) -> dict[str, npt.NDArray[np.float32]]:
    """Compute the last hidden states of each text, by the number of its tokens."""
    made = transformers.AutoModel.from_config(config_of(model)).float().eval()
    missing, unexpected = made.load_state_dict(dict(weights_of(path, model)), strict=False)
    assert not unexpected, unexpected
    assert all(name.startswith("pooler.") for name in missing), missing
    results = {}
    with torch.inference_mode():
        for tokens in comparison.encoder_tokens(model):
            inputs = {"input_ids": torch.from_numpy(tokens)[None]}
            if "token_embd_norm" in NAMES[model.architecture] and model.architecture != "modern-bert":
                inputs["token_type_ids"] = torch.from_numpy(comparison.segments_of(tokens))[None]
            results[str(len(tokens))] = made(**inputs).last_hidden_state[0].numpy()
    return results


def main() -> None:
    """Record every encoder with matrices in float32."""
    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in comparison.encoders_in_float32():
            path = small_models.write(Path(folder) / "model.gguf", model)
            for length, states in states_of(path, model).items():
                recorded[f"{name}/{length}"] = states
            print(f"{name}: {states.std():.3f}")
    np.savez_compressed(comparison.TRANSFORMERS_ENCODERS, allow_pickle=False, **recorded)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
