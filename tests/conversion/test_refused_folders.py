"""Folders that contradict themselves, are damaged, or need what is not supported: errors name the value."""

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.folders import decoder_folders, encoder_folders, entity_folders, model_folders, task_folders
from support.folders.adapter_folders import QUERY, adapter
from support.folders.decoder_folders import FULL_HEAD, HEAD, WIDTH, long_rope
from support.folders.entity_folders import BODY, LABELS_BODY
from support.folders.model_folders import DIM, FFN, IDENTITY, Folder, llama, values
from support.folders.task_folders import COLBERT, SPARSE
from support.folders.torch_files import ORDERED, pickled, write_torch_file

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill._support.messages import MOST_CHARACTERS
from metal_prefill.conversion import convert

BAD, NOT = GGUFError, UnsupportedModelError
Change = Callable[[Folder], Any]
Error = type[Exception] | tuple[type[Exception], ...]
# A maker of folders, a change, which may write the folder and return its path, and the error.
Case = tuple[Callable[[Path], Folder], Change, Error, str]
LARGEST = float(np.finfo(np.float32).max)
ABOVE = math.nextafter(LARGEST, math.inf)


def settings(**fields: Any) -> Change:
    return lambda folder: folder.config.update(fields)


def inner(part: str, **fields: Any) -> Change:
    """Change settings of a part of the configuration."""
    return lambda folder: folder.config[part].update(fields)


def lose(*names: str) -> Change:
    return lambda folder: [folder.tensors.pop(name) for name in names]


def put(name: str, *shape: int) -> Change:
    return lambda folder: folder.tensors.update({name: np.ones(shape, np.float32)})


def file(name: str, content: Any = None, **fields: Any) -> Change:
    """Write a file: bytes, or JSON."""
    if isinstance(content, bytes):
        return lambda folder: (folder.path / name).write_bytes(content)
    return lambda folder: folder.json(name, fields if content is None else content)


def merged(name: str, **fields: Any) -> Change:
    """Change fields of a file."""
    return lambda folder: folder.merge(name, **fields)


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes][-1]


def unwritten(change: Change) -> Change:
    """Leave a folder without configuration and weights."""
    return lambda folder: (change(folder), folder.path)[1]


def damaged(name: str, content: bytes | None = None) -> Change:
    """Replace the contents of a file that is written otherwise, or remove the file."""

    def change(folder: Folder) -> Path:
        path = folder.write()
        (path / name).unlink(missing_ok=True)
        if content is not None:
            (path / name).write_bytes(content)
        return path

    return change


def indexed(files: dict[str, Any]) -> Change:
    """Write an index of the weights in their place."""
    index = file("model.safetensors.index.json", weight_map=files)
    return both(index, damaged("model.safetensors"))


def tensor(name: str, shape: Sequence[int]) -> Change:
    """Write weights with one tensor of zeros."""
    size = 4 * int(np.prod(shape))
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    return damaged("model.safetensors", len(header).to_bytes(8, "little") + header + bytes(size))


def value(dtype: str, number: float) -> Change:
    """Give the tensor `LOST` a type, and a value."""

    def change(folder: Folder) -> None:
        folder.tensors[LOST] = np.zeros((DIM, FFN), dtype)
        folder.tensors[LOST][-1, -1] = number

    return change


def in_tokenizer(change: Callable[[Any], Any]) -> Change:
    """Change the model of a tokenizer."""

    def apply(folder: Folder) -> None:
        content = folder.loaded("tokenizer.json")
        change(content["model"])
        folder.json("tokenizer.json", content)

    return apply


def with_score(model: dict[str, Any], score: float) -> None:
    model["vocab"][5][1] = score


def in_two_files(folder: Folder) -> Path:
    path = folder.write(shards=2)
    save_file(folder.tensors, path / "model-00002-of-00002.safetensors")
    return path


def huge(folder: Folder, name: str) -> Path:
    """Write a file that takes no space."""
    path = folder.write()
    (path / name).touch()
    os.truncate(path / name, 1 << 40)
    return path


