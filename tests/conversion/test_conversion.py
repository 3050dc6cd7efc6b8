"""Model folders of the Hub: the written file, the required contents of a folder, and opening it."""

import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from support.folders import decoder_folders, encoder_folders, entity_folders, model_folders, task_folders
from support.folders.adapter_folders import QUERY, adapter
from support.folders.model_folders import CONTEXT, DIM, Folder, linear, read, types_of

from metal_prefill import GGUFError, Model
from metal_prefill.cli import main
from metal_prefill.conversion import TENSOR_TYPES, _writing, convert
from metal_prefill.conversion._folder import Fields
from metal_prefill.conversion._recurrent import lfm2
from metal_prefill.conversion._source import find_source
from metal_prefill.conversion._writing import SOURCES
from metal_prefill.hub import _local_file
from metal_prefill.hub._local_file import local_file


@pytest.fixture
def bert(tmp_path: Path) -> Folder:
    return model_folders.bert(tmp_path / "bert")


def test_unnamed_labels_and_unused_tensors_are_omitted(tmp_path: Path) -> None:
    shapes = {
        "classifier.weight": (2, DIM),
        "cls.predictions.bias": (7,),
        "bert.embeddings.position_ids": (1, CONTEXT),
        **linear("bert.pooler.dense"),
    }
    labels = {"0": "LABEL_0", "1": "LABEL_1"}
    folder = model_folders.bert(tmp_path / "m", "BertForTokenClassification", id2label=labels)
    fields, tensors = read(convert(folder.add(shapes, 1000).write(), tmp_path / "m.gguf"))
    assert "bert.classifier.output_labels" not in fields
    assert fields["general.name"] == "m"
    assert len(tensors) == len(folder.tensors) - 4


@pytest.mark.parametrize(("count", "written"), [(1, None), (2, ["LABEL_0", "LABEL_1"])])
def test_unnamed_labels_of_texts_count_the_outputs_for_llama_cpp(
    tmp_path: Path, count: int, written: list[str] | None
) -> None:
    """It expects one output unless the file has labels."""
    labels = {str(i): f"LABEL_{i}" for i in range(count)}
    folder = model_folders.bert(tmp_path / "m", "BertForSequenceClassification", id2label=labels)
    folder.add(linear("classifier", count) | linear("bert.pooler.dense"))
    fields, _ = read(convert(folder.write(), tmp_path / "m.gguf"))
    assert fields.get("bert.classifier.output_labels") == written


@pytest.mark.parametrize("kind", [kind for kind in TENSOR_TYPES if not kind.startswith("TQ")])
def test_matrices_have_the_requested_type(bert: Folder, tmp_path: Path, kind: str) -> None:
    path = convert(bert.write(), tmp_path / "m.gguf", tensor_type=kind)
    types = types_of(path)
    wanted = "F32" if kind == "auto" else kind
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == wanted
    others = ("position_embd.weight", "token_types.weight", "blk.0.attn_q.bias", "token_embd_norm.weight")
    assert {types[name] for name in others} == {"F32"}
    _, tensors = read(path)
    error = tensors["blk.0.ffn_up.weight"] - bert.tensors["encoder.layer.0.intermediate.dense.weight"]
    bound = {"F32": 0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 8e-3}.get(wanted, 0.3)
    assert np.sqrt(np.mean(error**2)) <= bound * 0.1


@pytest.mark.parametrize(
    ("make", "heads"),
    [
        (task_folders.CLASSIFIERS["bert"], {"cls.weight", "cls.output.weight"}),
        (task_folders.late_interaction, {"dense_2.weight"}),
        (encoder_folders.distilbert_masked, {"mlm.weight"}),
        (entity_folders.RECORDED["bert"], {"entities.span.0.weight", "entities.forward.input.weight"}),
        (task_folders.hybrid, {"colbert.weight"}),
        (decoder_folders.RECORDED["granite_moe"], {"blk.0.ffn_gate_inp.weight"}),
        (decoder_folders.RECORDED["lfm2"], {"blk.0.shortconv.conv.weight"}),
        (
            decoder_folders.RECORDED["qwen35"],
            {"blk.0.ssm_conv1d.weight", "blk.0.ssm_a", "blk.0.ssm_dt.bias"},
        ),
    ],
    ids=["classifier", "dense", "masked", "entities", "tokens", "router", "filter", "gated delta rule"],
)
def test_heads_routers_and_filters_stay_in_float32(
    tmp_path: Path, make: Callable[[Path], Folder], heads: set[str]
) -> None:
    path = convert(make(tmp_path / "m").write(), tmp_path / "m.gguf", tensor_type="F16")
    types = types_of(path)
    assert {types[name] for name in heads} == {"F32"}
    assert "F16" in types.values()


