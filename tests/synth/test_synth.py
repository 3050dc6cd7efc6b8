"""Synthetic models: files have the requested contents, as read by gguf-py and the tokenizers library."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metal_prefill._core import has_matrix_state
from support.files.gguf_reader import GGUFReader
from support.folders.model_folders import read, types_of
from support.folders.tokenizer_folders import of_file
from support.small_models import TYPES
from tokenizers import pre_tokenizers

from metal_prefill import Model, cli, synth
from metal_prefill.files._architecture import ARCHITECTURES
from metal_prefill.synth import _tensors

# Rows of 256 fit the blocks of every type, and the matrices are large enough for statistics.
WIDE: dict[str, Any] = {"preset": "tiny", "dim": 256, "heads": 4, "head_dim": 64, "ffn": 512}


@pytest.mark.parametrize("kind", TYPES)
def test_matrices_have_the_requested_type_and_preserve_activation_variance(tmp_path: Path, kind: str) -> None:
    """Norms are in float32; weights have a mean of zero."""
    path = synth.synthesize(
        tmp_path / "m.gguf", **WIDE, tensor_type=kind, embedding_type=kind, output_type=kind
    )
    types = types_of(path)
    norms = {name for name in types if name.endswith("norm.weight")}
    assert {types[name] for name in norms} == {"F32"}
    assert {types[name] for name in types.keys() - norms} == {kind}
    assert "output.weight" in types
    _, tensors = read(path)
    additions = math.sqrt(2 * 2)  # two a layer, two layers
    expected = {
        "token_embd.weight": 3 / 16,
        "blk.1.attn_q.weight": 1.5 / 16,
        "blk.1.attn_v.weight": 1 / 16,
        "blk.1.attn_output.weight": 1.5 * (3 / 16) / 16 / additions,
        "blk.1.ffn_gate.weight": 1 / 16,
        "blk.1.ffn_down.weight": 1.5 * (3 / 16) / math.sqrt(512) / additions,
    }
    for name, std in expected.items():
        values = tensors[name].astype(np.float64)
        # The smallest matrix has 128 superblocks with a scale each: 10% is about five deviations.
        assert values.std() == pytest.approx(std, rel=0.1), name
        assert abs(values.mean()) < 0.1 * std, name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K"])
def test_columns_of_a_block_and_layers_vary(tmp_path: Path, kind: str) -> None:
    path = synth.synthesize(tmp_path / "m.gguf", **WIDE, tensor_type=kind)
    _, tensors = read(path)
    assert (tensors["blk.0.ffn_up.weight"].std(axis=0) > 0).all()
    assert (tensors["blk.0.ffn_up.weight"] != tensors["blk.1.ffn_up.weight"]).any()
    if kind == "Q8_0":
        data = next(t.data for t in GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
        integers = data.reshape(-1, 34)[:, 2:].view(np.int8)
        assert (integers.min(), integers.max()) == (-127, 127)  # never -128


def test_norms_are_around_one_and_the_last_has_both_signs(tmp_path: Path) -> None:
    _, tensors = read(synth.synthesize(tmp_path / "m.gguf", **WIDE))
    assert tensors["blk.0.attn_norm.weight"].min() >= 0.75
    assert tensors["blk.0.attn_norm.weight"].max() <= 1.25
    last = tensors["output_norm.weight"]
    assert (np.abs(last) >= 0.75).all()
    assert 0.3 < (last < 0).mean() < 0.7


def test_default_is_the_shape_of_smollm_135m_and_takes_under_five_seconds(tmp_path: Path) -> None:
    begin = time.process_time()
    path = synth.synthesize(tmp_path / "m.gguf")
    assert time.process_time() - begin < 5
    reader = GGUFReader(path)
    assert {key: reader.fields[key].contents() for key in reader.fields if key.startswith("llama.")} == {
        "llama.vocab_size": 49152,
        "llama.context_length": 2048,
        "llama.embedding_length": 576,
        "llama.block_count": 30,
        "llama.feed_forward_length": 1536,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 10000.0,
    }
    assert sum(t.n_elements for t in reader.tensors) == 134_515_008
    types = types_of(path)
    assert types["token_embd.weight"] == "Q8_0"
    assert types["blk.29.ffn_down.weight"] == "Q4_0"
    assert "output.weight" not in types
    assert len(types) == 2 + 9 * 30


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        *(("tinyllama-1.1b", 1_100_048_384), ("mamba2-130m", 128_989_632)),
        *(("falcon-h1-0.5b", 521_411_104), ("privacy-filter", 1_399_486_832)),
    ],
)
def test_preset_has_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    listed = _tensors.tensors(synth.PRESETS[preset], "F32", "F32")
    assert sum(tensor.count for tensor in listed) == parameters


def test_same_seed_gives_the_same_file_and_another_seed_other_weights(tmp_path: Path) -> None:
    first, second, other = (
        synth.synthesize(tmp_path / f"{i}.gguf", preset="tiny", seed=seed).read_bytes()
        for i, seed in enumerate([7, 7, 8])
    )
    assert first == second
    assert len(first) == len(other)
    assert first != other


def test_overrides_change_single_tensors_and_the_last_match_wins(tmp_path: Path) -> None:
    overrides = {"blk.*.ffn_down.weight": "Q6_K", "blk.1.*": "Q5_1", "blk.1.attn_v.weight": "F16"}
    types = types_of(synth.synthesize(tmp_path / "m.gguf", **WIDE, overrides=overrides))
    assert types["blk.0.ffn_down.weight"] == "Q6_K"
    assert types["blk.0.attn_v.weight"] == "Q4_0"
    assert types["blk.1.ffn_down.weight"] == "Q5_1"
    assert types["blk.1.attn_v.weight"] == "F16"
    assert types["blk.1.attn_norm.weight"] == "F32"


def test_head_dim_follows_dim_unless_given(tmp_path: Path) -> None:
    followed, _ = read(synth.synthesize(tmp_path / "a.gguf", preset="tiny", dim=96, heads=6, kv_heads=2))
    assert followed["llama.rope.dimension_count"] == 16
    assert "llama.attention.key_length" not in followed
    given, tensors = read(synth.synthesize(tmp_path / "b.gguf", preset="tiny", dim=96, heads=6, head_dim=32))
    assert given["llama.attention.key_length"] == given["llama.attention.value_length"] == 32
    assert tensors["blk.0.attn_q.weight"].shape == (192, 96)
    assert tensors["blk.0.attn_output.weight"].shape == (96, 192)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_in_the_metadata(tmp_path: Path, kind: str) -> None:
    path = synth.synthesize(
        tmp_path / "m.gguf", preset="tiny", rope_scaling=kind, rope_factor=4.0, rope_dims=8
    )
    fields, _ = read(path)
    assert fields["llama.rope.scaling.type"] == kind
    assert fields["llama.rope.scaling.factor"] == 4.0
    assert fields["llama.rope.dimension_count"] == 8
    if kind == "yarn":
        assert fields["llama.rope.scaling.original_context_length"] == 256 // 4


def test_long_rope_has_two_tensors_and_the_published_factor_of_magnitude(tmp_path: Path) -> None:
    path = synth.synthesize(
        tmp_path / "m.gguf", preset="tiny", architecture="phi3", rope_scaling="longrope", rope_factor=4.0
    )
    fields, tensors = read(path)
    assert fields["phi3.rope.scaling.original_context_length"] == 256 // 4
    magnitude = math.sqrt(1 + math.log(4) / math.log(64))
    assert fields["phi3.rope.scaling.attn_factor"] == pytest.approx(magnitude)
    long, short = (tensors[f"rope_factors_{name}.weight"] for name in ("long", "short"))
    assert (long[0], long[-1], short[0]) == (1.0, 4.0, 1.0)
    assert 1.0 < short[-1] < 2.0
    with Model(path, device="cpu") as model:
        assert 0 <= model.forward_prompt(np.arange(3)) < model.config.vocab_size


def test_llama3_rope_factors_stretch_only_long_waves(tmp_path: Path) -> None:
    path = synth.synthesize(
        tmp_path / "m.gguf",
        preset="tiny",
        context=8192,
        rope_base=500000.0,
        rope_scaling="llama3",
        rope_factor=8.0,
    )
    factors = read(path)[1]["rope_freqs.weight"]
    turns = (
        8192 / 8 / (2 * np.pi * 500000.0 ** (np.arange(16) / 16))
    )  # of each pair within the original context
    kept = np.clip((turns - 1) / 3, 0, 1)
    np.testing.assert_allclose(factors, 1 / (kept + (1 - kept) / 8), rtol=1e-6)
    assert {1, 8} < set(factors.tolist())


@pytest.mark.parametrize("vocab", [260, 515, 32003])
def test_byte_level_tokenizer_is_consistent_at_any_size(tmp_path: Path, vocab: int) -> None:
    fields, _ = read(synth.synthesize(tmp_path / "m.gguf", preset="tiny", vocab=vocab))
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == vocab
    known = set(pre_tokenizers.ByteLevel.alphabet())
    for merge in fields["tokenizer.ggml.merges"]:
        left, right = merge.split(" ")
        assert {left, right} <= known
        known.add(left + right)
    assert known == set(tokens[3:])
    types = fields["tokenizer.ggml.token_type"]
    assert types == [3] * 3 + [1] * (len(tokens) - 3)


def test_the_byte_level_tokenizer_round_trips_and_joins_letters(tmp_path: Path) -> None:
    tokenizer = of_file(synth.synthesize(tmp_path / "m.gguf", preset="tiny", vocab=5000))
    for text in (" the rain in the tent", "A fox, 1599.\n", "".join(map(chr, range(256))), "漢字 🎭"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(" the rain in the tent").ids) < 10


def test_sentencepiece_vocabulary_is_consistent(tmp_path: Path) -> None:
    fields, _ = read(synth.synthesize(tmp_path / "m.gguf", preset="tiny", vocab=2000, tokenizer="llama"))
    tokens, scores, types = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    assert fields["tokenizer.ggml.model"] == "llama"
    assert len(tokens) == len(set(tokens)) == len(scores) == len(types) == 2000
    assert tokens[:3] == ["<unk>", "<s>", "</s>"]
    assert types == [2, 3, 3] + [6] * 256 + [1] * 1741
    assert tokens[3:259] == [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = tokens[259:]
    assert len(set(scores[259:])) == len(pieces)
    for piece in pieces:
        assert len(piece) == 1 or any(
            piece[:i] in pieces and piece[i:] in pieces for i in range(1, len(piece))
        )
    letters = [score for piece, score in zip(pieces, scores[259:], strict=True) if len(piece) == 1]
    assert len(letters) == 27
    assert max(letters) < min(scores[259 + 27 :])


def experts(count: int, used: int, ffn: int, shared: int = 0) -> dict[str, Any]:
    return {"architecture": "qwen3moe", "experts": synth.ExpertShape(count, used, ffn, shared=shared)}


def layered(*numbers: int) -> dict[str, Any]:
    period, width, kv_heads, shared, shared_ffn = (*numbers, *(0, 0))[:5]
    shape = synth.LayerShape(period, width, kv_heads, shared=shared, shared_ffn=shared_ffn)
    return {"architecture": "gemma4", "window": 8, "layered": shape}


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"preset": "gpt-5"}, "unknown preset 'gpt-5'"),
    ({"layers": 0}, "layers=0: must be at least 1"),
    *(({name: 0}, f"{name}=0: must be at least 1") for name in ("value_dim", "window", "original_context")),
    ({"kv_heads": 3}, "head_count 4 is not a multiple of llama.attention.head_count_kv 3"),
    ({"dim": 65}, "dim=65: not a multiple of heads=4"),
    ({"dim": 80, "head_dim": 16}, "token_embd.weight: rows of 80 weights, must be .* Q8_0 block size 32"),
    ({"tensor_type": "Q4_K"}, "attn_q.weight: rows of 64 weights, must be .* Q4_K block size 256"),
    ({"embedding_type": "IQ1_S"}, "token_embd.weight: unknown tensor type 'IQ1_S'"),
    ({"output_type": "F64"}, "output.weight: unknown tensor type 'F64'"),
    ({"overrides": {"*": "q8"}}, "token_embd.weight: unknown tensor type 'q8'"),
    ({"vocab": 259}, "vocab 259: a byte-level vocabulary needs at least 260"),
    ({"vocab": 285, "tokenizer": "llama"}, "vocab 285: a SentencePiece vocabulary needs at least 286"),
    ({"tokenizer": "t5"}, "tokenizer='t5'"),
    ({"rope_dims": 7}, "rope.dimension_count is 7"),
    ({"rope_scaling": "dynamic"}, "rope_scaling='dynamic'"),
    ({"rope_scaling": "longrope"}, "rope scaling of type longrope is not supported"),
    ({"rope_base": math.inf}, "rope_base=inf"),
    ({"rope_factor": 0.0}, "rope_factor=0.0"),
    ({"seed": -1}, "seed=-1"),
    ({"architecture": "qwen35"}, "scan: architecture qwen35 has such layers; .* or set scan"),
    ({"preset": "falcon-h1-0.5b", "architecture": "llama"}, "choose a preset of llama$"),
    ({"preset": "granite-4.0-h-tiny", "layers": 4}, "granitehybrid.attention.head_count_kv is 0"),
    ({"architecture": "qwen3moe"}, "experts: architecture qwen3moe has such layers"),
    (experts(0, 0, 64), "count=0: must be at least 1"),
    (experts(4, 2, 64, shared=-1), "shared=-1: must be at least 0"),
    ({"experts": synth.ExpertShape(4, 2, 64)}, "experts: architecture llama has no such layers"),
    ({"architecture": "gemma4", "window": 8}, "layered: architecture gemma4 has such layers; .*set layered"),
    (layered(0, 32, 1), "window_period=0: must be at least 1"),
    (layered(2, 31, 1), "rows of 124 weights"),
    (layered(2, 32, 1, 1), "shared_ffn=0: must be at least 1"),
    ({"layered": synth.LayerShape(2, 32, 1)}, "layered: architecture llama has no such layers"),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS)
def test_contradictions_are_named_and_nothing_is_written(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        synth.synthesize(tmp_path / "m.gguf", **{"preset": "tiny", **options})
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        synth.synthesize(tmp_path / "missing" / "m.gguf", preset="tiny")


def test_progress_rises_to_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = synth.synthesize(tmp_path / "m.gguf", preset="tiny", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert {call[1] for call in calls} == {done[-1]}
    assert done[-1] == sum(t.n_bytes for t in GGUFReader(path).tensors)


def test_the_command_and_the_function_write_the_same_file(tmp_path: Path) -> None:
    line = "--preset tiny --layers 3 --kv-heads 1 --vocab 400 --type q5_0 --embedding-type f16 --seed 5"
    assert cli.main(["synth", str(tmp_path / "a.gguf"), *line.split()]) == 0
    options: dict[str, Any] = {"layers": 3, "kv_heads": 1, "vocab": 400, "tensor_type": "Q5_0", "seed": 5}
    by_call = synth.synthesize(tmp_path / "b.gguf", preset="tiny", embedding_type="F16", **options)
    assert (tmp_path / "a.gguf").read_bytes() == by_call.read_bytes()


@pytest.mark.parametrize(
    "architecture", [name for name, row in ARCHITECTURES.items() if row.layers == "required"]
)
def test_a_model_of_each_architecture_runs(architecture: str, tmp_path: Path) -> None:
    traits = ARCHITECTURES[architecture]
    scans = any(kind and has_matrix_state(kind) for kind in (traits.mixer, traits.recurrent))
    relative = traits.relative_positions == "required"
    path = synth.synthesize(
        tmp_path / "m.gguf",
        preset="tiny",
        architecture=architecture,
        value_dim=64,
        layered=synth.LayerShape(2, 32, 1, inputs=32) if traits.layers_differ else None,
        scan=synth.ScanShape(128, 16, 4, layers=(0,)) if scans else None,
        experts=synth.ExpertShape(4, 2, 64) if traits.experts != "absent" else None,
        kv_heads=4 if relative else 2,
        relative_rows=40 if relative else 0,
        head_dim=64 if traits.query_gate or traits.layers_differ else 32,
        window=8 if traits.window == "required" else None,
    )
    with Model(path, device="cpu") as model:
        assert model.config.architecture == architecture
        assert model.config.value_dim == 64
        output: Any = "logits" if model.config.has_head else "hidden"
        [values] = model.forward_batch([model.session()], [range(12)], output=output)
        assert np.isfinite(values).all()


def test_a_model_that_ranks_has_a_head(tmp_path: Path) -> None:
    path = synth.synthesize(tmp_path / "m.gguf", preset="tiny", pooling="rank")
    with Model(path, device="cpu") as model:
        assert model.engine.head.labels == ("score",)