tokenizer = partial(merged, "tokenizer.json")
LOST = "model.layers.1.mlp.down_proj.weight"
LLAMA3 = {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4}
LLAMA: list[tuple[Change, Error, str]] = [
    (lose(LOST), BAD, "tensor blk.1.ffn_down.weight is missing"),
    (lose("model.embed_tokens.weight"), BAD, "tensor token_embd.weight is missing"),
    (lambda folder: folder.tensors.clear(), BAD, "block_count is 2, but the file has only 0 tensors"),
    (put(LOST, DIM, FFN + 1), BAD, r"ffn_down.weight has shape \(32, 65\), .* requires \(32, 64\)"),
    (put("extra.weight", 3, 3), NOT, "tensor extra.weight is not part of a llama model"),
    (put("model.layers.2.mlp.up_proj.weight", FFN, DIM), NOT, "model.layers.2.mlp.up_proj"),
    (put("model.norm.scale", DIM), NOT, "tensor model.norm.scale is not part"),
    (put(LOST, 2, 2, 2), BAD, r"has shape \(2, 2, 2\), expected 1 or 2 dimensions"),
    (put("norm.weight", DIM), BAD, "tensors .* are both output_norm.weight"),
    (settings(hidden_size="many"), BAD, "config.json: hidden_size is str, expected an integer"),
    (settings(hidden_size=0), BAD, "hidden_size is 0, must be between 1 and"),
    (settings(rms_norm_eps=-1), BAD, "rms_norm_eps is -1, must be positive"),
    (settings(num_attention_heads=None), BAD, "num_attention_heads is missing"),
    (settings(hidden_act="relu"), NOT, "hidden_act is 'relu'; supported: 'silu'"),
    (settings(architectures=["BloomForCausalLM"]), NOT, "class BloomForCausalLM is not"),
    (settings(architectures=["LlamaForQuestionAnswering"]), NOT, "ForQuestionAnswering"),
    (settings(architectures=[]), BAD, "architectures must name the class"),
    (settings(rope_scaling={"rope_type": "other"}), NOT, "rope_type is 'other'"),
    (settings(rope_scaling=[1]), BAD, "rope_scaling is list, expected an object"),
    (settings(vocab_size=7), BAD, "vocab_size is 7, but the tokenizer has"),
    (settings(vocab_size=10**9), BAD, "vocab_size is 1000000000, far more than"),
    (tokenizer(model={"type": "WordLevel"}), NOT, "model.type is 'WordLevel'"),
    (tokenizer(model={"type": "BPE", "vocab": {"a": "b"}}), BAD, "model.vocab has no id for 'a'"),
    (tokenizer(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["x"]}), BAD, r"merges\[0\] must"),
    (tokenizer(pre_tokenizer={"type": "Whitespace"}), NOT, "Whitespace is not"),
    (tokenizer(normalizer={"type": "Lowercase"}), NOT, "normalizer is Lowercase"),
    (tokenizer(added_tokens=[{"id": 5, "content": "x", "special": True}]), BAD, "is 'x', but token 5 is"),
    (tokenizer(added_tokens=[{"id": 10**9, "content": "x"}]), BAD, "have the ids 0 to 1000000000"),
    # Values that would end a conversion without a named error, or take very long.
    (settings(num_hidden_layers=4097), BAD, "num_hidden_layers is 4097, must be between 1 and 4096"),
    (settings(rms_norm_eps=1e300), BAD, r"rms_norm_eps is 1e\+300, .* positive and at most 3.40282e\+38"),
    (settings(rms_norm_eps=ABOVE), BAD, r"rms_norm_eps is 3\.40\d*e\+38, must be positive and at most"),
    (settings(rope_theta=10**400), BAD, "rope_theta is 1000"),
    (
        settings(head_dim=2**31 - 1, rope_scaling={**LLAMA3, "original_max_position_embeddings": 8}),
        BAD, "head_dim is 2147483647, must be between 1 and 65536",
    ),
    (settings(hidden_act="x" * 10**6), NOT, "hidden_act is 'xxx"),
    (settings(bos_token="\ud800"), BAD, "config.json: is not valid JSON: .*surrogates not allowed"),
    (file("tokenizer_config.json", b"[" * 10**6), BAD, "tokenizer_config.json: is not valid JSON"),
    (file("tokenizer_config.json", b"9" * 5000), BAD, "tokenizer_config.json: is not valid JSON"),
    (file("tokenizer_config.json", b'{"chat_template": "\xed\xa0\x80"}'), BAD, "not valid UTF-8 at byte 19"),
    (file("tokenizer_config.json", '{"a": ""}'.encode("utf-16")), BAD, "not valid UTF-8 at byte 0"),
    (file("tokenizer_config.json", chat_template=[{"name": 5, "template": ""}]), NOT, "list of named"),
    (file("chat_template.jinja", b"\xff"), BAD, "chat_template.jinja: is not valid UTF-8 at byte 0"),
    (file("modules.json", b"\xff"), BAD, "modules.json: is not valid UTF-8 at byte 0"),
    # Files that are missing, damaged, or of another model.
    (damaged("tokenizer.json"), BAD, "has neither tokenizer.json nor vocab.txt"),
    (damaged("model.safetensors"), BAD, "has neither model.safetensors nor model.safetensors.index.json"),
    (damaged("config.json"), BAD, "has no config.json"),
    (
        both(file("pytorch_model.bin", b""), damaged("model.safetensors")),
        NOT, r"weights in pytorch_model.bin, a format that can execute code and is never loaded; save",
    ),
    (
        both(lambda folder: folder.write(shards=2), lose(LOST)),
        BAD, r"ffn_down.weight is missing \(the weights are those of model.safetensors, as in transformers; "
        r"model.safetensors.index.json is ignored\)$",
    ),
    (indexed({"a": "../m.safetensors"}), BAD, "names '../m.safetensors', must name safetensors files"),
    (indexed({"a": "weights.bin"}), BAD, "weight_map names 'weights.bin'"),
    (indexed({"a": "model-1.safetensors"}), BAD, "weight_map names model-1.safetensors, which is missing"),
    (indexed({}), BAD, "weight_map names 0 files"),
    (indexed({"a": ["model.safetensors"]}), BAD, "weight_map must name a file for each tensor"),
    (indexed({"a": "x" * 250 + ".safetensors"}), BAD, "names 'xx.*', must name safetensors files in this"),
    (in_two_files, BAD, r"is also in model-00001-of-00002\.safetensors"),
    *(
        (damaged("model.safetensors", content), BAD, "is not a valid safetensors file")
        for content in (b"", b"\xff" * 8 + b"{}", b"\2\0\0\0\0\0\0\0{]")
    ),
    *((tensor(*of), BAD, "the limits are 500 and 8") for of in (("x" * 100_000, (2, 2)), ("x", (1,) * 1000))),
    *(
        (damaged(name, content), BAD, f"{name}: ")
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
        for content in (b"[1]", b"{", b"\xed\xa0\x80", b"[" * 100_000)
    ),
    *(
        (partial(huge, name=name), BAD, f"{name}: has more than 268435456 bytes")
        for name in ("config.json", "chat_template.jinja", "modules.json", "tokenizer.json")
    ),
    *(
        (value(*of), BAD, f"tensor {LOST} contains a value that is not finite")
        for of in (("f4", math.nan), ("f2", -math.inf), ("f8", 1e300))
    ),
    (file("generation_config.json", eos_token_id=[1, 9999]), BAD, "config.json: eos_token_id contains 9999"),
    (file("generation_config.json", eos_token_id=[1, 2, 3, 4]), NOT, "config.json: eos_token_id has 3 tok"),
    # Finding the merges of a token takes time quadratic in its length.
    (in_tokenizer(lambda m: m["vocab"].update({"x" * 2000: 300})), BAD, "300 has 2000 characters, more than"),
    *(
        (put(f"model.layers.0.{name}.bias", DIM), BAD, rf"{field} is not true, .*\.layers\.0\.{name}\.bias")
        for name, field in (("self_attn.q_proj", "attention_bias"), ("mlp.down_proj", "mlp_bias"))
    ),
    (
        both(settings(tie_word_embeddings=False), lose("lm_head.weight")),
        BAD, r"tie_word_embeddings is false, but the weights lack lm_head\.weight",
    ),
]  # fmt: skip


