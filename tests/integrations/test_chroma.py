"""The embedding function of Chroma: vectors of documents and queries, and its stored configuration."""

from pathlib import Path

import numpy as np
import pytest

from metal_prefill import Model, synth

TEXTS = ["To be", "or not to be"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("chromadb")
    return synth.synthesize(tmp_path_factory.mktemp("m") / "small.gguf", preset="tiny-embedding")


def test_documents_and_queries_use_their_prompts(path: Path) -> None:
    from metal_prefill.integrations import ChromaEmbeddings

    function = ChromaEmbeddings(path, query="query", dimensions=8, model_options={"device": "cpu"})
    with Model(path, device="cpu") as model:
        np.testing.assert_array_equal(function(TEXTS), model.embed(TEXTS, dimensions=8))
        expected = model.embed(TEXTS, dimensions=8, instruction="query")
        np.testing.assert_array_equal(function.embed_query(TEXTS), expected)


def test_a_collection_finds_the_nearest_document(path: Path, tmp_path: Path) -> None:
    import chromadb

    from metal_prefill.integrations import ChromaEmbeddings

    function = ChromaEmbeddings(path, model_options={"device": "cpu"})
    client = chromadb.PersistentClient(str(tmp_path / "db"))
    notes = client.create_collection("notes", embedding_function=function)
    notes.add(ids=["a", "b"], documents=TEXTS)
    assert notes.query(query_texts=[TEXTS[1]], n_results=1)["ids"] == [["b"]]
    # The configuration is stored: the collection opens with the same model and options.
    again = chromadb.PersistentClient(str(tmp_path / "db")).get_collection("notes")
    assert again.query(query_texts=[TEXTS[0]], n_results=1)["ids"] == [["a"]]
    assert ChromaEmbeddings.build_from_config(function.get_config()).get_config() == function.get_config()
