"""Text embedding as an embedding function of Chroma.

Needs Chroma (``pip install chromadb``).

>>> import chromadb
>>> from metal_prefill.integrations._chroma import ChromaEmbeddings
>>> notes = chromadb.Client().create_collection("notes", embedding_function=ChromaEmbeddings("minilm"))
>>> notes.add(ids=["1", "2"], documents=["The king is dead.", "A rose by any other name"])
>>> notes.query(query_texts=["Who died?"], n_results=1)["ids"]
[['1']]
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill.errors import MissingExtraError
from metal_prefill.model import Model

try:
    from chromadb.api.types import EmbeddingFunction
    from chromadb.utils.embedding_functions import register_embedding_function
except ImportError as error:
    raise MissingExtraError(f"ChromaEmbeddings needs: pip install chromadb ({error})") from error


@register_embedding_function  # type: ignore[misc,unused-ignore]
class ChromaEmbeddings(EmbeddingFunction[Any]):  # type: ignore[misc,unused-ignore]
    """Embedding function of a Chroma collection.

    Chroma stores its configuration with the collection and creates it again when the collection is opened,
    provided that this module is imported. The model is opened once.

    Parameters
    ----------
    model
        Model, as for :class:`metal_prefill.Model`. It must pool the states of a text into one vector.
    query, document
        Instruction for queries and for documents, see :meth:`metal_prefill.Model.embed`; by default none, as
        the card of some models requires. ``"query"`` and ``"document"`` select the prompts of the model.
    normalize, dimensions, pooling, truncate, unicode
        See :meth:`metal_prefill.Model.embed`.
    model_options
        Options of :class:`metal_prefill.Model`, such as ``{"threads": 2}``.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        query: str | None = None,
        document: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        pooling: str | None = None,
        truncate: str = "error",
        unicode: str | None = None,
        model_options: dict[str, Any] | None = None,
    ) -> None:
        self._config: dict[str, Any] = {
            "model": None if model is None else os.fspath(model),
            "query": query,
            "document": document,
            "normalize": normalize,
            "dimensions": dimensions,
            "pooling": pooling,
            "truncate": truncate,
            "unicode": unicode,
            "model_options": model_options or {},
        }
        self._model = Model(model, **(model_options or {}))

    def __call__(self, input: Any) -> Any:
        """Return the vector of each document, float32 ``[dimensions]``."""
        return list(self._embed(input, self._config["document"]))

    def embed_query(self, input: Any) -> Any:
        """Return the vector of each query, float32 ``[dimensions]``."""
        return list(self._embed(input, self._config["query"]))

    def _embed(self, texts: Any, instruction: str | None) -> npt.NDArray[np.float32]:
        names = ("normalize", "dimensions", "pooling", "truncate", "unicode")
        vectors: npt.NDArray[np.float32] = self._model.embed(
            texts, instruction=instruction, **{name: self._config[name] for name in names}
        )
        return vectors

    @staticmethod
    def name() -> str:
        """Return the name under which Chroma stores the configuration."""
        return "metal_prefill"

    def default_space(self) -> Any:
        """Return the distance of a collection that does not choose one."""
        return "cosine"

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return dict(self._config)

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> ChromaEmbeddings:
        """Create the function from the arguments in a stored configuration."""
        return ChromaEmbeddings(**config)
