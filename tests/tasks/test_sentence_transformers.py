"""The interface of sentence-transformers: its documented uses, and what it refuses by name."""

import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.documented_uses import DATA, DOCUMENTS, PAIRS, QUERY, SENTENCES, USES, Paths, plain
from support.folders import model_folders, task_folders

import metal_prefill.sentence_transformers as st
from metal_prefill import MissingExtraError, Model
from metal_prefill.sentence_transformers import util

# sentence-transformers computes in float32 in another order.
NEAR = 1e-5
SHORT = SENTENCES[:9]  # which fit the context of the made folders


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Folders without the real model."""
    path = tmp_path_factory.mktemp("folders")
    vectors = model_folders.bert(path / "vectors", model_type="bert").pool(normalize=False)
    return Paths(
        str(vectors.write()),
        str(task_folders.RANKERS["bert"](path / "pairs").write()),
        str(task_folders.CLASSIFIERS["bert"](path / "classes").write()),
        str(task_folders.LATE["as they are"](path / "late").write()),
    )


@pytest.fixture
def model(made: Paths) -> st.SentenceTransformer:
    return st.SentenceTransformer(made.minilm, device="cpu")


def check(found: Any, expected: Any, where: str) -> None:
    """Compare nested results; ids and texts exactly, numbers with a bound."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            check(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (item, other) in enumerate(zip(found, expected, strict=True)):
            check(item, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=NEAR, abs=NEAR), where
    else:
        assert found == expected, where


def run(topic: str, paths: Paths) -> None:
    expected = json.loads(DATA.read_text(encoding="utf-8"))[topic]
    found = json.loads(json.dumps(plain(USES[topic](st, paths))))
    check(found, expected, topic)


ON_MADE = [topic for topic in USES if "cross" in topic or "multi_vector" in topic]


@pytest.mark.parametrize("topic", ON_MADE)
def test_documented_uses_on_made_folders_have_the_recorded_results(made: Paths, topic: str) -> None:
    run(topic, made)


@pytest.mark.real_model
@pytest.mark.parametrize("topic", [topic for topic in USES if topic not in ON_MADE])
def test_documented_uses_of_minilm_have_the_recorded_results(
    minilm_folder: Path, made: Paths, topic: str
) -> None:
    run(topic, made._replace(minilm=str(minilm_folder)))


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"])
def test_the_packaged_model_is_found_by_its_name(minilm_folder: Path, name: str) -> None:
    assert st.SentenceTransformer(name, device="cpu").get_embedding_dimension() == 384


def test_vectors_are_those_of_the_library(made: Paths, model: st.SentenceTransformer) -> None:
    with Model(made.minilm, device="cpu") as plain_model:
        expected = plain_model.embed(SHORT, normalize=False)
    np.testing.assert_array_equal(model.encode(SHORT), expected)
    np.testing.assert_array_equal(model.encode(sentences=SHORT), expected)
    np.testing.assert_array_equal(model.encode(np.array(SHORT), batch_size=3), expected)
    np.testing.assert_array_equal(model.encode(SHORT[1]), expected[1])  # alone as in any batch
    pool = model.start_multi_process_pool(["cpu"] * 4)
    np.testing.assert_array_equal(model.encode(SHORT, pool=pool, chunk_size=2), expected)
    np.testing.assert_array_equal(model.encode(SHORT, device=["cpu", "cpu"]), expected)
    assert model.encode([]).dtype == np.float32
    model.stop_multi_process_pool(pool)
    assert model.eval().to("cpu") is model
    assert model.device == "cpu"
    with pytest.raises(NotImplementedError, match="a model on cpu does not move to mps: open it there"):
        model.encode(SHORT, device="mps")


def test_texts_are_cut_in_silence(model: st.SentenceTransformer, recwarn: pytest.WarningsRecorder) -> None:
    long = "the king " * 100
    assert np.isfinite(model.encode(long)).all()
    assert model.tokenize([long, "x"])["input_ids"].shape == (2, model.max_seq_length)
    model.max_seq_length = 10**6
    assert model.max_seq_length == model.engine.config.context_length
    assert np.isfinite(model.encode(long)).all()
    assert not recwarn


