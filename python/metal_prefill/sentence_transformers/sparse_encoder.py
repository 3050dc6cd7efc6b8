"""Vectors over the vocabulary: ``SparseEncoder``."""

from itertools import chain
from typing import Any

import numpy as np

from metal_prefill._support.arguments import integer
from metal_prefill._support.tensors import as_array, like
from metal_prefill.engine import Engine
from metal_prefill.sentence_transformers._embedder import VectorEncoder
from metal_prefill.sentence_transformers._shared import ModelName, returned
from metal_prefill.tasks._sparse import check_sparse, sparse_role, sparse_vectors
from metal_prefill.text._vocabulary import SPACE, begins_word


class SparseEncoder(VectorEncoder):
    """A SPLADE model; :class:`Encoder` describes further arguments.

    Parameters
    ----------
    max_active_dims
        Number of largest values of each vector to keep; None keeps all that are positive.
    """

    def __init__(
        self,
        model_name_or_path: ModelName = None,
        *,
        similarity_fn_name: str = "dot",
        max_active_dims: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model_name_or_path, **options)
        check_sparse(self.engine)
        self.max_active_dims = max_active_dims
        self.similarity_fn_name = similarity_fn_name

    def encode(
        self,
        inputs: Any = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        convert_to_tensor: bool = False,
        convert_to_sparse_tensor: bool = False,
        save_to_cpu: bool = False,
        device: Any = None,
        max_active_dims: int | None = None,
        **options: Any,
    ) -> Any:
        """Compute the vectors of texts, which are dense arrays.

        Returns
        -------
        numpy.ndarray or torch.Tensor
            float32 ``[texts, vocab]``, or ``[vocab]`` for one text.
        """
        self._check_call(options, device)
        if convert_to_sparse_tensor:
            raise NotImplementedError("SparseEncoder does not support convert_to_sparse_tensor")
        most = self.max_active_dims if max_active_dims is None else max_active_dims
        most = None if most is None else integer("max_active_dims", most, 1)
        role, prompt = sparse_role(self.engine, options.get("task")), self._prompt(prompt, prompt_name)
        parts, single = self._encoded(inputs, prompt, batch_size, show_progress_bar, role)
        batches = (sparse_vectors(self.engine, encoded.prompts, role, most) for encoded in parts)
        vectors = list(chain.from_iterable(batches))
        whole = np.zeros((len(vectors), self.get_embedding_dimension()), np.float32)
        for row, vector in zip(whole, vectors, strict=True):
            row[vector.ids] = vector.weights
        return returned(whole, single, True, convert_to_tensor)

    def decode(self, embeddings: Any, top_k: int | None = None) -> list[Any]:
        """Return pairs of token and value for each vector, the largest first; for one vector, its list."""
        matrix = as_array(embeddings)
        if matrix.ndim == 2:
            return [self.decode(row, top_k) for row in matrix]
        order = np.argsort(-matrix, kind="stable")[: np.count_nonzero(matrix > 0)][:top_k]
        return [(_spelled(self.engine, int(i)), float(matrix[i])) for i in order]

    @staticmethod
    def sparsity(embeddings: Any) -> dict[str, float]:
        """Return the mean number of values that are not 0 in vectors, and the share of those that are 0."""
        rows = np.atleast_2d(as_array(embeddings))
        active = float(np.count_nonzero(rows, axis=1).mean()) if rows.size else 0.0
        return {"active_dims": active, "sparsity_ratio": 1 - active / max(rows.shape[1], 1)}

    @staticmethod
    def intersection(embeddings_1: Any, embeddings_2: Any) -> Any:
        """Return the products of a vector with one or several others, which show tokens that they share."""
        one, others = as_array(embeddings_1), as_array(embeddings_2)
        if one.ndim != 1 or one.shape != others.shape[-1:]:
            raise ValueError(
                f"embeddings of shapes {one.shape} and {others.shape} must be vectors of one length"
            )
        return like(one * others, embeddings_1, embeddings_2)

    def get_embedding_dimension(self) -> int:
        """Return the size of the vocabulary."""
        return self.engine.config.vocab_size


def _spelled(engine: Engine, token: int) -> str:
    """Return a token as ``vocab.txt`` of WordPiece spells it, where GGUF files mark the other ones."""
    text: str = engine.tokenizer.token(token)
    if engine.gguf.metadata["tokenizer.ggml.model"] != "bert" or engine.tokenizer.is_special(token):
        return text
    return text.removeprefix(SPACE) if begins_word(text) else f"##{text}"