def test_matrices_of_several_types_keep_theirs(tmp_path: Path) -> None:
    folder = model_folders.llama(tmp_path / "m")
    large = "model.layers.0.mlp.up_proj.weight"
    folder.tensors = {
        name: tensor if name == large else tensor.astype(np.float16)
        for name, tensor in folder.tensors.items()
    }
    folder.tensors[large][0, 0] = 1e5  # beyond half precision
    path = convert(folder.write(), tmp_path / "m.gguf")
    kinds = types_of(path)
    assert (kinds["blk.0.ffn_up.weight"], kinds["blk.0.ffn_gate.weight"]) == ("F32", "F16")
    _, tensors = read(path)
    np.testing.assert_array_equal(tensors["blk.0.ffn_up.weight"], folder.tensors[large])


def test_rows_that_do_not_fit_blocks_are_stored_in_16_bits(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "m")
    path = convert(folder.write(), tmp_path / "m.gguf", tensor_type="TQ2_0")
    assert types_of(path)["blk.0.attn_q.weight"] == "F16"


@pytest.mark.parametrize("revealed_by", ["time", "samples"])
def test_a_changed_folder_is_converted_again(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, revealed_by: str
) -> None:
    if revealed_by == "time":
        for sampled, value in {"_HEADER_BYTES": 1, "_SAMPLES": 2, "_SAMPLE_BYTES": 1}.items():
            monkeypatch.setattr(_local_file, sampled, value)
    folder = model_folders.llama(tmp_path / "m")
    first = local_file(folder.write())
    weights = folder.path / "model.safetensors"
    time = weights.stat().st_mtime_ns
    name = "model.layers.1.input_layernorm.weight"  # neither the first nor the last of the file
    folder.tensors[name] = folder.tensors[name] + 1
    path = folder.write()
    if revealed_by == "samples":
        os.utime(weights, ns=(time, time))
    second = local_file(path)
    settings = path / "config.json"  # alone: the weights and their time stay as they are
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "rope_theta": 5000.0}))
    third = local_file(path)
    assert len({first, second, third}) == 3
    assert read(second)[1]["blk.1.attn_norm.weight"][0] == folder.tensors[name][0]
    assert read(third)[0]["llama.rope.freq_base"] == 5000.0