def test_prompts_of_a_folder_and_of_the_caller(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "m", model_type="bert").pool()
    settings = {"prompts": {"query": "find: ", "passage": "text: "}, "default_prompt_name": "passage"}
    stated = {"similarity_fn_name": "dot", "truncate_dim": 5}
    folder.json("config_sentence_transformers.json", {**settings, **stated})
    own = {"topic": "about: ", "passage": "body: "}  # which replace those of the folder
    model = st.SentenceTransformer(folder.write(), prompts=own, device="cpu")
    assert model.similarity_fn_name == "dot"
    assert model.encode("a").shape == (model.get_embedding_dimension(),) == (5,)
    with model.truncate_embeddings(10**6):
        assert model.encode("a").shape == (model.get_embedding_dimension(),) == (model.engine.head.width,)
    assert model.prompts == {"query": "find: ", "document": "", **own}
    same = np.testing.assert_array_equal
    same(model.encode("a"), model.encode("a", prompt="body: "))
    same(model.encode_query("a"), model.encode("find: a", prompt=""))
    # Every model has a prompt of documents, which may be empty: others are not looked for.
    same(model.encode_document("a"), model.encode("a", prompt=""))
    same(model.encode("a", "topic"), model.encode("about: a", prompt=""))
    with pytest.raises(ValueError, match=r"the prompt 'topics' is not one of \['query', 'document',"):
        model.encode("a", prompt_name="topics")
    with pytest.raises(ValueError, match="the prompt 'x' is not one of"):
        st.SentenceTransformer(folder.path, default_prompt_name="x", device="cpu")


def test_queries_and_documents_need_no_prompts(demo_path: Path) -> None:
    model = st.MultiVectorEncoder(str(demo_path))  # whose file and card define none
    vectors = [model.encode_query("a king"), model.encode_document("a king"), model.encode("a king")]
    np.testing.assert_array_equal(vectors[0], vectors[2])
    np.testing.assert_array_equal(vectors[1], vectors[2])


def test_a_folder_without_pooling_takes_the_mean(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "m", model_type="bert").write()
    with Model(folder, device="cpu") as plain_model:
        expected = plain_model.embed(SHORT, pooling="mean", normalize=False)
    np.testing.assert_array_equal(st.SentenceTransformer(folder, device="cpu").encode(SHORT), expected)


def test_activations_of_cross_encoders(made: Paths) -> None:
    identity = "torch.nn.modules.linear.Identity"
    plain_scores = st.CrossEncoder(made.pairs, max_length=20, activation_fn=identity).predict(PAIRS)
    model = st.CrossEncoder(made.pairs, max_length=20)
    assert (model.num_labels, model.max_seq_length) == (1, 20)
    np.testing.assert_allclose(model.predict(PAIRS), 1 / (1 + np.exp(-plain_scores)), rtol=1e-6)
    np.testing.assert_allclose(
        model.predict(PAIRS, activation_fn=lambda x: x * 2), 2 * plain_scores, rtol=1e-6
    )
    assert model.predict([]).shape == (0,)
    with pytest.raises(NotImplementedError, match=r"activation_fn 'Mish' is not one of Identity, Sigmoid"):
        model.predict(PAIRS, activation_fn="Mish")
    with pytest.raises(ValueError, match="rank needs a model with one output, not 3"):
        st.CrossEncoder(made.classes).rank(QUERY, DOCUMENTS)
    with pytest.raises(NotImplementedError, match="num_labels is 2, but the model has 1"):
        st.CrossEncoder(made.pairs, num_labels=2)
    model.max_length = 12  # its name in earlier versions
    assert model.max_length == model.max_seq_length == 12
    shorter = st.CrossEncoder(made.pairs, max_length=12).predict(PAIRS)
    np.testing.assert_array_equal(model.predict(PAIRS), shorter)
    assert not np.array_equal(shorter, st.CrossEncoder(made.pairs, max_length=20).predict(PAIRS))