def long_rope_of(factor: Any) -> Change:
    return settings(rope_scaling={"type": "longrope", "long_factor": [factor] * 4, "short_factor": [1] * 4})


def rope_of_windows(**rope: Any) -> Change:
    full = {"rope_type": "default", "rope_theta": 5e5}
    return settings(rope_parameters={"full_attention": full, "sliding_attention": {**full, **rope}})


def rope_of_full_attention(**rope: Any) -> Change:
    return settings(rope_parameters={"full_attention": rope})


def of_layer(**fields: Any) -> Change:
    of_layers = {"1": {"head_dim": FULL_HEAD}, "4": {"head_dim": FULL_HEAD, **fields}}
    return settings(per_layer_config=of_layers)


def attends(*kinds: Any) -> Change:
    return settings(layer_types=list(kinds))


FOURTH = "must have 0 for every fourth layer"
LETTERS = settings(sliding_window=9, layer_types=None, sliding_window_pattern="LLLG")
GATE = "model.layers.0.mlp.experts.2.gate_proj.weight"
UNEQUAL = r"rope_parameters\.full_attention\.rope_type is 'yarn'; supported: 'proportional'"
DYNAMIC = {"type": "dynamic"}
TRUNCATED = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
DECODERS: list[tuple[str, Change, Error, str]] = [
    ("smollm3", settings(no_rope_layers=[1] * 5), NOT, FOURTH),
    ("smollm3", settings(no_rope_layer_interval=3), NOT, FOURTH),
    ("smollm3", settings(use_sliding_window=True), NOT, "use_sliding_window is True"),
    ("granite", settings(rope_scaling={"type": "longrope"}), NOT, "is 'longrope'"),
    ("granite", settings(rope_theta=1e39), BAD, r"is 1e\+39, must be positive"),
    ("mistral, YaRN", settings(rope_scaling={"rope_type": "yarn"}), BAD, "factor is missing"),
    ("mistral, YaRN", settings(rope_scaling=TRUNCATED), NOT, r"\.truncate is False; supported: True"),
    ("granite", settings(rope_parameters={"rope_type": "llama3"}), NOT, "'llama3'; supported: 'default', 'd"),
    ("qwen2, window", attends("conv", "conv"), NOT, "for each of the 2 layers"),
    ("qwen3, window", settings(use_sliding_window="no"), NOT, "use_sliding_window is 'no'"),
    ("olmo3", rope_of_windows(rope_type="linear"), NOT, "rope_type is 'linear'"),
    ("olmo3", rope_of_windows(rope_theta=1e4), NOT, "rope_theta is 10000.0; supported"),
    ("olmo3", settings(sliding_window=0), BAD, "sliding_window is 0, must be between 1"),
    ("phi3", settings(rope_scaling={"type": "linear", "factor": 2.0}), NOT, "is 'linear'"),
    ("phi3", settings(**long_rope(HEAD + 2)), BAD, r"rope_scaling.long_factor must have 4 numbers, has 5"),
    ("phi3", settings(**{**long_rope(HEAD), "original_max_position_embeddings": 1}), BAD, "is 1, must be"),
    *(
        ("phi3, LongRoPE", long_rope_of(n), BAD, "long_factor must have positive finite numbers")
        for n in (10**400, 1e300, ABOVE, math.nan, True, "1")
    ),
    ("phi3", settings(partial_rotary_factor=1e30), BAD, r"is 1e\+30, must be at most 1"),
    ("hunyuan", settings(rope_scaling={**DYNAMIC, "alpha": 1e38}), BAD, "alpha is 1e"),
    ("hunyuan", settings(rope_scaling=DYNAMIC), NOT, "is 'dynamic'"),
    ("exaone4", LETTERS, BAD, "sliding_window_pattern is str, expected an integer"),
    ("gpt2", settings(scale_attn_by_inverse_layer_idx=True), NOT, "layer_idx is True"),
    ("gpt2", settings(add_cross_attention=True), NOT, "add_cross_attention is True"),
    ("gpt2", settings(activation_function="relu"), NOT, "hidden_activation is relu"),
    ("gpt_neox", settings(rotary_pct=1.5), BAD, "rotary_pct is 1.5, must be at most 1"),
    ("gpt_neox", settings(attention_bias=False), NOT, "attention_bias is False"),
    ("gpt_neox", settings(hidden_act="x" * 5000), NOT, r"gptneox\.hidden_activation is xxx"),
    ("starcoder2", settings(use_bias=False), NOT, "use_bias is False"),
    ("phi", settings(qk_layernorm=True), NOT, "qk_layernorm is True"),
    ("stablelm", settings(qk_layernorm=True), NOT, "qk_layernorm is True"),
    ("stablelm", settings(use_parallel_residual=True), NOT, "parallel_residual is True"),
    ("stablelm", settings(use_qkv_bias=False), BAD, "use_qkv_bias is not true, but the weights have"),
    ("cohere2", settings(attention_bias=True), NOT, "attention_bias is True"),
    ("cohere2", attends(*["conv"] * 5), NOT, "for each of the 5 layers"),
    ("qwen3_moe", lose(GATE), BAD, "but none of expert 2"),
    ("qwen3_moe", put(GATE, WIDTH - 8, DIM), BAD, r"has shape \(16, 32\), but .* has \(24, 32\)"),
    ("qwen3_moe", settings(decoder_sparse_step=2), NOT, "decoder_sparse_step is 2"),
    ("qwen3_moe", settings(mlp_only_layers=[0]), NOT, r"mlp_only_layers is \[0\]"),
    ("olmoe", settings(clip_qkv=8.0), NOT, "clip_qkv is 8.0; supported: None"),
    ("olmoe", settings(num_experts_per_tok=65), BAD, "expert_used_count is 65, must be at most"),
    ("granite_moe", settings(num_local_experts=4), BAD, r"has shape \(5, 32\), .*\(4, 32\)"),
    ("lfm2_moe", settings(use_expert_bias=False), NOT, "use_expert_bias is False"),
    ("lfm2_moe", settings(num_dense_layers=3), BAD, "leading_dense_block_count is 3, must be between 0"),
    ("granite_hybrid, experts", settings(num_local_experts=-1), BAD, "num_local_experts is -1"),
    ("lfm2", settings(conv_bias=True), NOT, "conv_bias is True; supported: False"),
    ("lfm2", attends("conv", "other"), NOT, "must have full_attention or conv for each of the 2 layers"),
    ("lfm2", attends("conv"), NOT, "must have full_attention or conv for each of the 2 layers"),
    (
        "lfm2", settings(block_ffn_dim_multiplier=1e30, block_auto_adjust_ff_dim=True),
        BAD, r"lfm2.feed_forward_length would be \d+, which a GGUF file cannot",
    ),
    ("qwen35", settings(attn_output_gate=False), NOT, "attn_output_gate is False; supported: True"),
    ("qwen35", attends("linear_attention"), NOT, "full_attention or linear_attention for each of the 2 lay"),
    *(
        ("qwen35", inner("rope_parameters", mrope_section=sections), (BAD, NOT), "section")
        for sections in ([1, "a"], ["\x00"], [[1]], [2**40], [0.5, 1], [-1])
    ),
    ("qwen35", settings(linear_num_key_heads=3), BAD, "time_step_rank 4 is not a multiple .*group_count 3"),
    ("qwen35", settings(linear_value_head_dim=7), BAD, r"has shape \(32, 32\), .* requires \(28, 32\)"),
    ("granite_hybrid", attends("mamba", "other"), NOT, "attention or mamba for each of the 2 layers"),
    ("granite_hybrid", attends("mamba", "mamba"), NOT, "head_count_kv is 0 in every layer"),
    (
        "granite_hybrid", settings(rope_scaling={"type": "linear", "factor": 2.0}),
        NOT, "the rotation of a granitehybrid model is scaled",
    ),
    ("granite_hybrid", settings(mamba_n_groups=3), BAD, r"shape \(64,\), which 3 groups do not divide"),
    (
        "granite_hybrid", put("model.layers.1.shared_mlp.input_linear.weight", 2 * FFN + 1, DIM),
        BAD, "input_linear.weight has 129 rows, which 2 parts do not divide",
    ),
    ("mamba2", settings(time_step_limit=[0.01, 0.1]), NOT, r"time_step_limit is \[0.01, 0.1\]"),
    ("mamba2", settings(use_bias=True), NOT, "use_bias is True; supported: False"),
    ("mamba2", settings(head_dim=8), BAD, "and head_dim make 32 values, expand and hidden_size 64"),
    ("falcon_h1", settings(mamba_norm_before_gate=True), NOT, "norm_before_gate is True"),
    ("falcon_h1", settings(tie_word_embeddings=True), NOT, "2.0 differs from lm_head_multiplier 0.5"),
    ("falcon_h1", settings(mlp_multipliers=[1.0]), BAD, r"mlp_multipliers is \[1.0\], must be 2 numbers"),
    ("falcon_h1", settings(ssm_multipliers=["a"] * 5), BAD, "ssm_multipliers is .*, must be 5 numbers"),
    *(
        ("falcon_h1", settings(mlp_multipliers=[1.0, n]), BAD, "mlp_multipliers is .*, must be 2 numbers")
        for n in (10**400, 1e300, ABOVE, math.nan, True, "1")
    ),
    ("gemma4", settings(enable_moe_block=True), NOT, "enable_moe_block is True; supported: False"),
    ("gemma4", settings(attention_k_eq_v=True), NOT, "attention_k_eq_v is True"),
    ("gemma4", settings(use_bidirectional_attention="all"), NOT, "'all'; supported: None, 'vision'"),
    ("gemma4", settings(num_kv_shared_layers=5), BAD, "num_kv_shared_layers is 5, must be between 0 and 4"),
    ("gemma4", rope_of_full_attention(rope_type="yarn"), NOT, UNEQUAL),
    ("gemma4", rope_of_full_attention(partial_rotary_factor=1.5), BAD, "is 1.5, must be at most 1"),
    ("gemma4", of_layer(head_dim=16), NOT, "head_dim differs between layers"),
    ("gemma4", of_layer(num_key_value_heads=1), NOT, "num_key_value_heads is 1; supported: 2"),
    *(
        ("gemma4", settings(architectures=[f"Gemma3n{end}"]), NOT, r"is not supported; it needs .*\(AltUp\)")
        for end in ("ForCausalLM", "ForConditionalGeneration", "TextModel")
    ),
    ("qwen3, window", settings(is_causal=False), NOT, "causal is false, .* not supported with attention win"),
]  # fmt: skip
REL = "encoder.rel_embeddings.weight"
EXPERTS = "layers.1.mlp.experts."
ENCODERS: list[tuple[str, Change, Error, str]] = [
    ("albert", settings(num_hidden_groups=2), NOT, "num_hidden_groups is 2"),
    ("albert", settings(hidden_act="swish"), NOT, "hidden_act is 'swish'; supported: 'gelu'"),
    ("t5", settings(feed_forward_proj="gated-tanh"), NOT, "feed_forward_proj is 'gated-tanh'"),
    ("t5", settings(relative_attention_max_distance=64), NOT, "relative_attention_max_distance is 64"),
    ("deberta", settings(pos_att_type="c2p"), NOT, r"pos_att_type is \['c2p'\]; supported is c2p\|p2c"),
    ("deberta", settings(share_att_key=False), NOT, "share_att_key is False"),
    ("deberta", settings(position_buckets=1), BAD, "position_buckets is 1, must be"),
    ("deberta", settings(position_buckets=900), BAD, "position_buckets is 900, must be less than 658"),
    ("deberta", settings(position_buckets=20), BAD, r"has shape \(32, 32\), expected \(40, 32\)"),
    ("deberta", settings(position_biased_input=True), BAD, "lack embeddings.position_embeddings.weight"),
    ("deberta", lose(REL), BAD, "the weights lack encoder.rel_embeddings.weight"),
    ("deberta", lose("encoder.LayerNorm.bias"), BAD, "encoder.LayerNorm is missing"),
    ("deberta", lose("encoder.layer.1.attention.self.key_proj.weight"), BAD, "attn_k.weight is missing"),
    ("privacy filter", lose("layers.0.self_attn.sinks"), BAD, "blk.0.attn_sinks.weight is missing"),
    ("privacy filter", lose(f"{EXPERTS}down_proj"), BAD, "blk.1.ffn_down_exps.weight is missing"),
    ("privacy filter", lose(f"{EXPERTS}gate_up_proj_bias"), BAD, "blk.1.ffn_gate_exps.bias is missing"),
    ("privacy filter", put(f"{EXPERTS}gate_up_proj", 8, 64, 65), BAD, r"\(8, 64, 65\), expected 3 dim"),
    ("privacy filter", put(f"{EXPERTS}gate_up_proj", 64, 64), BAD, r"\(64, 64\), expected 3 dimensions"),
    ("privacy filter", put(f"{EXPERTS}down_proj_bias", 64), BAD, r"\(64,\), expected 2 dimensions"),
    ("privacy filter", settings(num_local_experts=9), BAD, r"ffn_gate_inp.weight has shape \(8, 64\)"),
    ("privacy filter", settings(sliding_window=0), BAD, "sliding_window is 0, must be between 1"),
    ("privacy filter", settings(rope_parameters={"rope_type": "llama3"}), NOT, "rope_type is 'llama3'"),
    ("privacy filter", inner("rope_parameters", rope_theta=1.0), BAD, "is 1.0, must be greater than 1 for Y"),
]  # fmt: skip


