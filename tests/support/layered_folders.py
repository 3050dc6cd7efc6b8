"""Small model folders whose layers have different heads and feed-forwards, with random weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.decoder_folders import with_text_part
from support.model_folders import DIM, FFN, HEADS, Folder, llama, values

HEAD, FULL_HEAD, INPUT = 12, 24, 20
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def gemma4(path: Path, **config: Any) -> Folder:
    """Make a folder of Gemma 4, whose last layers attend to keys and values of earlier ones."""
    settings = {
        "model_type": "gemma4_text",
        "num_hidden_layers": len(KINDS),
        "layer_types": KINDS,
        "sliding_window": 9,
        "head_dim": HEAD,
        "global_head_dim": FULL_HEAD,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": INPUT,
        "vocab_size_per_layer_input": 304,
        "final_logit_softcapping": 1.5,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        **config,
    }
    folder = llama(path, "Gemma4ForCausalLM", **settings)
    del folder.tensors["lm_head.weight"]
    layers, inputs = len(settings["layer_types"]), settings["hidden_size_per_layer_input"]
    own = layers - settings["num_kv_shared_layers"]
    shapes: dict[str, tuple[int, ...]] = {}
    if inputs:
        shapes = {
            "model.embed_tokens_per_layer.weight": (304, layers * inputs),
            "model.per_layer_model_projection.weight": (layers * inputs, DIM),
            "model.per_layer_projection_norm.weight": (inputs,),
        }
    for layer, kind in enumerate(settings["layer_types"]):
        head = settings["head_dim"] if kind == "sliding_attention" else settings["global_head_dim"]
        kv = HEADS // 2 * head
        width = FFN * (2 if layer >= own and settings["use_double_wide_mlp"] else 1)
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (HEADS * head, DIM),
            "self_attn.q_norm.weight": (head,),
            "self_attn.o_proj.weight": (DIM, HEADS * head),
            "mlp.gate_proj.weight": (width, DIM),
            "mlp.up_proj.weight": (width, DIM),
            "mlp.down_proj.weight": (DIM, width),
            "pre_feedforward_layernorm.weight": (DIM,),
            "post_feedforward_layernorm.weight": (DIM,),
            "layer_scalar": (1,),
            # Published folders have these in all layers.
            "self_attn.k_proj.weight": (kv, DIM),
            "self_attn.k_norm.weight": (head,),
            "self_attn.v_proj.weight": (kv, DIM),
        }
        if inputs:
            of_layer |= {
                "per_layer_input_gate.weight": (inputs, DIM),
                "per_layer_projection.weight": (DIM, inputs),
                "post_per_layer_input_norm.weight": (DIM,),
            }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    for i, (name, shape) in enumerate(shapes.items()):
        folder.tensors[name] = values(shape, 100 + i)
        if name.endswith(("norm.weight", "layernorm.weight", "layer_scalar")):
            folder.tensors[name] += 1
    return folder


def gemma4_with_images(path: Path, **config: Any) -> Folder:
    """Make a folder of Gemma 4 with parts for images and sounds, which are left out."""
    folder = with_text_part(gemma4(path, **config), model_type="gemma4", tie_word_embeddings=True)
    folder.config["architectures"] = ["Gemma4ForConditionalGeneration"]
    folder.tensors["model.vision_tower.std_bias"] = values((4,), 1)
    folder.tensors["model.embed_audio.embedding_projection.weight"] = values((DIM, 4), 2)
    return folder


RECORDED: dict[str, Callable[[Path], Folder]] = {
    "gemma4": gemma4,
    "gemma4, equal feed-forwards, no limit": partial(
        gemma4, use_double_wide_mlp=False, final_logit_softcapping=None, num_kv_shared_layers=1
    ),
    "gemma4, nothing shared, no inputs": partial(
        gemma4, num_kv_shared_layers=0, hidden_size_per_layer_input=0, global_head_dim=HEAD
    ),
}