def test_modules_are_in_their_order(tmp_path: Path, made: Paths, model: st.SentenceTransformer) -> None:
    # The library adds a pooling to a folder without modules.
    assert [len(model), *map(repr, model)] == [2, "Transformer()", "Pooling()"]
    assert repr(model) == "SentenceTransformer(\n  (0): Transformer()\n  (1): Pooling()\n)"
    static = st.SentenceTransformer(task_folders.static(tmp_path / "static").write())
    assert list(map(repr, static)) == ["StaticEmbedding()", "Normalize()"]
    assert repr(model[-1]) == "Pooling()"
    assert model[0].max_seq_length == model.max_seq_length
    assert model[0].tokenizer is model.tokenizer
    model[0].max_seq_length = 9
    assert model.max_seq_length == 9
    with pytest.raises(IndexError):
        _ = model[2]
    for module, name in ((model[0], "auto_model"), (model[1], "pooling_mode"), (model[1], "tokenizer")):
        assert not hasattr(module, name)
        with pytest.raises(NotImplementedError, match=rf"the attribute {name} of a {module!r}"[:-2]):
            setattr(module, name, None)


def test_an_unknown_similarity_names_the_known_ones(made: Paths, model: st.SentenceTransformer) -> None:
    message = "similarity_fn_name must be one of cosine, dot, euclidean, manhattan; got 'foo'"
    with pytest.raises(ValueError, match=message):
        st.SentenceTransformer(made.minilm, similarity_fn_name="foo")
    with pytest.raises(ValueError, match=message):
        model.similarity_fn_name = "foo"
    model.similarity_fn_name = st.SimilarityFunction.EUCLIDEAN
    assert model.similarity_fn_name == "euclidean"
    assert st.SimilarityFunction.possible_values() == ["cosine", "dot", "euclidean", "manhattan"]
    assert st.SimilarityFunction.to_similarity_fn("dot") is util.dot_score
    pairwise = st.SimilarityFunction.to_similarity_pairwise_fn(st.SimilarityFunction.MANHATTAN)
    assert pairwise is util.pairwise_manhattan_sim
    late = st.MultiVectorEncoder(made.late)
    with pytest.raises(ValueError, match="similarity_fn_name must be one of maxsim, meanmaxsim; got 'foo'"):
        late.similarity_fn_name = "foo"


def test_a_mean_of_similarities(made: Paths) -> None:
    model = st.MultiVectorEncoder(made.late, similarity_fn_name="meanmaxsim", device="cpu")
    (query,), documents = model.encode_query([QUERY]), model.encode_document(DOCUMENTS)
    whole = st.MultiVectorEncoder(made.late, device="cpu").similarity(query, documents)
    np.testing.assert_allclose(model.similarity([query], documents), whole / len(query))
    np.testing.assert_allclose(util.maxsim(query, documents), whole)
    mean = util.maxsim_pairwise([query], documents[:1], length_normalize=True)
    np.testing.assert_allclose(mean, whole[:, 0] / len(query))
    with pytest.raises(NotImplementedError, match="MultiVectorEncoder does not support token_pooling"):
        model.encode(DOCUMENTS, token_pooling=object())


def test_texts_without_a_task_lack_the_tokens_that_documents_lack(made: Paths) -> None:
    found = st.MultiVectorEncoder(made.late, device="cpu").encode("x! y, z.")
    with Model(made.late, device="cpu") as model:
        (whole,) = model.embed(["x! y, z."], pooling="none")
    np.testing.assert_array_equal(found, whole[[0, 1, 3, 5, 7]])  # without punctuation


@pytest.mark.parametrize(
    ("task", "limited"),
    [("document", True), ("passage", True), ("corpus", True), ("clustering", False), (None, False)],
)
def test_the_length_of_documents_applies_to_each_name_of_their_task(
    tmp_path: Path, task: str | None, limited: bool
) -> None:
    folder = task_folders.LATE["PyLate"](tmp_path / "late")
    folder.merge("config_sentence_transformers.json", document_length=6)
    model = st.MultiVectorEncoder(folder.write(), device="cpu")
    assert (len(model.encode("the king " * 5, task=task)) == 6) == limited


