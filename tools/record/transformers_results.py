"""Record results of Hugging Face transformers on the small test models.

The weights of each file go back into the layout they had before a converter wrote them to GGUF; for
likelihoods, transformers reads the file. Run it when a model of the catalogue changes.
"""

import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGUFReader
from lm_eval.api.instance import Instance
from record import Records
from support import choice_task, comparison, small_models
from support.small_models import SmallModel

from metal_prefill.synth import TIED, ScanShape

MODEL_TYPES = {  # where transformers has another name
    "gemma3": "gemma3_text",
    "gemma-embedding": "gemma3_text",
    "gemma4": "gemma4_text",
    "hunyuan-dense": "hunyuan_v1_dense",
    "granitemoe": "granitemoeshared",
    "granitehybrid": "granitemoehybrid",
    "qwen3moe": "qwen3_moe",
    "lfm2moe": "lfm2_moe",
    "falcon-h1": "falcon_h1",
    "qwen35": "qwen3_5_text",
    "gptneox": "gpt_neox",
    "phi2": "phi",
    "minicpm": "granite",  # transformers has no class of it
    "mistral3": "ministral3",
    "qwen3vl": "qwen3",
}

GEMMA = ("gemma2", "gemma3", "gemma-embedding")
ROTATES_NEIGHBOURS = ("llama", "smollm3", "granite", "granitemoe", "minicpm", "mistral3")
# Settings of the heads, the values of a head, the rows of a state, the groups of heads and the taps.
MAMBA_SETTINGS = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
SCAN_SETTINGS = {
    "mamba2": ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
    "granitehybrid": MAMBA_SETTINGS,
    "falcon-h1": MAMBA_SETTINGS,
    "qwen35": (
        *("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
        *("linear_num_key_heads", "linear_conv_kernel_dim"),
    ),
}
# Factors of falcon-h1 that a converter multiplies weights by.
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.5, 2.0],
    "key_multiplier": 0.25,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.5,
    "ssm_multipliers": [0.5, 2.0, 4.0, 0.25, 0.125],
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 4.0,
}
# Tensors of a layer in a file that are one parameter, by the end of its name, where `gguf.TensorNameMap` does
# not know it.
PARTS = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "router.weight": ("ffn_gate_inp.weight",),
    "dt_bias": ("ssm_dt.bias",),
    "expert_bias": ("exp_probs_b.bias",),
}


def tensor(path: Path, name: str) -> npt.NDArray[np.float32]:
    """Return a tensor of a file, in float32."""
    return np.array(next(t.data for t in GGUFReader(path).tensors if t.name == name))