encoder, of_labels = partial(inner, "encoder_config"), partial(inner, "labels_encoder_config")
LABELLED = "modernbert and bert"
PROJECTION = "token_rep_layer.labels_projection"
ENTITIES: list[tuple[str, Change, Error, str]] = [
    ("bert", settings(labels_decoder="a/b"), NOT, "labels_decoder is 'a/b'"),
    ("bert", settings(relations_layer="biaffine"), NOT, "relations_layer is 'biaffine'"),
    ("bert", settings(span_mode="markerV1"), NOT, "'markerV1'; supported: 'markerV0', 'token_level'"),
    ("bert", settings(words_splitter_type="stanza"), NOT, "_type is 'stanza'; supported: 'whitespace'"),
    ("bert", settings(fuse_layers=True), NOT, "fuse_layers is True"),
    ("bert", settings(post_fusion_schema="l2l-l2t"), NOT, "post_fusion_schema is 'l2l-l2t'"),
    ("bert", settings(num_rnn_layers=2), NOT, "num_rnn_layers is 2"),
    ("bert", settings(num_rnn_layers=0), BAD, r"tensor rnn\.lstm\.\w+ is not part of"),
    ("bert", settings(class_token_index=7), BAD, "class_token_index is 7, but the token <<ENT>> is 1518"),
    ("bert", settings(encoder_config=None), BAD, "encoder_config is missing: name a folder with config.json"),
    ("bert", settings(max_width=0), BAD, "max_width is 0, must be between 1"),
    ("bert", encoder(model_type="llama"), NOT, "encoder_config.model_type is 'llama'; supported: 'albert'"),
    ("bert", encoder(hidden_act="swish"), NOT, "hidden_act is 'swish'"),
    ("bert", lose("rnn.lstm.bias_hh_l0"), BAD, "num_rnn_layers is 1, but the weights lack"),
    ("bert", lose("prompt_rep_layer.3.bias"), BAD, "tensor entities.label.1.bias is missing"),
    ("bert", lose(f"{BODY}embeddings.word_embeddings.weight"), BAD, "weights lack the embedding of tokens"),
    ("bert", put("prompt_rep_layer.3.bias", 7), BAD, r"label.1.bias has shape \(7,\) .*, expected \(32,\)"),
    ("bert", put("prompt_rep_layer.4.bias", 7), BAD, r"tensor prompt_rep_layer\.4\.bias is not part of"),
    ("bert", put("rnn.lstm.weight_ih_l1", 128, 32), BAD, r"rnn\.lstm\.weight_ih_l1 is not part of"),
    (
        LABELLED, settings(labels_encoder_config=None, labels_encoder="a/b"),
        BAD, "labels_encoder_config is missing: .* of a/b as encoders.'labels'",
    ),
    (LABELLED, settings(labels_encoder=None), BAD, r"_layer\.labels_encoder\.\S+ is not part of"),
    (LABELLED, settings(labels_decoder="a/b"), NOT, "labels_decoder is 'a/b'"),
    (LABELLED, of_labels(hidden_act="swish"), NOT, "hidden_act is 'swish'"),
    (LABELLED, lose(f"{PROJECTION}.weight"), BAD, r"dense_2\.bias requires dense_2\.weight"),
    (LABELLED, put(f"{PROJECTION}.weight", 8, 64), BAD, r"dense_2\.bias has shape \(32,\)"),
    (LABELLED, lose(f"{PROJECTION}.weight", f"{PROJECTION}.bias"), BAD, "64 values, and those of words 32"),
    (
        LABELLED, lose(f"{LABELS_BODY}embeddings.word_embeddings.weight"),
        BAD, "lack the embedding .*labels_encoder",
    ),
    (LABELLED, lose(f"{LABELS_BODY}encoder.layer.0.output.dense.bias"), BAD, r"ffn_down\.bias is missing"),
]  # fmt: skip


