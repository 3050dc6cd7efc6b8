"""Files whose layers have states or experts: errors that name what is missing or contradictory."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.files.gguf_bytes import I32, Value, integer, number, numbers
from support.files.gguf_mutator import with_entries

from metal_prefill import GGUFError, Model, UnsupportedModelError

BAD, NOT = GGUFError, UnsupportedModelError
KV_HEADS = "attention.head_count_kv"
# Models, a key that is changed or left out, and the errors.
REFUSED: list[tuple[str, str, Value | None, type[Exception], str]] = [
    ("lfm2", "shortconv.l_cache", None, BAD, r"metadata lfm2\.shortconv\.l_cache is missing"),
    ("lfm2", "shortconv.l_cache", integer(0), BAD, r"l_cache is 0, must be between 2 and"),
    ("lfm2", "shortconv.l_cache", integer(1), BAD, r"l_cache is 1, must be between 2 and"),
    ("lfm2", "shortconv.l_cache", integer(4), BAD, r"conv\.weight has shape \(128, 3\), .*\(128, 4\)"),
    ("lfm2", "embedding_length", integer(2**30), BAD, "embedding_length 1073741824 is more than 715827882"),
    ("lfm2", KV_HEADS, numbers(I32, 0, 0, 0, 0), NOT, "none has attention"),
    ("lfm2", KV_HEADS, numbers(I32, 0, 2, 4, 0), NOT, "differs between"),
    ("lfm2", KV_HEADS, numbers(I32, 0, 2), BAD, "lists 2 values for 4 layers"),
    ("lfm2", KV_HEADS, numbers(I32, 0, 0, -2, 0), BAD, "is -2, must be between"),
    ("lfm2", KV_HEADS, numbers(I32, 0, 0, 3, 0), BAD, "4 is not a multiple of"),
    ("lfm2", KV_HEADS, numbers(I32, 2, 0, 2, 0), BAD, r"blk\.0\.attn_q\.weight is missing"),
    ("qwen35", "ssm.conv_kernel", None, BAD, r"metadata qwen35\.ssm\.conv_kernel is missing"),
    ("qwen35", "ssm.conv_kernel", integer(1), BAD, r"conv_kernel is 1, must be between 2 and"),
    ("qwen35", "ssm.inner_size", integer(0), BAD, "inner_size is 0, must be between 1 and"),
    ("qwen35", "ssm.time_step_rank", integer(0), BAD, "time_step_rank is 0, must be between 1"),
    ("qwen35", "ssm.time_step_rank", integer(3), BAD, "size 64 is not a multiple of .*time_step_rank 3"),
    ("qwen35", "ssm.group_count", integer(3), BAD, "time_step_rank 2 is not a multiple of .*group_count 3"),
    ("qwen35", "ssm.state_size", integer(2**31 - 1), BAD, "more than 2147483647 rows"),
    ("qwen35", "ssm.state_size", integer(16), BAD, r"attn_qkv\.weight has shape \(128, 96\), .*\(96, 96\)"),
    ("qwen35", "full_attention_interval", integer(5), NOT, "no layer has attention"),
    ("qwen35", "full_attention_interval", integer(2), BAD, r"blk\.1\.attn_q\.weight is missing"),
    ("qwen35", "attention.value_length", integer(32), NOT, "32 differs from .*key_length 64"),
    ("qwen35", "nextn_predict_layers", number(1.0), BAD, "has type float32, expected an integer"),
    ("qwen35", "nextn_predict_layers", integer(9), BAD, "is 9, must"),
    ("lfm2moe", "expert_count", None, BAD, r"metadata lfm2moe\.expert_count is missing"),
    ("lfm2moe", "expert_count", integer(0), BAD, "expert_count is 0, must be between 1"),
    ("lfm2moe", "expert_count", integer(7), BAD, r"gate_inp\.weight has shape \(6, 128\), .*\(7, 128\)"),
    ("lfm2moe", "expert_count", integer(2**31 - 1), BAD, "2147483647 experts of 128 rows have more than"),
    ("lfm2moe", "expert_used_count", None, BAD, "expert_used_count is missing"),
    ("lfm2moe", "expert_used_count", integer(7), BAD, "count is 7, must be at most .*expert_count 6"),
    ("lfm2moe", "expert_feed_forward_length", integer(32), BAD, r"\(6, 64, 128\), .*\(6, 32, 128\)"),
    ("lfm2moe", "expert_shared_feed_forward_length", integer(64), BAD, "gate_shexp.weight is missing"),
    ("lfm2moe", "leading_dense_block_count", integer(5), BAD, "count is 5, must be between 0 and 4"),
    ("lfm2moe", "leading_dense_block_count", integer(1), BAD, r"blk\.1\.ffn_gate_inp\.weight is missing"),
    ("lfm2moe", "expert_group_count", integer(2), NOT, "groups of experts are not supported"),
    ("lfm2moe", "expert_gating_func", integer(3), NOT, r"is 3; supported: 1 \(softmax\), 2 \(sigmoid\)"),
    ("lfm2moe", "expert_weights_scale", number(-1.0), BAD, "expert_weights_scale is -1.0, must be positive"),
]


@pytest.mark.parametrize(("name", "key", "value", "error", "message"), REFUSED)
def test_contradictory_layers_are_named(
    tmp_path: Path,
    model_path: Callable[[str], Path],
    name: str,
    key: str,
    value: Value | None,
    error: type[Exception],
    message: str,
) -> None:
    path = with_entries(tmp_path / "m.gguf", model_path(name), {f"{name}.{key}": value})
    with pytest.raises(error, match=message):
        Model(path, device="cpu")