def test_a_folder_is_converted_once(tmp_path: Path, own_cache: Path) -> None:
    folder = model_folders.llama(tmp_path / "m").write()
    calls: list[tuple[int, int]] = []
    first = local_file(folder, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    written = first.stat().st_mtime_ns
    for path in folder.glob("*.json"):  # whose contents count
        os.utime(path, ns=(0, 10**9))
    calls.clear()
    assert local_file(folder, progress=lambda done, total: calls.append((done, total))) == first
    assert calls == []
    assert first.stat().st_mtime_ns == written
    copy = folder.rename(tmp_path / "other")  # its name is that of the model
    assert local_file(copy).name.startswith("other-")


@pytest.mark.parametrize("damage", [lambda whole: whole[:-1], lambda whole: whole[:100], lambda _: b"\0" * 9])
def test_a_damaged_conversion_is_written_again(
    tmp_path: Path, own_cache: Path, damage: Callable[[bytes], bytes]
) -> None:
    folder = model_folders.llama(tmp_path / "m").write()
    path = local_file(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert local_file(folder) == path
    assert path.read_bytes() == whole


_opened: set[str] = set()


@functools.cache
def _record_opened_files() -> None:
    sys.addaudithook(lambda event, args: _opened.add(str(args[0])) if event == "open" else None)


def _in_another_folder(path: Path) -> Folder:
    folder = model_folders.bert(path).pool(dense=16)
    folder.modules(
        {"": "Transformer", "1_Pooling": "Pooling", "modules/2_Dense": "Dense", "3_Dense": "Dense"}
    )
    (path / "modules").mkdir()
    (path / "2_Dense").rename(path / "modules" / "2_Dense")
    return folder


def _with_adapter(path: Path) -> Folder:
    adapter(path.parent / "adapter", {QUERY: (DIM, DIM)})
    return model_folders.bert(path).pool()


# Folders, and a file that their conversions read.
READ: dict[str, tuple[Callable[[Path], Folder], str]] = {
    "modules": (_in_another_folder, "modules/2_Dense/model.safetensors"),
    "entities": (entity_folders.RECORDED["modernbert and bert"], "labels_tokenizer/tokenizer.json"),
    "pickled entities": (partial(entity_folders.pickled, name="modernbert and bert"), "pytorch_model.bin"),
    "weights of tokens": (task_folders.hybrid, "sparse_linear.pt"),
    "queries of a router": (encoder_folders.routed, "query_0_SparseStaticEmbedding/model.safetensors"),
    "ColBERT": (task_folders.stanford, "artifact.metadata"),
    "adapter": (_with_adapter, "adapter/adapter_model.safetensors"),
}


@pytest.mark.parametrize("name", READ)
def test_the_key_of_a_conversion_covers_every_file_that_is_read(
    tmp_path: Path, own_cache: Path, name: str
) -> None:
    make, known = READ[name]
    folder = make(tmp_path / "models" / "m").write()
    added = folder.parent / "adapter" if name == "adapter" else None
    _record_opened_files()
    _opened.clear()
    convert(folder, tmp_path / "m.gguf", adapter=added)
    read_files = {name for name in _opened if name.startswith(str(folder.parent))}
    assert any(name.endswith(known) for name in read_files)
    _opened.clear()
    _local_file._key(folder, added, {})
    assert read_files <= _opened


def test_weights_that_change_while_they_are_converted_are_not_cached(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folders.llama(tmp_path / "m")
    path = folder.write()

    def change(*arguments: Any, **options: Any) -> None:
        convert(*arguments, **options)
        folder.tensors["model.norm.weight"] = folder.tensors["model.norm.weight"] + 1
        folder.write()

    monkeypatch.setattr(_writing, "convert", change)
    with pytest.raises(GGUFError, match="m: changed while it was converted"):
        local_file(path)
    assert list((own_cache / "converted").iterdir()) == []


def test_a_folder_that_is_truncated_while_it_is_converted_is_named(tmp_path: Path) -> None:
    path = model_folders.llama(tmp_path / "m").write()

    def truncate(done: int, total: int) -> None:
        os.truncate(path / "model.safetensors", 4000)

    with pytest.raises(GGUFError, match=r"model\.safetensors: was truncated; tensor .* ends at byte"):
        convert(path, tmp_path / "m.gguf", progress=truncate)


@pytest.mark.parametrize("name", ["x" * 250, os.fsdecode(b"\xff\xfe")], ids=["long", "not UTF-8"])
def test_a_folder_may_have_any_name(tmp_path: Path, own_cache: Path, name: str) -> None:
    path = model_folders.llama(tmp_path / "m").write().rename(tmp_path / name)
    with Model(path, device="cpu") as model:
        assert model.forward_prompt([1, 2]) >= 0


WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
EPSILON, SCALE, GROWTH = "attention.layer_norm_rms_epsilon", "attention.scale", "rope.scaling.attn_factor"
FAST, SLOW = "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"
SHAPE = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 64),
    **dict.fromkeys(("num_attention_heads", "num_hidden_layers"), 4),
    "max_position_embeddings": 8192,
}
_UPPER = {"num_hidden_layers": 3, "sliding_window": 64}
_USED = {**_UPPER, "use_sliding_window": True}
_GEMMA = {"num_hidden_layers": 7, "sliding_window": 512, "head_dim": 32, "num_key_value_heads": 1}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _yarn(**settings: float) -> dict[str, Any]:
    return {"rope_parameters": {**_YARN, **settings}}


# Classes, settings of folders, and the metadata that follow from them; None is absent. Defaults are those of
# transformers 5.24.
METADATA: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Mistral", {}, {WINDOW: 4096}),
    ("Mistral", {"sliding_window": None}, {WINDOW: None}),
    ("Mistral", {"sliding_window": 100}, {WINDOW: 100}),
    ("Mistral", {"sliding_window": 8192}, {WINDOW: None}),  # the context
    ("Qwen2", _UPPER, {WINDOW: None, PATTERN: None}),
    ("Qwen2", {**_UPPER, "use_sliding_window": False, "max_window_layers": 0}, {WINDOW: None, PATTERN: None}),
    ("Qwen2", _USED, {WINDOW: None, PATTERN: None}),  # 28 layers without one
    ("Qwen2", {**_USED, "max_window_layers": 2}, {WINDOW: 64, PATTERN: [False, False, True]}),
    ("Qwen2", {**_USED, "max_window_layers": 0, "sliding_window": None}, {WINDOW: None, PATTERN: None}),
    (
        "Qwen2",
        {**_USED, "layer_types": [_SLIDING, _FULL, _FULL]},
        {WINDOW: 64, PATTERN: [True, False, False]},
    ),
    ("Gemma3", _GEMMA, {PATTERN: None, SCALE: 1 / 16}),
    ("Gemma3", {**_GEMMA, "layer_types": [*[_SLIDING] * 5, _FULL, _SLIDING]}, {PATTERN: None}),
    ("Gemma3", {**_GEMMA, "sliding_window_pattern": 2}, {PATTERN: 2}),
    (
        "Gemma3",
        {**_GEMMA, "layer_types": [_FULL, _SLIDING, *[_FULL] * 5]},
        {PATTERN: [False, True, *[False] * 5]},
    ),
    # A head is as wide as the folder states, or as the hidden state divided by the heads.
    ("Phi3", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 8}),
    ("Phi3", {"partial_rotary_factor": 0.5, "head_dim": 32}, {"rope.dimension_count": 16}),
    ("FalconH1", {}, {EPSILON: 1e-5}),
    ("EuroBert", {}, {EPSILON: 1e-5}),
    ("Exaone4", {}, {WINDOW: 4096}),
    ("Granite", _yarn(), {GROWTH: None, FAST: None, SLOW: None}),
    ("Granite", _yarn(attention_factor=1.3), {GROWTH: 1.3 / 1.1386294}),
    ("Granite", _yarn(mscale=1.5, mscale_all_dim=0.7), {GROWTH: 1.2079442 / 1.0970406 / 1.1386294}),
    ("Granite", _yarn(mscale=1.0, mscale_all_dim=0.0), {GROWTH: None}),
    ("Granite", _yarn(beta_fast=20.0, beta_slow=2.0), {FAST: 20.0, SLOW: 2.0}),
]