def modules(*kinds: str) -> Change:
    places = {"" if kind == "Transformer" else f"{i}_{kind}": kind for i, kind in enumerate(kinds)}
    return lambda folder: folder.modules(places)


def listed(*modules: tuple[str, str]) -> Change:
    """List modules by their kinds and places."""
    return file("modules.json", [{"type": f"{ST}.{kind}", "path": path} for kind, path in modules])


def pooled_at(path: str) -> Change:
    return listed(("Transformer", ""), ("Pooling", path))


def bert(path: Path) -> Folder:
    return model_folders.bert(path).pool(dense=16)


ST = "sentence_transformers.models"
OPTIONS, CLASS = "sentence_bert_config.json", "config_sentence_transformers.json"
TOKENS, MASK = "token_embeddings", "2_MultiVectorMask/config.json"
cased = partial(model_folders.bert, variant="cased")
late, ranker = task_folders.late_interaction, task_folders.RANKERS["bert"]
stanford = task_folders.stanford
LINEAR = {"activation_function": IDENTITY, "in_features": 5, "out_features": 16, "bias": False}
dense = partial(merged, "2_Dense/config.json")
gemma3 = partial(llama, architecture="Gemma3ForCausalLM", sliding_window=9)
plain = model_folders.bert
unigram = partial(plain, architecture="XLMRobertaModel", variant="unigram as written")
SCORES = r"model.vocab\[5\] must be a token and its score, a number"
splade, routed, pairs = encoder_folders.distilbert_masked, encoder_folders.routed, task_folders.generative
SPLADE, ROUTER, QUERIES = "1_SpladePooling/config.json", "router_config.json", "query_0_SparseStaticEmbedding"
classes, modern = (task_folders.CLASSIFIERS[name] for name in ("bert", "modernbert"))
POOLER = "bert.pooler.dense"
parts, BIAS = encoder_folders.private_parts, "transition_bias_"
hybrid, PICKLE = task_folders.hybrid, "sparse_linear.pt"
PICKLES = [
    (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", "GLOBAL os system; only plain tensors are read"),
    (b"\x80\x02cbuiltins\neval\n.", "contains GLOBAL builtins eval"),
    (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "contains STACK_GLOBAL"),
    (b"\x80\x02]q\x00.", "contains EMPTY_LIST"),
    (b"\x80\x02cposix\nsystem\n(t\x81.", "contains GLOBAL posix system"),
    (ORDERED + b"(X\x01\x00\x00\x00aK\x01u.", "'a' is not the name of a tensor"),
    (b"\x80\x02K\x01.", "contains a int"),
    (pickled({"weight": COLBERT["weight"].T, "bias": COLBERT["bias"]}), "is not contiguous"),
    (pickled({**SPARSE, "weight": values((1, DIM + 1))}), r"weight has shape \(1, 33\), more than data/0"),
]


def calibration(biases: Any) -> Change:
    return file("viterbi_calibration.json", operating_points={"default": {"biases": biases}})


def expanded(strategy: str) -> Change:
    return file(OPTIONS, query_expansion={"strategy": strategy, "length": 8, "token": "[EXPAND]"})


def route(**parts: dict[str, str]) -> Change:
    """Change parts of the configuration of a router."""

    def change(folder: Folder) -> None:
        stated = folder.loaded(ROUTER)
        folder.merge(ROUTER, **{name: stated[name] | part for name, part in parts.items()})

    return change


def pickle(content: bytes) -> Change:
    return lambda folder: write_torch_file(folder.path / PICKLE, SPARSE, content)


MODULES: list[Case] = [
    (gemma3, attends("conv", "conv"), NOT, "full_attention or sliding_attention for each of the 2"),
    (gemma3, attends("full_attention"), NOT, "full_attention or sliding_attention for each of the 2"),
    (gemma3, attends({}, []), NOT, "full_attention or sliding_attention for each of the 2"),
    (gemma3, rope_of_windows(rope_type="yarn"), NOT, r"sliding_attention\.rope_type is 'yarn'"),
    (gemma3, settings(rope_scaling={"type": "yarn", "factor": 8.0}), NOT, r"rope_scaling\.type is 'yarn'"),
    (bert, modules("Transformer", "Dense", "Pooling"), NOT, "modules are Transformer, Dense, Pooling"),
    (bert, modules("Transformer", "Pooling", "Pooling"), NOT, "modules are Transformer, Pooling"),
    (bert, dense(activation_function="torch.nn.Mish"), NOT, "is Mish; supported: Identity, Tanh"),
    (bert, dense(use_residual=True), NOT, "use_residual is True"),
    (bert, dense(module_output_name="other"), NOT, "module_output_name is 'other'"),
    (bert, dense(module_input_name=TOKENS), NOT, "module_input_name is 'token"),
    (bert, file("4_Normalize/config.json", module_input_name=TOKENS), NOT, "module_input_name is 'token_emb"),
    (bert, file(OPTIONS, transformer_task="fill-mask"), NOT, "transformer_task is 'fill-mask'"),
    (
        bert, file(OPTIONS, modality_config={"text": {"method": "forward", "method_output_name": "pooler"}}),
        NOT, "method_output_name is 'pooler'",
    ),
    (
        bert, file("sentence_roberta_config.json", config_args={"layer_norm_eps": 0.1}),
        NOT, "config_args.layer_norm_eps is not supported",
    ),
    (
        bert, file(OPTIONS, tokenizer_args={"do_lower_case": False}),
        NOT, "tokenizer_args.do_lower_case is not supported",
    ),
    (cased, file(OPTIONS, do_lower_case=True), NOT, "do_lower_case is True; supported: False"),
    (late, merged(MASK, skiplist_tasks=["query", "document"]), NOT, "skiplist_tasks is "),
    (late, merged(MASK, keep_only_token_ids=[5]), NOT, r"keep_only_token_ids is \[5\]"),
    (
        late, lambda f: f.json("modules.json", f.loaded("modules.json")[:3]),
        NOT, "modules have no Normalize",
    ),
    (late, merged(CLASS, similarity_fn_name="meanmaxsim"), NOT, "similarity_fn_name is 'meanmaxsim'"),
    (ranker, modules("Transformer", "Dense"), NOT, "Dense; supported with a classifier: Transformer"),
    (
        ranker,
        both(modules("Transformer"), file(CLASS, prompts={"query": "a"}, default_prompt_name="query")),
        NOT, "default_prompt_name is 'query'; a classifier has no prompts",
    ),
    (
        ranker, both(modules("Transformer"), file(CLASS, activation_fn="torch.nn.Tanh")),
        NOT, "the activation of the output is torch.nn.Tanh",
    ),
    (bert, file("modules.json", {}), BAD, "modules is dict, expected an array"),
    (bert, pooled_at("../x"), BAD, r"path is '../x', must be a folder in this one"),
    (bert, pooled_at("x\0"), BAD, r"path is 'x\\x00', must be a folder in this one"),
    *((bert, pooled_at(path), BAD, "must be a folder in") for path in ("x" * 256, "x/" * 3000, "..", "/")),
    (bert, listed(("CNN", "x")), NOT, r"\[0\].type .*CNN is not sup"),
    (bert, file("modules.json", [{"type": "custom.Pooling", "path": "x"}]), NOT, "custom.Pooling is not sup"),
    (
        bert, file("1_Pooling/config.json", pooling_mode_max_tokens=True, pooling_mode_cls_token=True),
        NOT, "sets pooling_mode_max_tokens, pooling_mode_cls",
    ),
    (bert, file("1_Pooling/config.json"), NOT, "sets no pooling_mode"),
    (bert, file("1_Pooling/config.json", include_prompt="no"), BAD, "include_prompt is str, expected tr"),
    (bert, file("2_Dense/config.json", LINEAR), BAD, r"\(16, 32\), expected \(16, 5\)"),
    *(
        (bert, file(OPTIONS, max_seq_length=value), BAD, r"sentence_bert_config\.json: max_seq_length is ")
        for value in ("20", 0, True)
    ),
    (bert, file(CLASS, prompts={"query": 3}), BAD, r"ers\.json: prompts\.query is int, expected a string"),
    (bert, file(CLASS, prompts=[]), BAD, "prompts is list, expected an object"),
    (bert, file(CLASS, query_prefix=1), BAD, "query_prefix is int, expected a string"),
    (bert, file(CLASS, skiplist_words=[1]), BAD, "skiplist_words must contain strings"),
    (
        bert, file(CLASS, prompts={"a": "b"}, default_prompt_name="q"),
        BAD, "default_prompt_name is 'q'; prompts are 'a'",
    ),
    (partial(stanford, similarity="l2"), settings(), NOT, "similarity is 'l2'; supported: 'cosine'"),
    (partial(stanford, dim=8), settings(), BAD, r"shape \(16, 32\), but dense_2_feat_out is 8"),
    (partial(stanford, dim="16"), settings(), BAD, "dim is str, expected an integer"),
    (partial(stanford, query_token_id="[Q]"), settings(), BAD, r"is '\[Q\]', which the vocabulary does not"),
    (stanford, settings(model_type="electra"), NOT, "model_type is 'electra'; supported: 'bert'"),
    (bert, unwritten(listed(("bow.BoW", ""))), NOT, "type is BoW; supported first are a Transformer and"),
    *(
        (bert, unwritten(listed(("StaticEmbedding", path))), BAD, r"has neither model\.safetensors nor")
        for path in ("", "0_StaticEmbedding")
    ),
    (bert, unwritten(file("modules.json", [])), BAD, r"has no config\.json"),
    *(
        (bert, change(file("adapter_config.json", base_model_name_or_path=base)), NOT, message)
        for change in (both, unwritten)
        for base, message in (
            ("owner/base", r"\(adapter_config.json\) of owner/base; to apply it, open that model and name"),
            (None, r"has an adapter \(adapter_config.json\); to apply it, open its base model and name"),
        )
    ),
    (bert, listed(("Transformer", "../other")), BAD, r"path is '../other', must be a folder in this one"),
    (bert, merged("2_Dense/config.json", bias=True), BAD, r"bias requires linear\.bias, linear\.weight"),
    *((bert, file(CLASS, truncate_dim=n), BAD, f"truncate_dim is {n}") for n in (0, DIM + 1)),
    (late, expanded("fixed"), BAD, r"are expanded, but the vocabulary has no token '\[EXPAND\]'"),
    (late, expanded("max"), NOT, r"query_expansion\.strategy is 'max'; supported: 'fixed', 'min'"),
    (parts, calibration({f"{BIAS}x": 0.0}), NOT, "transition_bias_x is not supported; known are"),
    (parts, calibration({f"{BIAS}end_to_start": "0"}), BAD, "end_to_start is '0', must be a finite number"),
    (parts, calibration({f"{BIAS}end_to_start": -1e39}), BAD, r"is -1e\+39, must be a finite number"),
    (parts, calibration([]), BAD, "biases is list, expected an object"),
    (classes, settings(problem_type="regression"), NOT, "'regression', and its 3"),
    (classes, put(f"{POOLER}.weight", DIM, DIM + 1), BAD, r"cls\.weight has rows of 33 values, its"),
    (classes, put(f"{POOLER}.bias", DIM + 1), BAD, r"cls\.bias has shape \(33,\) .*expected \(32,\) and F32"),
    (classes, lose(f"{POOLER}.weight"), BAD, r"cls\.bias requires cls\.weight"),
    (modern, put("head.norm.weight", DIM - 1), BAD, r"cls\.norm\.weight has shape \(31,\)"),
    (modern, both(lose("head.norm.weight"), put("head.norm.bias", DIM)), BAD, r"requires cls\.norm\.w"),
    (classes, put("classifier.weight", 3, DIM - 1), BAD, r"cls\.output\.weight has rows of 31 values"),
    (classes, lose("classifier.weight"), BAD, r"cls\.output\.bias requires cls\.output\.weight"),
    (classes, lose("classifier.weight", "classifier.bias"), BAD, r"cls\.\w+ requires cls\.output\.weight"),
    (
        classes, lose(*(f"{name}.{end}" for name in (POOLER, "classifier") for end in ("weight", "bias"))),
        BAD, "output_labels names 3 labels, but tensor cls.output.weight is missing",
    ),
    (classes, put("classifier.bias", 2), BAD, r"cls\.output\.bias has shape \(2,\)"),
    (classes, put("classifier.weight", 3, DIM, 2), BAD, r"has shape \(3, 32, 2\), expected 1 or 2"),
    (splade, file(SPLADE, pooling_strategy="mean"), NOT, "'mean'"),
    (splade, file(SPLADE, activation_function="softplus"), NOT, "'softplus'"),
    (
        routed, route(types={QUERIES: f"{ST}.Transformer"}),
        NOT, "queries have the modules Transformer, and documents Tra",
    ),
    (routed, route(parameters={"default_route": "query"}), NOT, "default_route is 'query'; supported: 'docu"),
    (routed, merged(ROUTER, structure={"image": [""]}), NOT, "routes are image; supported are query and "),
    (partial(pairs, true_token_id=299), settings(), NOT, "true_token_id is not the token 'yes'"),
    (partial(pairs, template="{{ messages[0].content }}"), settings(), NOT, "no place for messages of a"),
    (
        partial(pairs, template="{{ raise_exception('user only') }}"), settings(),
        NOT, "the chat template fails for a pair: .*user only",
    ),
    *((hybrid, pickle(content), (BAD, NOT), message) for content, message in PICKLES),
    *((hybrid, file(PICKLE, content), NOT, "is not a zip archive") for content in (b"\x80\x02.", b"")),
    *(
        (unigram, in_tokenizer(partial(with_score, score=n)), BAD, SCORES)
        for n in (10**400, 1e300, ABOVE, -ABOVE, math.nan)
    ),
    (
        plain,
        both(Folder.list_words, file("tokenizer_config.json", added_tokens_decoder={"9" * 5000: {}})),
        BAD, "added_tokens_decoder has the key '999",
    ),
]  # fmt: skip


# Folders, their changes, and the errors.
CASES: list[Case] = [(llama, *case) for case in LLAMA]
for makers, cases in (
    (decoder_folders.RECORDED, DECODERS),
    (encoder_folders.RECORDED, ENCODERS),
    (entity_folders.RECORDED, ENTITIES),
):
    CASES += [(makers[name], change, error, message) for name, change, error, message in cases]
CASES += MODULES


def check(path: Path, error: Error, message: str, **options: Any) -> None:
    file = path.parent / "m.gguf"
    with pytest.raises(error, match=message) as caught:
        convert(path, file, **options)
    assert len(str(caught.value)) <= 2 * MOST_CHARACTERS
    assert not file.exists()


@pytest.mark.parametrize(("make", "change", "error", "message"), CASES, ids=[case[3] for case in CASES])
def test_a_folder_that_does_not_open_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], Folder], change: Change, error: Error, message: str
) -> None:
    folder = make(tmp_path / "m")
    written = change(folder)
    check(written if isinstance(written, Path) else folder.write(), error, message)


