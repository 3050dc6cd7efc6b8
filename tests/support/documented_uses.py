"""Uses of sentence-transformers from its documentation on inference, rewritten.

Each function takes the package as an argument: the same code runs with sentence-transformers, whose results a
tool records, and with this package's interface.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DATA = Path(__file__).parents[1] / "data" / "sentence_transformers.json"

SENTENCES = [
    "The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.",
    "A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby.",
    "A man is riding a horse.", "Two men pushed carts through the woods.", "A monkey is playing drums.",
    "Someone in a gorilla costume is playing a set of drums.",
]  # fmt: skip
LONG = "The king is dead, long live the king, who was the queen? " * 40
QUERY, DOCUMENTS = "who is the king?", ["The king is dead.", "A rose, by any other name", "x"]
PAIRS = [("The king is dead.", "He lives"), ("a", "b c d")]
# The dtype of sentence-transformers.
EXACT: dict[str, Any] = {"device": "cpu", "model_kwargs": {"dtype": "float32"}}
SHOWN = 12  # recorded values of a vector


class Paths(NamedTuple):
    """Folders of models."""

    minilm: str
    pairs: str
    classes: str
    late: str


def plain(value: Any) -> Any:
    """Return arrays and tensors as lists of numbers, and the first values of vectors."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "shape"):
        array = np.asarray(value.cpu() if hasattr(value, "cpu") else value, np.float64)
        shown = array[..., :SHOWN] if array.ndim else array
        return np.vectorize(lambda x: float(f"{x:.7g}"), otypes=[float])(shown).tolist()
    return value


def _minilm(st: Any, paths: Paths, **options: Any) -> Any:
    return st.SentenceTransformer(paths.minilm, **EXACT, **options)


def quickstart(st: Any, paths: Paths) -> Any:
    model = _minilm(st, paths)
    embeddings = model.encode(SENTENCES)
    similarities = model.similarity(embeddings, embeddings)
    pairwise = model.similarity_pairwise(embeddings[:5], embeddings[5:])
    return embeddings.shape, embeddings, similarities, pairwise


def one_sentence(st: Any, paths: Paths) -> Any:
    model = _minilm(st, paths)
    return model.encode(SENTENCES[0]), model.encode(SENTENCES[0]).shape, model.encode([]).shape


def input_length(st: Any, paths: Paths) -> Any:
    model = _minilm(st, paths)
    default, length = model.max_seq_length, model.encode(LONG)
    model.max_seq_length = 20
    cut = model.encode(LONG)
    model.max_seq_length = 400
    return default, length, model.max_seq_length, cut, model.encode(LONG)


def prompts(st: Any, paths: Paths) -> Any:
    stated = {"classification": "Classify the following text: ", "query": "question: "}
    model = _minilm(st, paths, prompts=stated, default_prompt_name="classification")
    return (
        model.encode("How to bake?"),
        model.encode("How to bake?", prompt_name="query"),
        model.encode("How to bake?", prompt="question: "),
        model.encode_query("How to bake?"),
        model.encode_document("How to bake?"),
        _minilm(st, paths).encode("question: How to bake?"),
    )


def similarity_functions(st: Any, paths: Paths) -> Any:
    found = []
    for name in ("cosine", "dot", "euclidean", "manhattan"):
        model = _minilm(st, paths, similarity_fn_name=name)
        embeddings = model.encode(SENTENCES[:4])
        found += [model.similarity_fn_name, model.similarity(embeddings, embeddings[:2])]
    return found


def matryoshka(st: Any, paths: Paths) -> Any:
    model = _minilm(st, paths, truncate_dim=64)
    with model.truncate_embeddings(8):
        short = model.encode(SENTENCES[:2])
    return (
        model.encode(SENTENCES[:2]),
        model.encode(SENTENCES[:2], normalize_embeddings=True),
        model.get_embedding_dimension(),
        short,
        model.encode(SENTENCES[:2], truncate_dim=5),
    )


def quantization(st: Any, paths: Paths) -> Any:
    model = _minilm(st, paths)
    embeddings = model.encode(SENTENCES)
    ranges = np.vstack([embeddings.min(axis=0) - 0.01, embeddings.max(axis=0) + 0.01])
    module = importlib.import_module(f"{st.__name__}.quantization")
    return (
        model.encode(SENTENCES, precision="ubinary")[:, ::8].astype(int) // 128,
        module.quantize_embeddings(embeddings, precision="binary").shape,
        st.quantize_embeddings(embeddings, precision="int8", ranges=ranges),
        st.quantize_embeddings(embeddings, "uint8", calibration_embeddings=embeddings * 2),
    )


