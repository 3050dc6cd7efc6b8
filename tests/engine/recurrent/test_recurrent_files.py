"""Files of models with recurrent layers: what they may contain, and errors that name contradictions."""

import math
import re
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.files.gguf_bytes import ARRAY, BOOL, F32, I32, U32, array, scalar, u32
from support.files.gguf_mutator import take_apart, with_key
from support.kinds import Array, ids_of
from support.recurrent import PAGEWISE
from support.reference import ReferenceModel

from metal_prefill import GGUFError, MetalPrefillError, Model, UnsupportedModelError, cli
from metal_prefill.files import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_tensors import ignored_tensors


def heads_of_layers(*counts: int) -> bytes:
    return array(I32, [scalar(I32, count) for count in counts])


LFM2_ERRORS: list[tuple[str, int, bytes, type[Exception], str]] = [
    ("shortconv.l_cache", U32, b"", GGUFError, r"metadata lfm2\.shortconv\.l_cache is missing"),
    ("shortconv.l_cache", U32, u32(0), GGUFError, r"l_cache is 0, must be between 2 and"),
    ("shortconv.l_cache", U32, u32(1), GGUFError, r"l_cache is 1, must be between 2 and"),
    (
        "shortconv.l_cache",
        U32,
        u32(4),
        GGUFError,
        r"shortconv\.conv\.weight has shape \(128, 3\), .*\(128, 4\)",
    ),
    ("embedding_length", U32, u32(2**30), GGUFError, r"embedding_length 1073741824 is more than 715827882"),
    (
        "attention.head_count_kv",
        ARRAY,
        heads_of_layers(0, 0, 0, 0),
        UnsupportedModelError,
        "none has attention",
    ),
    ("attention.head_count_kv", ARRAY, heads_of_layers(0, 2, 4, 0), UnsupportedModelError, "differs between"),
    ("attention.head_count_kv", ARRAY, heads_of_layers(0, 2), GGUFError, "lists 2 values for 4 layers"),
    ("attention.head_count_kv", ARRAY, heads_of_layers(0, 0, -2, 0), GGUFError, "is -2, must be between"),
    ("attention.head_count_kv", ARRAY, heads_of_layers(0, 0, 3, 0), GGUFError, "4 is not a multiple of"),
    (
        "attention.head_count_kv",
        ARRAY,
        heads_of_layers(2, 0, 2, 0),
        GGUFError,
        r"blk\.0\.attn_q\.weight is missing",
    ),
]
QWEN35_ERRORS: list[tuple[str, int, bytes, type[Exception], str]] = [
    ("ssm.conv_kernel", U32, b"", GGUFError, r"metadata qwen35\.ssm\.conv_kernel is missing"),
    ("ssm.conv_kernel", U32, u32(1), GGUFError, r"conv_kernel is 1, must be between 2 and"),
    ("ssm.inner_size", U32, u32(0), GGUFError, "inner_size is 0, must be between 1 and"),
    ("ssm.time_step_rank", U32, u32(0), GGUFError, "time_step_rank is 0, must be between 1"),
    ("ssm.time_step_rank", U32, u32(3), GGUFError, "inner_size 64 is not a multiple of .*time_step_rank 3"),
    ("ssm.group_count", U32, u32(3), GGUFError, "time_step_rank 2 is not a multiple of .*group_count 3"),
    ("ssm.state_size", U32, u32(2**31 - 1), GGUFError, "more than 2147483647 rows"),
    ("ssm.state_size", U32, u32(16), GGUFError, r"attn_qkv\.weight has shape \(128, 96\), .*\(96, 96\)"),
    ("full_attention_interval", U32, u32(5), UnsupportedModelError, "no layer has attention"),
    ("full_attention_interval", U32, u32(2), GGUFError, r"blk\.1\.attn_q\.weight is missing"),
    ("attention.value_length", U32, u32(32), UnsupportedModelError, "32 differs from .*key_length 64"),
]


@pytest.mark.parametrize(
    ("name", "key", "kind", "value", "error", "message"),
    [
        (name, *case)
        for name, cases in zip(("lfm2", "qwen35"), (LFM2_ERRORS, QWEN35_ERRORS), strict=True)
        for case in cases
    ],
)
def test_a_contradictory_file_is_rejected(
    tmp_path: Path,
    model_path: Callable[[str], Path],
    name: str,
    key: str,
    kind: int,
    value: bytes,
    error: type[Exception],
    message: str,
) -> None:
    path = with_key(tmp_path / "m.gguf", model_path(name), key, kind, value)
    with pytest.raises(error, match=message):
        Model(path, device="cpu")


