"""Classification heads of files and folders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from support.model_folders import DIM, with_head
from support.task_folders import RANKERS

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill.conversion import convert
from metal_prefill.files import GGUFFile
from metal_prefill.files._task_config import read_head


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cls.weight": (DIM, DIM + 1)}, r"cls\.weight has rows of 33 values, its input has 32"),
        ({"cls.bias": (DIM + 1,)}, r"cls\.bias has shape \(33,\) .*expected \(32,\) and F32"),
        ({"cls.weight": None}, r"cls\.bias requires cls\.weight"),
        ({"cls.norm.weight": (DIM - 1,)}, r"cls\.norm\.weight has shape \(31,\)"),
        ({"cls.norm.bias": (DIM,)}, r"cls\.norm\.bias requires cls\.norm\.weight"),
        ({"cls.output.weight": (3, DIM - 1)}, r"cls\.output\.weight has rows of 31 values, its input has 32"),
        ({"cls.output.weight": None}, r"cls\.\w+(\.\w+)? requires cls\.output\.weight"),
        ({"cls.output.bias": (2,)}, r"cls\.output\.bias has shape \(2,\)"),
        ({"cls.output.weight": (3, DIM, 2)}, r"cls\.output\.weight has shape"),
    ],
)
def test_mismatched_heads_are_rejected(
    tmp_path: Path, changed: dict[str, tuple[int, ...] | None], message: str
) -> None:
    shapes: dict[str, tuple[int, ...] | None] = {
        "cls.weight": (DIM, DIM),
        "cls.bias": (DIM,),
        "cls.output.weight": (3, DIM),
        "cls.output.bias": (3,),
        **changed,
    }
    with pytest.raises((GGUFError, UnsupportedModelError), match=message):
        read_head(GGUFFile(header(tmp_path, shapes)), "bert", DIM)


def header(tmp_path: Path, shapes: dict[str, tuple[int, ...] | None], **strings: Any) -> Path:
    """Write a file that contains a head alone."""
    writer = GGUFWriter(tmp_path / "head.gguf", "bert")
    for key, value in strings.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"bert.classifier.{key}", value)
    for name, shape in shapes.items():
        if shape is not None:
            writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "head.gguf"


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ({"activation": "relu"}, "classifier.activation 'relu' is not supported; supported are softmax"),
        ({"activation": 3}, "classifier.activation has type uint32, expected string"),
        (
            {"pooling_type": 0},
            "classifier.pooling_type is none, must be the pooling whose result the head reads",
        ),
        ({"pooling_type": 4}, "classifier.pooling_type is rank"),
        ({"pooling_type": 9}, "classifier.pooling_type 9 is not supported"),
    ],
)
def test_unknown_metadata_of_a_head_is_rejected(
    tmp_path: Path, strings: dict[str, Any], message: str
) -> None:
    with pytest.raises((GGUFError, UnsupportedModelError), match=message):
        read_head(GGUFFile(header(tmp_path, {"cls.output.weight": (3, DIM)}, **strings)), "bert", DIM)


def test_gelu_uses_the_error_function() -> None:
    from math import erf

    from metal_prefill.tasks._pooled_head import _gelu

    x = np.linspace(-8, 8, 4001).astype(np.float32)
    expected = [value * (1 + erf(value / 2**0.5)) / 2 for value in x.astype(np.float64)]
    np.testing.assert_allclose(_gelu(x), expected, rtol=0, atol=1e-6)


def test_a_head_with_an_unsupported_activation_is_rejected(tmp_path: Path) -> None:
    folder = RANKERS["bert"](tmp_path / "m")
    folder.config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    with pytest.raises(UnsupportedModelError, match=r"the activation of the output is torch\.nn.*Tanh"):
        convert(with_head(folder, {}).write(), tmp_path / "m.gguf")
