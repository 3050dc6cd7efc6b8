"""Files of models with recurrent layers: what they may contain."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.files.gguf_bytes import FALSE, TRUE, Value, integer
from support.files.gguf_mutator import take_apart, with_entries
from support.kinds import Array, ids_of
from support.recurrent import PAGEWISE
from support.reference import ReferenceModel

from metal_prefill import MetalPrefillError, Model, cli
from metal_prefill.files import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_tensors import ignored_tensors


def test_a_hybrid_whose_metadata_say_so_rotates(tmp_path: Path, model_path: Callable[[str], Path]) -> None:
    """Files of Bamba rotate, those of Granite 4 do not."""
    whole, key = model_path("granitehybrid"), "granitehybrid.rope.scaling.finetuned"
    logits: list[Array] = []
    for value in (FALSE, TRUE, None):  # without the key, layers rotate
        path = with_entries(tmp_path / f"{len(logits)}.gguf", whole, {key: value})
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
    with pytest.raises(MetalPrefillError, match=re.escape(tensor)):
        Model(parts.write(tmp_path / "m.gguf"), device="cpu")


MTP = "multi-token prediction"
IN_A_BLOCK = {"qwen35.block_count": integer(5), "qwen35.nextn_predict_layers": integer(1)}


@pytest.mark.parametrize(
    ("extra", "entries"),
    [
        ({"mtp.norm.weight": MTP, "v.blk.0.ln1.weight": "vision"}, {}),
        ({"blk.4.nextn.enorm.weight": MTP, "blk.4.attn_norm.weight": MTP}, IN_A_BLOCK),
    ],
)
def test_tensors_of_multi_token_prediction_and_vision_are_ignored(
    tmp_path: Path,
    model_path: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    extra: dict[str, str],
    entries: dict[str, Value],
) -> None:
    whole = model_path("qwen35")
    parts = take_apart(with_entries(tmp_path / "entries.gguf", whole, entries))
    (norm,) = (t for t in parts.tensors if t[0] == "output_norm.weight")
    for name in extra:
        parts.tensors.append((name, *norm[1:3], len(parts.data)))
        parts.data += parts.data[norm[3] :][: 4 * norm[1][0]]
    path = parts.write(tmp_path / "m.gguf")
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