def test_a_hybrid_whose_metadata_say_so_rotates(tmp_path: Path, model_path: Callable[[str], Path]) -> None:
    """Files of Bamba do, those of Granite 4 do not."""
    whole, key = model_path("granitehybrid"), "rope.scaling.finetuned"
    logits: list[Array] = []
    for value in (b"\0", b"\1", b""):  # without the key, layers rotate
        path = with_key(tmp_path / f"{len(logits)}.gguf", whole, key, BOOL, value)
        ids = ids_of(20)
        with Model(path, device="cpu", compute="f32", kv_dtype="f32") as model:
            found = model.session().forward_prompt_logits(ids)
            logits.append(found)
            expected = ReferenceModel(path).forward(ids).logits[-1]
            np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(logits[0] - logits[1]).max() > 1e-3 * np.abs(logits[0]).max()
    np.testing.assert_array_equal(logits[1], logits[2])


@pytest.mark.parametrize("name", PAGEWISE)
def test_a_filter_of_another_type_is_rejected(
    name: str, tmp_path: Path, model_path: Callable[[str], Path]
) -> None:
    tensor = {"lfm2": "blk.0.shortconv.conv.weight", "qwen35": "blk.0.ssm_conv1d.weight"}[name]
    parts = take_apart(model_path(name))
    parts.tensors = [
        (own, dims, 1 if own == tensor else kind, offset) for own, dims, kind, offset in parts.tensors
    ]
    (tmp_path / "m.gguf").write_bytes(parts.assemble())
    with pytest.raises(MetalPrefillError, match=re.escape(tensor)):
        Model(tmp_path / "m.gguf", device="cpu")


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        (F32, struct.pack("<f", math.nan), "has type float32, expected an integer"),
        (U32, u32(9), "is 9, must"),
    ],
)
def test_a_count_of_ignored_layers_must_be_below_that_of_blocks(
    tmp_path: Path, model_path: Callable[[str], Path], kind: int, count: bytes, message: str
) -> None:
    parts = take_apart(model_path("qwen35"))
    parts.metadata.append((b"qwen35.nextn_predict_layers", kind, count))
    (tmp_path / "m.gguf").write_bytes(parts.assemble())
    with GGUFFile(tmp_path / "m.gguf") as gguf, pytest.raises(GGUFError, match=message):
        read_config(gguf)


@pytest.mark.parametrize("counted", [False, True], ids=["own names", "as another block"])
def test_tensors_of_multi_token_prediction_and_vision_are_ignored(
    tmp_path: Path, model_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str], counted: bool
) -> None:
    whole = model_path("qwen35")
    parts = take_apart(whole)
    (norm,) = (t for t in parts.tensors if t[0] == "output_norm.weight")
    if counted:
        extra = {
            "blk.4.nextn.enorm.weight": "multi-token prediction",
            "blk.4.attn_norm.weight": "multi-token prediction",
        }
        parts.metadata = [
            (key, kind, u32(5) if key == b"qwen35.block_count" else value)
            for key, kind, value in parts.metadata
        ]
        parts.metadata.append((b"qwen35.nextn_predict_layers", U32, u32(1)))
    else:
        extra = {"mtp.norm.weight": "multi-token prediction", "v.blk.0.ln1.weight": "vision"}
    for name in extra:
        parts.tensors.append((name, *norm[1:3], len(parts.data)))
        parts.data += parts.data[norm[3] :][: 4 * norm[1][0]]
    path = tmp_path / "m.gguf"
    path.write_bytes(parts.assemble())
    with GGUFFile(path) as gguf:
        config = read_config(gguf)
        assert config.n_layers == 4
        assert ignored_tensors(gguf, config) == extra
    assert cli.main(["info", "-m", str(path)]) == 0
    out = capsys.readouterr().out
    for purpose, count in Counter(extra.values()).items():
        assert f"{count} tensors for {purpose} are ignored" in out
    with Model(path, device="cpu") as model, Model(whole, device="cpu") as plain:
        ids = ids_of(40)
        found, expected = (m.session().forward_prompt_logits(ids) for m in (model, plain))
        np.testing.assert_array_equal(found, expected)
