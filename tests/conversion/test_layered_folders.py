"""Folders of Gemma 4: what their files contain, and what is refused."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import layered_folders
from support.layered_folders import FULL_HEAD, HEAD, INPUT, KINDS, gemma4, gemma4_with_images
from support.model_folders import CONTEXT, FFN, check_refused, read
from support.recurrent_folders import IDS

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.conversion import convert


def test_the_file_has_the_keys_and_tensors_of_llama_cpp(tmp_path: Path) -> None:
    fields, tensors = read(convert(gemma4(tmp_path / "m").write(), tmp_path / "m.gguf"))
    windowed = [kind == "sliding_attention" for kind in KINDS]
    assert {key.removeprefix("gemma4."): fields[key] for key in fields if key.startswith("gemma4.")} == {
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": FULL_HEAD,
        "attention.key_length_swa": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "attention.shared_kv_layers": 2,
        "attention.sliding_window": 9,
        "attention.sliding_window_pattern": windowed,
        "attention.value_length": FULL_HEAD,
        "attention.value_length_swa": HEAD,
        "block_count": 5,
        "context_length": CONTEXT,
        "embedding_length": 32,
        "embedding_length_per_layer_input": INPUT,
        "feed_forward_length": [FFN] * 3 + [2 * FFN] * 2,
        "final_logit_softcapping": 1.5,
        "rope.dimension_count": FULL_HEAD,
        "rope.dimension_count_swa": HEAD,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    rotated = np.repeat(np.array([1, 1e30], np.float32), [FULL_HEAD // 8, FULL_HEAD // 2 - FULL_HEAD // 8])
    np.testing.assert_array_equal(tensors["rope_freqs.weight"], rotated)
    assert "blk.2.attn_k.weight" in tensors
    assert not [name for name in tensors if name.startswith(("blk.3.attn_k", "blk.4.attn_v"))]
    assert tensors["per_layer_token_embd.weight"].shape == (304, 5 * INPUT)
    assert tensors["blk.0.layer_output_scale.weight"].shape == (1,)


def logits(path: Path) -> Any:
    with Model(path, device="cpu") as model, model.session() as session:
        return session.forward_prompt_logits(IDS)


def test_keys_of_layers_that_share_others_are_ignored_in_a_file(tmp_path: Path) -> None:
    """Files of llama.cpp have them, since published folders do."""
    import gguf
    from support.gguf_reader import GGUFReader

    path = convert(gemma4(tmp_path / "m").write(), tmp_path / "m.gguf")
    expected = logits(path)
    reader = GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "more.gguf", "gemma4")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            writer.add_key_value(
                key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor("blk.4.attn_k.weight", np.ones((48, 32), np.float32))
    writer.add_tensor("blk.4.attn_k_norm.weight", np.ones(24, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(logits(tmp_path / "more.gguf"), expected)


def test_settings_of_each_layer_may_replace_those_of_kinds(tmp_path: Path) -> None:
    """Later versions of transformers write heads by layer."""
    plain = gemma4(tmp_path / "plain")
    later = gemma4(tmp_path / "later")
    del later.config["global_head_dim"]
    full = {str(i): {"head_dim": FULL_HEAD} for i, kind in enumerate(KINDS) if kind == "full_attention"}
    later.config["per_layer_config"] = full
    np.testing.assert_array_equal(logits(plain.write()), logits(later.write()))


def test_parts_for_images_and_sounds_are_left_out(tmp_path: Path) -> None:
    plain, whole = gemma4(tmp_path / "plain"), gemma4_with_images(tmp_path / "whole")
    np.testing.assert_array_equal(logits(plain.write()), logits(whole.write()))


def of_layer(**settings: Any) -> dict[str, Any]:
    return {"per_layer_config": {"1": {"head_dim": FULL_HEAD}, "4": {"head_dim": FULL_HEAD, **settings}}}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"enable_moe_block": True}, UnsupportedModelError, "enable_moe_block is True; supported: False"),
        ({"attention_k_eq_v": True}, UnsupportedModelError, "attention_k_eq_v is True"),
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "'all'; supported: None, 'vision'"),
        ({"num_kv_shared_layers": 5}, GGUFError, "num_kv_shared_layers is 5, must be between 0 and 4"),
        ({"num_kv_shared_layers": 4}, GGUFError, "layer 1 has no earlier layer of its kind"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            UnsupportedModelError,
            r"rope_parameters\.full_attention\.rope_type is 'yarn'; supported: 'proportional'",
        ),
        (
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 1.5}}},
            GGUFError,
            "partial_rotary_factor is 1.5, must be at most 1",
        ),
        (of_layer(head_dim=16), UnsupportedModelError, "head_dim differs between layers"),
        (of_layer(num_key_value_heads=1), UnsupportedModelError, "num_key_value_heads is 1; supported: 2"),
        (
            {"global_head_dim": 8},
            UnsupportedModelError,
            "attention.key_length_swa is 12; supported are up to 8",
        ),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    check_refused(layered_folders.gemma4(tmp_path / "m"), changes, error, message)


@pytest.mark.parametrize(
    "name", ["Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "Gemma3nTextModel"]
)
def test_gemma_3n_is_refused_with_the_steps_that_it_needs(tmp_path: Path, name: str) -> None:
    folder = layered_folders.gemma4(tmp_path / "m")
    folder.config["architectures"] = [name]
    with pytest.raises(UnsupportedModelError, match=rf"{name} is not supported; it needs .*\(AltUp\)"):
        convert(folder.write(), tmp_path / "m.gguf")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_the_table_of_inputs_of_layers_stays_in_the_mapped_file(tmp_path: Path) -> None:
    folder = gemma4(tmp_path / "m", hidden_size_per_layer_input=8192).write()
    path = convert(folder, tmp_path / "m.gguf")
    table = 304 * len(KINDS) * 8192 * 4
    with Model(path, device="cpu", chunk_tokens=1):
        pass  # loads what the package needs
    before = resident_bytes()
    with Model(path, device="cpu", chunk_tokens=1) as model:
        opened = resident_bytes() - before
        model.forward_prompt(IDS)
        used = resident_bytes() - before
    assert max(opened, used) < table / 2
