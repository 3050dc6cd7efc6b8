"""Vectors over the vocabulary, and three kinds of vectors from one pass."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.encoder_tasks import NEAR, opened
from support.folders import task_folders
from support.folders.encoder_folders import RECORD, TEXTS, distilbert_masked, routed
from support.folders.model_folders import Folder
from support.folders.other_encoders import FolderTensors
from support.folders.task_folders import ACTIVE, COLBERT, SPARSE, recorded
from support.folders.task_folders import TEXTS as SOME
from support.folders.torch_files import pickled, write_torch_file

from metal_prefill import ContextOverflowError, GGUFError, Model, UnsupportedModelError
from metal_prefill.conversion import convert
from metal_prefill.sentence_transformers import SparseEncoder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = distilbert_masked(tmp_path / "folder")
    folder.write()
    return folder


def test_the_largest_values_are_kept_on_request(folder: Folder, device: str) -> None:
    with Model(folder.path, device=device, compute="f32", kv_dtype="f32") as model:
        whole, found = (model.embed_sparse(TEXTS[:1], max_active=most)[0] for most in (None, 5))
    kept = np.sort(whole.ids[np.argsort(-whole.weights, kind="stable")[:5]])
    np.testing.assert_array_equal(found.ids, kept)
    np.testing.assert_array_equal(found.weights, whole.weights[np.isin(whole.ids, kept)])


def test_sparse_encoder_has_the_interface_of_sentence_transformers(folder: Folder) -> None:
    encoder = SparseEncoder(folder.path, model_kwargs={"dtype": "float32"}, device="cpu")
    with np.load(RECORD) as record:
        wanted = record["distilbert, masked"]
    found = encoder.encode(TEXTS)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert encoder.encode(TEXTS[0]).shape == (encoder.get_embedding_dimension(),)
    assert (encoder.encode(TEXTS, max_active_dims=3) > 0).sum(axis=1).tolist() == [3, 3, 3]
    np.testing.assert_allclose(encoder.similarity(found, found), wanted @ wanted.T, rtol=1e-4)
    pairs = encoder.similarity_pairwise(found, found[::-1])
    np.testing.assert_allclose(pairs, (wanted * wanted[::-1]).sum(axis=1), rtol=1e-4)
    assert encoder.similarity_fn_name == "dot"
    decoded = encoder.decode(found[0], top_k=4)
    order = np.argsort(-wanted[0])[:4]
    vocabulary = json.loads((folder.path / "tokenizer.json").read_text())["model"]["vocab"]
    assert [vocabulary[token] for token, _ in decoded] == order.tolist()
    np.testing.assert_allclose([value for _, value in decoded], wanted[0][order], atol=1e-4)


def test_sparsity_and_shared_tokens_of_sparse_vectors(folder: Folder) -> None:
    encoder = SparseEncoder(folder.path, device="cpu", similarity_fn_name="cosine", max_active_dims=5)
    one, *others = found = encoder.encode([TEXTS[0], TEXTS[2], "a rose"])
    size = encoder.get_embedding_dimension()
    expected = {"active_dims": 5.0, "sparsity_ratio": 1 - 5 / size}
    assert encoder.sparsity(found) == SparseEncoder.sparsity(one) == pytest.approx(expected)
    assert encoder.sparsity(found[:0]) == {"active_dims": 0.0, "sparsity_ratio": 1.0}
    shared = encoder.intersection(one, np.stack(others))
    np.testing.assert_array_equal(shared, [one * other for other in others])
    np.testing.assert_array_equal(encoder.intersection(one, others[0]), shared[0])
    np.testing.assert_allclose(np.diag(encoder.similarity(found, found)), 1, rtol=1e-5)
    for wrong in ((found, one), (one, one[1:])):
        with pytest.raises(ValueError, match=r"embeddings of shapes .* must be vectors of one length"):
            encoder.intersection(*wrong)


def test_queries_of_a_router_match_sentence_transformers(tmp_path: Path, device: str) -> None:
    path = convert(routed(tmp_path / "folder").write(), tmp_path / "m.gguf")
    encoder = SparseEncoder(path, model_kwargs={"dtype": "float32"}, device=device)
    for name, encode in (("query", encoder.encode_query), ("document", encoder.encode_document)):
        for row, (ids, weights) in zip(
            encode(SOME, max_active_dims=ACTIVE), recorded()["sparse"][name], strict=True
        ):
            np.testing.assert_array_equal(row.nonzero()[0], ids)
            np.testing.assert_allclose(row[ids], weights, atol=NEAR[device])
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        for text, found in zip(SOME, model.embed_sparse(SOME, instruction="query"), strict=True):
            present = np.unique(model.tokenizer.encode(text, add_bos=False))
            assert set(found.ids) <= set(present)
        np.testing.assert_array_equal(
            model.embed_sparse(SOME[:1])[0].ids, model.embed_sparse(SOME[:1], instruction="document")[0].ids
        )
        long = "a rose " * 400
        with pytest.raises(ContextOverflowError, match="text 0"):
            model.embed_sparse([long], instruction="query")
        with pytest.warns(UserWarning, match="text 0"):
            model.embed_sparse([long], instruction="query", truncate="end")


@pytest.fixture
def hybrid(tmp_path: Path) -> Folder:
    folder = task_folders.hybrid(tmp_path / "m")
    folder.write()
    return folder


def unit(rows: np.typing.NDArray[np.float64]) -> np.typing.NDArray[np.float64]:
    lengths: np.typing.NDArray[np.float64] = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / lengths


def test_three_kinds_of_vectors_match_float64(hybrid: Folder, tmp_path: Path, device: str) -> None:
    heads = FolderTensors(
        {f"{name}.{end}": t for name, head in (("s", SPARSE), ("c", COLBERT)) for end, t in head.items()}
    )
    with opened(convert(hybrid.path, tmp_path / "m.gguf"), device) as model:
        found = model.embed_hybrid(SOME)
        states = model.embed(SOME, pooling="none", normalize=False)
        special = {getattr(model.tokenizer, f"{name}_id") for name in ("bos", "eos", "unk", "pad")}
        for i, (text, rows) in enumerate(zip(SOME, states, strict=True)):
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


def test_a_damaged_pickle_is_an_error(hybrid: Folder) -> None:
    usual = pickled(SPARSE)
    for end in range(0, len(usual), 9):
        write_torch_file(hybrid.path / "sparse_linear.pt", SPARSE, usual[:end])
        with pytest.raises((GGUFError, UnsupportedModelError), match=r"sparse_linear\.pt"):
            Model(hybrid.path)