REFUSED: dict[str, dict[str, Any]] = {
    "modules are not supported": {"modules": []},
    "trust_remote_code is not supported": {"trust_remote_code": True},
    "local_files_only is not supported": {"local_files_only": True},
    "the argument 'quantization_config' of models": {"model_kwargs": {"quantization_config": {}}},
    "the argument 'max_position_embeddings' of models": {"config_kwargs": {"max_position_embeddings": 9}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_supported_is_named(made: Paths, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        st.SentenceTransformer(made.minilm, **REFUSED[message])


def test_arguments_of_pytorch_have_no_effect_or_select_a_mode(
    made: Paths, model: st.SentenceTransformer, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"model_kwargs": {"torch_dtype": "float32", "attn_implementation": "sdpa"}}
    other = st.SentenceTransformer(
        made.minilm, backend="onnx", tokenizer_kwargs={"model_max_length": 9}, **options
    )
    assert "backend 'onnx' is ignored" in caplog.text
    assert other.engine.compute == "f32"
    assert other.get_max_seq_length() == other.max_seq_length == 9
    assert np.isfinite(other.encode("a", device=("cpu", "cpu"))).all()
    for options in ({"device": "cuda"}, {"model_kwargs": {"dtype": "int4"}}):
        with pytest.raises(ValueError, match=r"(device|dtype) must be one of"):
            st.SentenceTransformer(made.minilm, **options)


def test_the_device_has_the_name_of_pytorch(made: Paths, device: str) -> None:
    name = {"cpu": "cpu", "metal": "mps"}[device]
    assert st.SentenceTransformer(made.minilm, device=name).device == name


def test_methods_and_classes_for_training_are_refused_by_name(
    made: Paths, model: st.SentenceTransformer
) -> None:
    for name in ("fit", "save_pretrained", "push_to_hub", "add_adapter", "encode_multi_process"):
        assert not hasattr(model, name)  # of which programs ask
        with pytest.raises(NotImplementedError, match=rf"SentenceTransformer\.{name} is not supported"):
            getattr(model, name)()
    for name in ("SentenceTransformerTrainer", "InputExample", "losses", "CrossEncoderTrainingArguments"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported: use sentence_transformers"):
            getattr(st, name)
    with pytest.raises(AttributeError, match="has no attribute 'Sentence'"):
        _ = st.Sentence
    with pytest.raises(NotImplementedError, match=r"util\.http_get is not supported"):
        importlib.import_module(util.__name__).http_get  # noqa: B018
    with pytest.raises(NotImplementedError, match=r"CrossEncoder\.encode is not supported"):
        st.CrossEncoder(made.pairs).encode_query("a")
    for name in ("bogus", "processing_kwargs"):
        with pytest.raises(NotImplementedError, match=f"SentenceTransformer does not support {name}"):
            model.encode("a", **dict.fromkeys([name]))  # type: ignore[arg-type]


def test_tensors_need_pytorch(model: st.SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for tensor in (True, False):
        with pytest.raises(MissingExtraError, match="tensors need PyTorch: pip install torch"):
            model.encode("a", convert_to_numpy=False, convert_to_tensor=tensor)


def test_results_are_tensors_where_tensors_are_given(made: Paths, model: st.SentenceTransformer) -> None:
    torch = pytest.importorskip("torch")
    whole = model.encode(SENTENCES, convert_to_tensor=True)
    listed = model.encode(SENTENCES, convert_to_numpy=False)
    assert isinstance(whole, torch.Tensor)
    assert isinstance(listed, list)
    assert isinstance(listed[0], torch.Tensor)
    scores = model.similarity(whole, listed)
    assert isinstance(scores, torch.Tensor)
    np.testing.assert_array_equal(scores.numpy(), model.similarity(whole.numpy(), whole.numpy()))
    coarse = model.similarity(whole.bfloat16(), whole)  # which NumPy does not have
    np.testing.assert_allclose(coarse.numpy(), scores.numpy(), atol=1e-2)
    pairs = st.CrossEncoder(made.pairs)
    linear = torch.nn.Hardtanh(-0.1, 0.1)
    expected = linear(pairs.predict(PAIRS, activation_fn=torch.nn.Identity(), convert_to_tensor=True))
    np.testing.assert_allclose(pairs.predict(PAIRS, activation_fn=linear), expected.numpy(), rtol=1e-6)


def test_quantization_needs_ranges_of_vectors() -> None:
    vectors = np.random.default_rng(3).normal(size=(300, 8)).astype(np.float32)
    found = util.quantize_embeddings(vectors, "int8").astype(int)
    low, high = vectors.min(axis=0), vectors.max(axis=0)
    np.testing.assert_allclose(low + (found + 128) * (high - low) / 255, vectors, atol=0.05)
    assert (found.min(), found.max()) == (-128, 127)
    vectors[:, 3] = 0.5  # a range without steps
    assert np.all(util.quantize_embeddings(vectors, "uint8")[:, 3] == 0)
    beyond = util.quantize_embeddings(3 * vectors[:1], "uint8", ranges=np.array([[-0.1] * 8, [0.1] * 8]))
    assert set(beyond.ravel()) == {0, 255}
    signs = np.packbits(vectors > 0, axis=-1)
    assert np.array_equal(util.quantize_embeddings(vectors, "ubinary"), signs)
    assert np.array_equal(util.quantize_embeddings(vectors, "binary"), signs.astype(int) - 128)
    with pytest.raises(
        ValueError, match="int8 needs ranges or calibration_embeddings for a single embedding"
    ):
        util.quantize_embeddings(vectors[:1], "int8")
    with pytest.raises(TypeError, match="must be floating point, got int8"):
        util.quantize_embeddings(found.astype(np.int8), "binary")
    with pytest.raises(ValueError, match="precision must be one of float32, int8"):
        util.quantize_embeddings(vectors, "float16")


def test_limits_of_groups_and_pairs_are_inclusive() -> None:
    same = np.array([[2, 0], [1, 0], [0, 1]], np.float32)
    assert util.community_detection(same, threshold=1.0, min_community_size=2) == [[0, 1]]
    # By the inner product, the vector most similar to another need not be itself.
    lengths = np.array([[1], [2], [3]], np.float32)
    pairs = util.paraphrase_mining_embeddings(lengths, top_k=1, score_function=util.dot_score)
    assert pairs == [[6, 1, 2], [3, 0, 2]]


def test_vectors_in_half_precision_are_compared_in_float32() -> None:
    vectors = np.random.default_rng(5).normal(scale=20, size=(60, 384))  # squares of their lengths overflow
    half = vectors.astype(np.float16)
    functions = (util.cos_sim, util.dot_score, util.euclidean_sim, util.pairwise_manhattan_sim)
    for function, near in zip(functions, (1e-6, 2e-2, 1e-3, 0), strict=True):
        expected = function(half.astype(np.float64), half.astype(np.float64))
        np.testing.assert_allclose(function(half, half), expected, rtol=1e-5, atol=near)
    assert [hits[0]["corpus_id"] for hits in util.semantic_search(half, half, top_k=1)] == list(range(60))
    groups = util.community_detection(np.repeat(half[:2], 5, axis=0), min_community_size=5)
    assert groups == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    np.testing.assert_allclose(util.maxsim(half, half), (vectors @ vectors.T).max(axis=1).sum(), rtol=1e-3)


def test_similarities_match_float64() -> None:
    rng = np.random.default_rng(4)
    a, b = (rng.normal(size=(n, 6)) for n in (5, 5))
    norms = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)
    differences = a[:, None] - b
    for name, expected in (
        ("cos_sim", a @ b.T / norms),
        ("dot_score", a @ b.T),
        ("euclidean_sim", -np.sqrt((differences**2).sum(axis=2))),
        ("manhattan_sim", -np.abs(differences).sum(axis=2)),
    ):
        np.testing.assert_allclose(getattr(util, name)(a, b), expected, rtol=1e-9)
        np.testing.assert_allclose(getattr(util, f"pairwise_{name}")(a, b), expected.diagonal(), rtol=1e-9)
        np.testing.assert_allclose(getattr(util, name)(a[0].tolist(), b), expected[:1], rtol=1e-9)
        one = getattr(util, f"pairwise_{name}")(a[0], b[0])
        assert one.shape == ()
        np.testing.assert_allclose(one, expected[0, 0], rtol=1e-9)
        assert getattr(util, name)(a[:0], b).shape == (0, 5)
    assert util.pytorch_cos_sim is util.cos_sim
    assert pickle.loads(pickle.dumps(util.cos_sim)) is util.cos_sim  # as for processes of an evaluation
    assert util.semantic_search(a, b, top_k=0) == [[]] * 5
    assert util.semantic_search(a, []) == [[]] * 5
    assert [len(found) for found in util.semantic_search(a, b[:2])] == [2] * 5
    assert util.community_detection(np.empty((0, 3))) == []
