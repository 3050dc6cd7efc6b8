"""Three kinds of vectors from one pass, next to float64 arithmetic, and the files with their heads."""

from pathlib import Path

import numpy as np
import pytest
from support import model_folders
from support.encoder_tasks import NEAR, opened
from support.folder_reference import FolderTensors
from support.model_folders import DIM, Folder, values
from support.task_folders import TEXTS
from support.torch_files import ORDERED, pickled, write_torch_file

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.conversion import convert

WIDTH = 24  # of the vectors of tokens
SPARSE = {"weight": values((1, DIM), 1) * 5, "bias": values((1,), 2) + 1}
COLBERT = {"weight": values((WIDTH, DIM), 3), "bias": values((WIDTH,), 4)}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = model_folders.bert(tmp_path / "m", "XLMRobertaModel", "unigram")
    folder.pool("cls_token")
    folder.write()
    write_torch_file(folder.path / "sparse_linear.pt", SPARSE)
    write_torch_file(folder.path / "colbert_linear.pt", COLBERT)
    return folder


def unit(rows: np.typing.NDArray[np.float64]) -> np.typing.NDArray[np.float64]:
    lengths: np.typing.NDArray[np.float64] = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / lengths


def test_three_kinds_of_vectors_match_float64(folder: Folder, tmp_path: Path, device: str) -> None:
    heads = FolderTensors(
        {f"{name}.{end}": t for name, head in (("s", SPARSE), ("c", COLBERT)) for end, t in head.items()}
    )
    with opened(convert(folder.path, tmp_path / "m.gguf"), device) as model:
        found = model.embed_hybrid(TEXTS)
        states = model.embed(TEXTS, pooling="none", normalize=False)
        special = {
            model.tokenizer.bos_id,
            model.tokenizer.eos_id,
            model.tokenizer.unk_id,
            model.tokenizer.pad_id,
        }
        for i, (text, rows) in enumerate(zip(TEXTS, states, strict=True)):
            x = rows.astype(np.float64)
            np.testing.assert_allclose(found.dense[i], unit(x[0]), atol=NEAR[device])
            np.testing.assert_allclose(found.tokens[i], unit(heads.linear("c", x[1:])), atol=NEAR[device])
            words = model.tokenizer.encode(text, add_bos=False)
            ids = [i for i in (model.tokenizer.bos_id, *words, model.tokenizer.eos_id) if i is not None]
            expected: dict[int, float] = {}
            for token, weight in zip(ids, heads.linear("s", x)[:, 0], strict=True):
                if token not in special and weight > 0:
                    expected[token] = max(expected.get(token, 0.0), float(weight))
            assert found.sparse[i].ids.tolist() == sorted(expected)
            np.testing.assert_allclose(
                found.sparse[i].weights, [expected[j] for j in sorted(expected)], atol=NEAR[device]
            )


def test_each_kind_is_that_of_its_own_call_and_the_same_alone(folder: Folder) -> None:
    with Model(folder.path, device="cpu") as model:
        found = model.embed_hybrid(TEXTS)
        np.testing.assert_array_equal(found.dense, model.embed(TEXTS))
        for i, (text, own) in enumerate(zip(TEXTS, model.embed_sparse(TEXTS), strict=True)):
            np.testing.assert_array_equal(own.ids, found.sparse[i].ids)
            np.testing.assert_array_equal(own.weights, found.sparse[i].weights)
            alone = model.embed_hybrid([text])
            np.testing.assert_array_equal(alone.dense[0], found.dense[i])
            np.testing.assert_array_equal(alone.tokens[0], found.tokens[i])
            np.testing.assert_array_equal(alone.sparse[0].weights, found.sparse[i].weights)
        assert len(model.embed_sparse(TEXTS[:1], max_active=2)[0].ids) == 2


def test_other_heads_make_another_conversion(folder: Folder) -> None:
    with Model(folder.path, device="cpu") as model:
        before = model.embed_hybrid(TEXTS)
    write_torch_file(folder.path / "colbert_linear.pt", {**COLBERT, "bias": COLBERT["bias"] + 1})
    with Model(folder.path, device="cpu") as model:
        assert not np.array_equal(model.embed_hybrid(TEXTS).tokens[0], before.tokens[0])


def test_a_model_without_the_heads_is_refused(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "m")
    folder.pool()
    with (
        Model(folder.write(), device="cpu") as model,
        pytest.raises(ValueError, match="lacks the heads for weights"),
    ):
        model.embed_hybrid(["a"])


@pytest.mark.parametrize(
    ("pickle", "message"),
    [
        (
            b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
            "contains GLOBAL os system; only plain tensors are read",
        ),
        (b"\x80\x02cbuiltins\neval\n.", "contains GLOBAL builtins eval"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "contains STACK_GLOBAL"),
        (b"\x80\x02]q\x00.", "contains EMPTY_LIST"),
        (b"\x80\x02cposix\nsystem\n(t\x81.", "contains GLOBAL posix system"),
        (ORDERED + b"(X\x01\x00\x00\x00aK\x01u.", "'a' is not the name of a tensor"),
        (b"\x80\x02K\x01.", "contains a int"),
        (pickled({"weight": COLBERT["weight"].T, "bias": COLBERT["bias"]}), "is not contiguous"),
    ],
)
def test_other_contents_of_a_pickle_are_refused(folder: Folder, pickle: bytes, message: str) -> None:
    write_torch_file(folder.path / "sparse_linear.pt", SPARSE, pickle)
    with pytest.raises((UnsupportedModelError, GGUFError), match=message):
        Model(folder.path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02.", "is not a zip archive"),
        (b"", "is not a zip archive"),
    ],
)
def test_other_files_are_refused(folder: Folder, content: bytes, message: str) -> None:
    (folder.path / "sparse_linear.pt").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message):
        Model(folder.path)


def test_a_damaged_pickle_is_an_error(folder: Folder) -> None:
    usual = pickled(SPARSE)
    for end in range(0, len(usual), 9):
        write_torch_file(folder.path / "sparse_linear.pt", SPARSE, usual[:end])
        with pytest.raises((GGUFError, UnsupportedModelError), match=r"sparse_linear\.pt"):
            Model(folder.path)


def test_numbers_beyond_the_file_are_an_error(folder: Folder) -> None:
    large = {**SPARSE, "weight": np.zeros((1, DIM + 1), np.float32)}
    write_torch_file(folder.path / "sparse_linear.pt", SPARSE, pickled(large))
    with pytest.raises(GGUFError, match=r"tensor weight has shape \(1, 33\), more than data/0"):
        Model(folder.path)