def weights_of(**tensors: Any) -> Callable[[Path], Any]:
    return lambda path: save_file(tensors, path / "adapter_model.safetensors")


ADAPTERS: list[tuple[dict[str, Any], Callable[[Path], Any], type[Exception], str]] = [
    ({"peft_type": "IA3"}, lambda path: None, NOT, "peft_type is 'IA3'; supported: 'LORA'"),
    ({"bias": "all"}, lambda path: None, NOT, "bias is 'all'; supported: 'none'"),
    ({"use_dora": True}, lambda path: None, NOT, "use_dora is True"),
    ({"modules_to_save": ["score"]}, lambda path: None, NOT, "modules_to_save is "),
    ({}, lambda path: (path / "adapter_model.safetensors").unlink(), BAD, "has no adapter_model.saf"),
    (
        {}, lambda path: adapter(path, {"encoder.layer.9.query": (DIM, DIM)}),
        BAD, "changes encoder.layer.9.query, which the model does not have",
    ),
    ({}, lambda path: adapter(path, {QUERY: (DIM, DIM + 1)}), BAD, r"do not fit its shape \(32, 32\)"),
    (
        {}, weights_of(**{f"base_model.model.{QUERY}.lora_A.weight": values((4, DIM))}),
        BAD, "has one of two matrices",
    ),
    (
        {}, weights_of(prompt_embeddings=values((4, DIM))),
        NOT, "has the tensor prompt_embeddings, which is not a matrix of LoRA",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "change", "error", "message"), ADAPTERS)
