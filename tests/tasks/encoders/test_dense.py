"""Dense layers after pooling, against float64, and the length of vectors that a folder saves."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import model_folders
from support.encoder_tasks import opened
from support.model_folders import DIM, Folder, values
from support.task_folders import TEXTS

from metal_prefill import GGUFError
from metal_prefill.conversion import convert

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.activation.GELU": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "torch.nn.modules.activation.ReLU": lambda x: np.maximum(x, 0),
    "torch.nn.modules.activation.SiLU": lambda x: x / (1 + np.exp(-x)),
    "torch.nn.modules.activation.Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def pooled(path: Path, dense: int = 0) -> Folder:
    folder = model_folders.bert(path)
    folder.pool(dense=dense, normalize=False)
    return folder


def vectors(folder: Folder, name: str = "m") -> Any:
    with opened(convert(folder.write(), folder.path.parent / f"{name}.gguf")) as model:
        return model.embed(TEXTS, normalize=False)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_dense_layers_match_float64(tmp_path: Path, activation: str, bias: bool) -> None:
    states = vectors(pooled(tmp_path / "plain"), "plain").astype(np.float64)
    folder = pooled(tmp_path / "m", dense=16)
    matrix, offsets = values((16, DIM)) * 20, values((16,), 5)
    settings = {"in_features": DIM, "out_features": 16, "activation_function": activation}
    # The default of the class is a bias.
    folder.json("2_Dense/config.json", settings if bias else {**settings, "bias": False})
    tensors = {"linear.weight": matrix, **({"linear.bias": offsets} if bias else {})}
    save_file(tensors, folder.path / "2_Dense" / "model.safetensors")
    expected = ACTIVATIONS[activation](states @ matrix.T + bias * offsets) @ values((DIM, 16)).T
    np.testing.assert_allclose(vectors(folder), expected, rtol=1e-4, atol=1e-5)


def test_a_bias_and_its_setting_must_agree(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "m", dense=16)
    settings = {"in_features": DIM, "out_features": 16, "activation_function": "torch.nn.Tanh"}
    folder.json("2_Dense/config.json", settings)
    with pytest.raises(
        GGUFError, match=r"the tensors linear\.weight; bias requires linear\.bias, linear\.weight"
    ):
        convert(folder.write(), tmp_path / "m.gguf")


def test_a_saved_length_of_vectors_is_the_default(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "m")
    whole = vectors(folder)
    folder.json("config_sentence_transformers.json", {"truncate_dim": 5})
    path = convert(folder.write(), tmp_path / "m.gguf")
    with opened(path) as model:
        np.testing.assert_array_equal(model.embed(TEXTS, normalize=False), whole[:, :5])
        np.testing.assert_array_equal(model.embed(TEXTS, normalize=False, dimensions=DIM), whole)
        assert model.embed(TEXTS[:1], pooling="none")[0].shape[1] == DIM
    for value, message in (
        (0, "truncate_dim is 0"),
        (DIM + 1, f"truncate_dim is {DIM + 1}, must be .* to {DIM}"),
    ):
        folder.json("config_sentence_transformers.json", {"truncate_dim": value})
        with pytest.raises(GGUFError, match=message):
            convert(folder.write(), tmp_path / "m.gguf")