@pytest.mark.parametrize(("name", "settings", "expected"), METADATA)
def test_metadata_follow_from_the_settings_of_a_folder(
    tmp_path: Path, name: str, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = SOURCES[name].metadata(Fields(tmp_path, {**SHAPE, **settings}))
    for key, value in expected.items():
        near = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert found.get(key) == near, key


def test_the_layers_of_lfm2_are_read_in_linear_time(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 4096, "num_key_value_heads": 1, "intermediate_size": 64}
    config = Fields(tmp_path / "config.json", {**shape, "full_attn_idxs": [*[0] * 300_000, 4095]})
    begin = time.process_time()
    heads = lfm2(config)["attention.head_count_kv"]
    assert time.process_time() - begin < 2  # 15 s, if each layer is searched for
    assert [i for i, count in enumerate(heads) if count] == [0, 4095]


def test_the_least_recently_used_conversions_are_evicted(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [model_folders.llama(tmp_path / name).write() for name in "abc"]
    size = local_file(folders[0]).stat().st_size
    monkeypatch.setattr(_local_file, "LIMIT", 2 * size)
    local_file(folders[1])
    local_file(folders[0])
    local_file(folders[2])
    assert sorted(path.name[0] for path in (own_cache / "converted").iterdir()) == ["a", "c"]


def test_a_vocabulary_in_lines_is_equivalent(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "m")
    first, _ = read(convert(folder.write(), tmp_path / "a.gguf"))
    second, _ = read(convert(folder.list_words().path, tmp_path / "b.gguf"))
    assert {k: v for k, v in first.items() if k.startswith("tokenizer.")} == {
        k: v for k, v in second.items() if k.startswith("tokenizer.")
    }


def test_the_command_writes_a_file(bert: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    assert main(["convert", str(bert.write()), str(path), "--type", "q8_0", "--name", "Bert"]) == 0
    fields, _ = read(path)
    assert (fields["general.name"], fields["general.file_type"]) == ("Bert", 7)
    assert f"{path.stat().st_size:,} bytes" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(path)]) == 1
    assert "none: no such folder" in capsys.readouterr().err


def test_a_full_disk_is_named(bert: Folder, tmp_path: Path) -> None:
    path, limits = tmp_path / "m.gguf", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(done: int, total: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))

    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            convert(bert.write(), path, progress=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("how", ["a file in its place", "read-only"])
def test_an_unwritable_cache_names_the_variable(
    bert: Folder, own_cache: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "read-only":
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    else:
        own_cache.touch()
    with pytest.raises(OSError, match=r"; set METAL_PREFILL_CACHE to a folder for converted models: "):
        local_file(bert.write())


def test_the_cache_command_lists_and_deletes_conversions(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = local_file(model_folders.llama(tmp_path / "shakespeare").write())
    assert main(["cache"]) == 0
    assert path.name in "".join(capsys.readouterr().out.split())
    assert main(["cache", "--clear"]) == 0
    assert not path.exists()


# Names in published folders that no made folder has, and the tensors of GGUF files that they become.
NAMES: dict[str, dict[str, str | None]] = {
    "NomicBertModel": {
        "encoder.layers.1.mlp.fc11.weight": "blk.1.ffn_up.weight",
        "encoder.layers.1.mlp.fc12.weight": "blk.1.ffn_gate.weight",
    },
    "ModernBertForMaskedLM": {"head.norm.weight": None, "decoder.bias": None},
    "JinaBertForMaskedLM": {
        "bert.encoder.layer.1.mlp.gated_layers.weight": "blk.1.ffn_up.weight",
        "bert.encoder.layer.1.mlp.wo.bias": "blk.1.ffn_down.bias",
        "bert.encoder.layer.1.mlp.layernorm.weight": "blk.1.layer_output_norm.weight",
        "cls.predictions.bias": None,
    },
    "Gemma3TextModel": {
        "layers.1.pre_feedforward_layernorm.weight": "blk.1.ffn_norm.weight",
        "layers.1.post_attention_layernorm.weight": "blk.1.post_attention_norm.weight",
        "layers.1.self_attn.q_norm.weight": "blk.1.attn_q_norm.weight",
    },
    "ElectraForPreTraining": {"discriminator_predictions.dense.weight": None},
    "BertModel": {"embeddings.LayerNorm.gamma": "token_embd_norm.weight", "pooler.dense.bias": None},
    "Qwen3ForSequenceClassification": {"score.weight": "cls.output.weight"},
}


@pytest.mark.parametrize("name", NAMES)
def test_published_names_are_mapped_to_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    source, task = find_source(SOURCES, Fields(tmp_path, {"architectures": [name]}))
    (architecture,) = (a for a, known in MODEL_ARCH_NAMES.items() if known == source.architecture)
    names = get_tensor_name_map(architecture, 2)
    assert {theirs: source.gguf_name(task, names, theirs) for theirs in NAMES[name]} == NAMES[name]