def outputs(st: Any, paths: Paths) -> Any:
    model = _minilm(st, paths)
    tokens = model.encode(SENTENCES[:2], output_value="token_embeddings")
    whole = model.encode(SENTENCES[0], output_value=None)
    return (
        [list(rows.shape) for rows in tokens],
        tokens[0],
        whole["sentence_embedding"],
        model.tokenize(SENTENCES[:3])["attention_mask"],
        model.encode(SENTENCES, batch_size=3, show_progress_bar=True),
    )


def semantic_search(st: Any, paths: Paths) -> Any:
    model = _minilm(st, paths)
    corpus = model.encode_document(SENTENCES[2:])
    queries = model.encode_query(["A man is eating pasta.", "A cheetah chases prey on across a field."])
    scores = model.similarity(queries, corpus)
    hits = st.util.semantic_search(queries, corpus, top_k=3)
    dot = st.util.semantic_search(queries[0], corpus, score_function=st.util.dot_score, query_chunk_size=1)
    return scores, hits, dot


def paraphrase_mining(st: Any, paths: Paths) -> Any:
    model = _minilm(st, paths)
    pairs = st.util.paraphrase_mining(model, SENTENCES, top_k=3)
    return pairs, st.util.paraphrase_mining(model, SENTENCES, max_pairs=2)


def clustering(st: Any, paths: Paths) -> Any:
    embeddings = _minilm(st, paths).encode(SENTENCES)
    found = st.util.community_detection(embeddings, min_community_size=2, threshold=0.3, batch_size=4)
    return found, st.util.community_detection(embeddings, min_community_size=2, threshold=0.6)


def multi_process(st: Any, paths: Paths) -> Any:
    model = _minilm(st, paths)
    return model.encode(SENTENCES[:3], normalize_embeddings=True), model.encode(SENTENCES[:3], prompt="")


def cross_encoder(st: Any, paths: Paths) -> Any:
    model = st.CrossEncoder(paths.pairs, **EXACT)
    ranks = model.rank(QUERY, DOCUMENTS, return_documents=True)
    scores = model.predict([(QUERY, text) for text in DOCUMENTS], batch_size=2)
    return ranks, scores, model.predict((QUERY, DOCUMENTS[0])), model.rank(QUERY, DOCUMENTS, top_k=1)


def cross_encoder_classes(st: Any, paths: Paths) -> Any:
    model = st.CrossEncoder(paths.classes, **EXACT)
    return model.predict(PAIRS), model.predict(PAIRS, apply_softmax=True), model.num_labels


def late_interaction(st: Any, paths: Paths) -> Any:
    model = st.MultiVectorEncoder(paths.late, **EXACT)
    queries, documents = model.encode_query([QUERY]), model.encode_document(DOCUMENTS)
    one = model.encode_document(DOCUMENTS[0])
    return queries, documents, model.similarity(queries, documents), model.similarity_pairwise(queries, [one])


_SITE = "https://sbert.net/"
_EXAMPLES = f"{_SITE}examples/sentence_transformer/applications/"
_EMBEDDINGS = f"{_EXAMPLES}computing-embeddings/README.html"
# Uses by the address of the page and its topic.
USES: dict[str, Callable[[Any, Paths], Any]] = {
    f"{_SITE}docs/quickstart.html#sentence-transformer": quickstart,
    f"{_SITE}docs/quickstart.html#cross-encoder": cross_encoder,
    f"{_SITE}docs/sentence_transformer/usage/usage.html": one_sentence,
    f"{_EMBEDDINGS}#input-sequence-length": input_length,
    f"{_EMBEDDINGS}#prompt-templates": prompts,
    f"{_EMBEDDINGS}#multi-process": multi_process,
    f"{_SITE}docs/package_reference/sentence_transformer/SentenceTransformer.html#encode": outputs,
    f"{_SITE}docs/sentence_transformer/usage/semantic_textual_similarity.html": similarity_functions,
    f"{_EXAMPLES}semantic-search/README.html": semantic_search,
    f"{_EXAMPLES}paraphrase-mining/README.html": paraphrase_mining,
    f"{_EXAMPLES}clustering/README.html": clustering,
    f"{_EXAMPLES}embedding-quantization/README.html": quantization,
    f"{_SITE}examples/sentence_transformer/training/matryoshka/README.html#inference": matryoshka,
    f"{_SITE}docs/cross_encoder/usage/usage.html": cross_encoder_classes,
    f"{_SITE}docs/multi_vector_encoder/usage/usage.html": late_interaction,
}
