"""Vectors over the vocabulary, next to float64 arithmetic."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.bert_relatives import distilbert, gte_masked, masked_head, routed, vocabulary_vector
from support.encoder_tasks import NEAR
from support.folder_reference import Array
from support.model_folders import Folder
from support.task_folders import ACTIVE, recorded
from support.task_folders import TEXTS as SOME

from metal_prefill import ContextOverflowError, Model, UnsupportedModelError
from metal_prefill.conversion import convert
from metal_prefill.sentence_transformers import SparseEncoder

TEXTS = ["a rose by any name", "", "would smell as sweet would smell as sweet"]


def distilbert_masked(path: Path) -> Folder:
    folder = distilbert(path, "DistilBertForMaskedLM")
    masked_head(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = distilbert_masked(tmp_path / "folder")
    folder.write()
    return folder


@pytest.fixture
def model(folder: Folder, device: str) -> Iterator[Model]:
    with Model(folder.path, device=device, compute="f32", kv_dtype="f32") as model:
        yield model


def expected(folder: Folder, model: Model, text: str) -> Array:
    words = model.tokenizer.encode(text, add_bos=False)
    ids = np.array([model.tokenizer.bos_id, *words, model.tokenizer.eos_id])
    return vocabulary_vector(folder, ids)


@pytest.mark.parametrize("make", [distilbert_masked, gte_masked])
def test_vectors_over_the_vocabulary_match_float64(
    tmp_path: Path, device: str, make: Callable[[Path], Folder]
) -> None:
    folder = make(tmp_path / "folder")
    with Model(folder.write(), device=device, compute="f32", kv_dtype="f32") as model:
        for text, found in zip(TEXTS, model.embed_sparse(TEXTS), strict=True):
            wanted = expected(folder, model, text)
            assert (np.diff(found.ids) > 0).all()
            assert (found.weights > 0).all()
            dense = np.zeros_like(wanted)
            dense[found.ids] = found.weights
            assert np.abs(dense - wanted).max() <= 2e-3 * wanted.max()  # half precision of Metal


def test_the_largest_values_are_kept_on_request(folder: Folder, model: Model) -> None:
    whole, found = (model.embed_sparse(TEXTS[:1], max_active=most)[0] for most in (None, 5))
    kept = np.sort(whole.ids[np.argsort(-whole.weights, kind="stable")[:5]])
    np.testing.assert_array_equal(found.ids, kept)
    np.testing.assert_array_equal(found.weights, whole.weights[np.isin(whole.ids, kept)])


def test_a_text_has_the_same_vector_alone_and_in_a_batch(model: Model) -> None:
    for text, found in zip(TEXTS, model.embed_sparse(TEXTS), strict=True):
        (alone,) = model.embed_sparse([text])
        np.testing.assert_array_equal(alone.ids, found.ids)
        if model.device == "cpu":
            np.testing.assert_array_equal(alone.weights, found.weights)


def test_sparse_encoder_has_the_interface_of_sentence_transformers(folder: Folder) -> None:
    encoder = SparseEncoder(folder.path, model_kwargs={"dtype": "float32"}, device="cpu")
    with Model(folder.path, device="cpu", compute="f32", kv_dtype="f32") as model:
        wanted = np.stack([expected(folder, model, text) for text in TEXTS])
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


def test_other_weights_of_queries_make_another_conversion(tmp_path: Path) -> None:
    folder = routed(tmp_path / "folder")
    with Model(folder.write(), device="cpu") as model:
        before = model.embed_sparse(SOME, instruction="query")
    weights = np.ones(folder.config["vocab_size"], np.float32)
    save_file({"weight": weights}, folder.path / "query_0_SparseStaticEmbedding" / "model.safetensors")
    with Model(folder.path, device="cpu") as model:
        after = model.embed_sparse(SOME, instruction="query")
    assert (after[0].weights == 1).all()
    assert not np.array_equal(after[0].weights, before[0].weights)


def test_other_routes_are_refused_by_name(tmp_path: Path) -> None:
    folder = routed(tmp_path / "folder")
    config = json.loads((folder.path / "router_config.json").read_text())
    types = config["types"] | {"query_0_SparseStaticEmbedding": "sentence_transformers.models.Transformer"}
    folder.json("router_config.json", config | {"types": types})
    with pytest.raises(
        UnsupportedModelError, match="queries have the modules Transformer, and documents Tra"
    ):
        Model(folder.write())
    folder.json("router_config.json", config | {"parameters": {"default_route": "query"}})
    with pytest.raises(UnsupportedModelError, match="default_route is 'query'; supported: 'document'"):
        Model(folder.path)
    folder.json("router_config.json", config | {"structure": {"image": [""]}})
    with pytest.raises(UnsupportedModelError, match="routes are image; supported are query and document"):
        Model(folder.path)


@pytest.mark.parametrize(
    ("setting", "value"), [("pooling_strategy", "mean"), ("activation_function", "softplus")]
)
def test_other_poolings_are_refused_by_name(folder: Folder, setting: str, value: str) -> None:
    folder.json("1_SpladePooling/config.json", {setting: value})
    with pytest.raises(UnsupportedModelError, match=f"'{value}'"):
        Model(folder.path)


def test_other_models_have_no_such_vectors(demo_path: Path) -> None:
    with Model(demo_path, device="cpu") as model, pytest.raises(ValueError, match="no head for vectors over"):
        model.embed_sparse(["a"])