def test_other_adapters_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], change: Callable[[Path], Any], error: Error, message: str
) -> None:
    added = adapter(tmp_path / "adapter", {QUERY: (DIM, DIM)}, **config)
    change(added)
    check(bert(tmp_path / "m").write(), error, message, adapter=added)


def test_arguments_that_are_not_valid_are_named(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="none: no such folder"):
        convert(tmp_path / "none", tmp_path / "m.gguf")
    (tmp_path / "file.gguf").touch()
    with pytest.raises(GGUFError, match=r"file\.gguf: is a file, not a model folder"):
        convert(tmp_path / "file.gguf", tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"tensor_type must be one of auto, F32, .* got 'Q9'"):
        convert(llama(tmp_path / "m").write(), tmp_path / "m.gguf", tensor_type="Q9")


def test_deeply_nested_values_are_named(tmp_path: Path) -> None:
    """At some depths JSON can be read, and its value is part of the message."""
    folder = llama(tmp_path / "m", hidden_act="X")
    content = (folder.write() / "config.json").read_text()
    for depth in range(700, 1000):
        (folder.path / "config.json").write_text(content.replace('"X"', "[" * depth + "]" * depth))
        with pytest.raises((GGUFError, UnsupportedModelError)) as caught:
            convert(folder.path, tmp_path / "m.gguf")
        assert str(folder.path) in str(caught.value)
        assert len(str(caught.value)) < 1100