def config_of(path: Path, model: SmallModel) -> transformers.PreTrainedConfig:
    """Convert the file's metadata to a transformers configuration."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_base}
    if model.rope_scaling in ("linear", "yarn"):
        rope |= {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "longrope":
        rope |= {
            "rope_type": "longrope",
            "long_factor": tensor(path, "rope_factors_long.weight").tolist(),
            "short_factor": tensor(path, "rope_factors_short.weight").tolist(),
        }
    if model.rope_scaling == "yarn":
        rope |= {"original_max_position_embeddings": model.original_context}
    settings: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.output_type == TIED,
        "rope_parameters": rope,
        "attn_implementation": "eager",
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    if model.architecture in ("gpt2", "gptneox", "starcoder2", "phi2", "stablelm", "cohere2"):
        epsilons = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
        settings |= dict.fromkeys(epsilons, model.norm_eps)
        settings["use_qkv_bias"] = model.qkv_bias
        settings["logit_scale"] = dict(model.scales).get("logit_scale", 1.0)
        settings["sliding_window"] = model.window
        settings["n_inner"] = model.ffn
        settings["use_parallel_residual"] = model.parallel and model.architecture == "gptneox"
        rope["partial_rotary_factor"] = (model.rope_dims or model.head_dim) / model.head_dim
    if model.rope_scaling == "longrope":
        settings["original_max_position_embeddings"] = model.original_context
    if model.architecture in ("llama", "granite", "granitemoe", "granitehybrid"):
        settings["attention_bias"] = model.qkv_bias
        settings["mlp_bias"] = model.all_biases
    if model.architecture in ("granite", "granitemoe", "granitehybrid", "minicpm"):
        scales = dict(model.scales)
        settings["embedding_multiplier"] = scales.get("embedding_scale", 1.0)
        settings["residual_multiplier"] = scales.get("residual_scale", 1.0)
        settings["logits_scaling"] = scales.get("logit_scale", 1.0)
        settings["attention_multiplier"] = scales.get("attention.scale", model.head_dim**-0.5)
    if model.architecture == "mistral3":
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    if model.architecture == "exaone4":
        kinds = [
            "sliding_attention" if model.window and i % 4 != 3 else "full_attention"
            for i in range(model.layers)
        ]
        settings["sliding_window"], settings["layer_types"] = model.window, kinds
    if model.architecture in ("lfm2", "lfm2moe"):
        settings["norm_eps"], settings["conv_L_cache"] = model.norm_eps, model.conv_taps
        settings["block_auto_adjust_ff_dim"] = False
        settings["layer_types"] = [
            "conv" if i in model.conv_layers else "full_attention" for i in range(model.layers)
        ]
    if model.architecture == "qwen35":
        pairs = (model.rope_dims or model.head_dim) // 2
        rope["partial_rotary_factor"] = 2 * pairs / model.head_dim
        # Of positions in an image; all positions of a text are the same.
        rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    if model.scan is not None:
        settings |= scan_settings(model, model.scan)
    if (experts := model.experts) is not None:
        settings |= {
            "num_experts": experts.count,
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.used,
            "moe_intermediate_size": experts.ffn,
            "shared_intermediate_size": experts.shared,
            "num_dense_layers": experts.dense_layers,
            "norm_topk_prob": model.architecture != "olmoe",
            "experts_implementation": "eager",
        }
    if model.architecture in GEMMA:
        settings["sliding_window"] = model.window
        settings["query_pre_attn_scalar"] = model.head_dim
    if model.architecture == "gemma2":
        settings |= {key: cap for key, cap in model.scales if key.endswith("softcapping")}
    elif model.architecture in GEMMA:  # layers with a window use a separate rope base, unscaled
        settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    if (layered := model.layered) is not None:
        windowed = layered.windowed(model.layers)
        settings |= {
            "head_dim": layered.window_head_dim,
            "num_key_value_heads": layered.window_kv_heads,
            "per_layer_config": {
                i: {"head_dim": model.head_dim, "num_key_value_heads": model.kv_heads}
                for i, w in enumerate(windowed)
                if not w
            },
            "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
            "sliding_window": model.window,
            "hidden_size_per_layer_input": layered.inputs,
            "vocab_size_per_layer_input": model.vocab,
            "num_kv_shared_layers": layered.shared,
            "use_double_wide_mlp": layered.shared_ffn == 2 * model.ffn,
            "final_logit_softcapping": dict(model.scales).get("final_logit_softcapping"),
        }
        rope |= {"rope_type": "proportional", "partial_rotary_factor": layered.rotated}
        local = {"rope_type": "default", "rope_theta": 10000.0}
        settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    kind = MODEL_TYPES.get(model.architecture, model.architecture)
    if model.architecture == "olmo2" and model.window:  # layers with a window are unscaled
        kind = "olmo3"
        default = {"rope_type": "default", "rope_theta": model.rope_base}
        settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": default}
        settings["sliding_window"] = model.window
    return transformers.AutoConfig.for_model(kind, **settings)


def scan_settings(model: SmallModel, scan: ScanShape) -> dict[str, Any]:
    """Return the settings of layers whose state has matrices."""
    sizes = (scan.heads, scan.inner // scan.heads, scan.state, scan.groups, scan.taps)
    settings: dict[str, Any] = dict(zip(SCAN_SETTINGS[model.architecture], sizes, strict=True))

    def layer_types(recurrent: str, other: str) -> list[str]:
        return [recurrent if i in (scan.layers or ()) else other for i in range(model.layers)]

    if model.architecture == "qwen35":
        return settings | {"layer_types": layer_types("linear_attention", "full_attention")}
    expansion = scan.inner // model.dim
    if model.architecture == "mamba2":
        return settings | {"expand": expansion, "layer_norm_epsilon": model.norm_eps}
    settings["mamba_expand"] = expansion
    if model.architecture == "falcon-h1":
        norm = {"mamba_rms_norm": scan.norm, "mamba_norm_before_gate": False}
        return settings | MULTIPLIERS | norm | {"mamba_d_ssm": scan.inner}
    return settings | {
        "layer_types": layer_types("mamba", "attention"),
        "num_local_experts": 0,  # or those of `config_of`
        "shared_intermediate_size": model.ffn,
        "position_embedding_type": "nope",
    }


def without_multipliers(model: SmallModel, name: str, data: torch.Tensor) -> torch.Tensor:
    """Divide a tensor of falcon-h1 by the factors that a converter multiplied it by."""
    m, scan = MULTIPLIERS, model.scan
    assert scan is not None
    part = name.removesuffix(".weight").rpartition(".")[2]
    inner, states = scan.inner, scan.groups * scan.state
    gate, down = m["mlp_multipliers"]
    rows = [inner, inner, states, states, scan.heads]
    factors: dict[str, Any] = {
        "embed_tokens": m["embedding_multiplier"],
        "lm_head": m["lm_head_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": m["attention_in_multiplier"],
        "k_proj": m["attention_in_multiplier"] * m["key_multiplier"],
        "v_proj": m["attention_in_multiplier"],
        "o_proj": m["attention_out_multiplier"],
        "out_proj": m["ssm_out_multiplier"],
        "in_proj": m["ssm_in_multiplier"]
        * torch.repeat_interleave(torch.tensor(m["ssm_multipliers"]), torch.tensor(rows))[:, None],
    }
    return data / factors.get(part, 1.0)


def with_value_heads_by_key(
    data: npt.NDArray[np.float32], part: str, scan: ScanShape
) -> npt.NDArray[np.float32]:
    """Put the value heads of a key head of qwen35 next to each other; in the file they are far apart."""
    heads, groups, width = scan.heads, scan.groups, scan.inner // scan.heads
    order = np.arange(heads).reshape(heads // groups, groups).T.ravel()
    columns = (order[:, None] * width + np.arange(width)).ravel()
    keys = 2 * groups * scan.state
    if part in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"):
        data = data[order]
    elif part == "attn_gate":
        data = data[columns]
    elif part == "ssm_out":
        data = np.ascontiguousarray(data[:, columns])
    elif part in ("attn_qkv", "ssm_conv1d"):
        data = np.concatenate([data[:keys], data[keys:][columns]])
    return data


def tensors_of(model: SmallModel, name: str, stored: Collection[str]) -> list[str]:
    """Return the names in a file of the tensors of a parameter; none for a bias that the file lacks."""
    shared = "_shexp" if model.experts else ""  # of Granite's expert for all tokens
    parts = PARTS | {
        "shared_mlp.input_linear.weight": (f"ffn_gate{shared}.weight", f"ffn_up{shared}.weight"),
        "shared_mlp.output_linear.weight": (f"ffn_down{shared}.weight",),
    }
    for end, listed in parts.items():
        if name.endswith(end):
            return [f"blk.{name.split('.')[2]}.{part}" for part in listed]
    if name == "lm_head.weight" and model.output_type == TIED:
        return ["token_embd.weight"]
    architecture = next(a for a, own in gguf.MODEL_ARCH_NAMES.items() if own == model.architecture)
    known = gguf.get_tensor_name_map(architecture, model.layers)
    role = known.get_name(name, try_suffixes=(".weight", ".bias"))
    return [found for found in (role, f"{role}.weight", role.removesuffix(".weight")) if found in stored][:1]


def in_layout_of_folder(
    model: SmallModel, name: str, data: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Undo what a converter changes in a tensor with a name in a file."""
    *layer, part, kind = name.split(".") if name.endswith((".weight", ".bias")) else (*name.split("."), "")
    if part in ("attn_q", "attn_k") and model.architecture in ROTATES_NEIGHBOURS:
        # The values of a rotated pair are neighbours in the file, and half a head away in transformers.
        pairs = data.reshape(-1, model.head_dim // 2, 2, *data.shape[1:])
        data = pairs.swapaxes(1, 2).reshape(data.shape)
    if model.architecture == "gpt2" and data.ndim == 2 and layer:
        data = np.ascontiguousarray(data.T)
    if model.architecture == "gptneox" and part == "attn_qkv":  # those of each head together
        heads = data.reshape(3, model.heads, -1, *data.shape[1:])
        data = np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(data.shape)
    if model.architecture in (*GEMMA, "qwen35") and "norm" in part and part != "ssm_norm":
        data = data - 1  # transformers adds it
    if model.architecture == "qwen35" and model.scan is not None:
        data = with_value_heads_by_key(data, part, model.scan)
    if part in ("conv", "ssm_conv1d") and data.ndim == 2:
        data = data[:, None]
    if part in ("ssm_a", "ssm_d") or (part, kind) in (("ssm_dt", "bias"), ("ssm_norm", "weight")):
        data = data.reshape(-1)
    return np.log(-data) if part == "ssm_a" else data


def weights_of(path: Path, model: SmallModel, wanted: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return parameters of transformers; every tensor of the model in the file must be part of one."""
    stored = {t.name: np.array(t.data, np.float32) for t in GGUFReader(path).tensors}
    left = {name for name in stored if not name.startswith(("rope_f", "dense_", "cls"))}
    found: dict[str, torch.Tensor] = {}
    for name in wanted:
        names = tensors_of(model, name, stored)
        if not names and name.endswith("o_proj.bias"):  # with the biases of q, k and v, transformers has one
            found[name] = torch.zeros(model.dim)
            continue
        left -= set(names)
        parts = [torch.from_numpy(in_layout_of_folder(model, part, stored[part])) for part in names]
        data = torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]
        found[name] = without_multipliers(model, name, data) if model.architecture == "falcon-h1" else data
    assert not left, f"{path}: transformers has no parameters for {left}"
    return found


def load(path: Path, model: SmallModel) -> transformers.PreTrainedModel:
    """Create the transformers model of a file; every weight on either side has a counterpart."""
    made = transformers.AutoModelForCausalLM.from_config(config_of(path, model)).float().eval()
    made.load_state_dict(weights_of(path, model, made.state_dict()), strict=True)
    if model.rope_scaling == "llama3":
        made.model.rotary_emb.inv_freq /= torch.from_numpy(tensor(path, "rope_freqs.weight"))
    return made


def vectors(path: Path, model: SmallModel) -> npt.NDArray[np.float32]:
    """Compute the pooled vector of each text, after dense layers where the model has them, or its classes."""
    config = config_of(path, model)
    if model.architecture == "gemma-embedding":
        # The class takes half of the window that it is given, and the token itself.
        config = transformers.AutoConfig.for_model(
            **{**config.to_dict(), "use_bidirectional_attention": True, "sliding_window": model.window}
        )
    made = transformers.AutoModel.from_config(config).float().eval()
    weights = weights_of(path, model, [f"model.{name}" for name in made.state_dict()])
    made.load_state_dict({name.removeprefix("model."): data for name, data in weights.items()}, strict=True)
    heads = {
        t.name: torch.from_numpy(np.array(t.data))
        for t in GGUFReader(path).tensors
        if t.name.startswith(("dense_", "cls."))
    }
    results = []
    with torch.inference_mode():
        for tokens in comparison.vector_tokens(model):
            states = made(torch.from_numpy(tokens)[None]).last_hidden_state[0]
            pooled = states.mean(dim=0) if model.pooling == "mean" else states[-1]
            for name in sorted(heads):
                pooled = heads[name] @ pooled
            results.append(pooled.numpy())
    return np.array(results)


def last_logits(path: Path, model: SmallModel, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Compute the logits after the last token of a prompt."""
    with torch.inference_mode():
        ids = torch.from_numpy(tokens)[None]
        logits: npt.NDArray[np.float32] = load(path, model)(ids).logits[0, -1].numpy()
    return logits


def likelihoods() -> dict[str, Any]:
    """Let lm-eval's backend ``hf`` answer the task with four choices, and predict whole texts."""
    with tempfile.TemporaryDirectory() as folder:
        path = choice_task.model(Path(folder))
        backend = choice_task.transformers_model(path)
        texts = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in choice_task.TEXTS]
        answers = choice_task.evaluate(backend, Path(folder))
        return {**answers, "rolling": backend.loglikelihood_rolling(texts)}


def records() -> Records:
    """Yield logits, vectors and likelihoods of every comparable model."""
    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        for name, model in comparison.models_in_float32():
            path = small_models.write(file, model)
            recorded[name] = last_logits(path, model, comparison.tokens_for(model))
            if name == comparison.LONG_ROPE:
                short = last_logits(path, model, comparison.short_tokens())
                recorded[comparison.LONG_ROPE_SHORT] = short
            print(f"{name}: {recorded[name].std():.3f}")
        yield comparison.TRANSFORMERS_LOGITS, recorded
        pooled = (small_models.EMBEDDERS | small_models.CLASSIFIERS).items()
        made = {name: vectors(small_models.write(file, model), model) for name, model in pooled}
        yield comparison.TRANSFORMERS_VECTORS, made
    yield choice_task.FILE, likelihoods()
