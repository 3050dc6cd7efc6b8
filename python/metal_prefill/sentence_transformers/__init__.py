"""The interface of sentence-transformers 6 for inference: change one import.

>>> from metal_prefill.sentence_transformers import SentenceTransformer
>>> model = SentenceTransformer("all-MiniLM-L6-v2")
>>> model.encode("A rose by any other name").shape
(384,)

Names for training and evaluation raise NotImplementedError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.sentence_transformers import util
    from metal_prefill.sentence_transformers._embedder import MultiVectorEncoder, SentenceTransformer
    from metal_prefill.sentence_transformers._shared import Encoder
    from metal_prefill.sentence_transformers.cross_encoder import CrossEncoder
    from metal_prefill.sentence_transformers.sparse_encoder import SparseEncoder
    from metal_prefill.sentence_transformers.util import SimilarityFunction, quantize_embeddings

__all__ = [
    "CrossEncoder", "Encoder", "MultiVectorEncoder", "SentenceTransformer", "SimilarityFunction",
    "SparseEncoder", "quantize_embeddings", "util",
]  # fmt: skip

# Parts of the names that sentence-transformers has for other purposes.
_REFUSED = (
    *("Trainer", "Training", "ModelCard", "Dataset", "datasets", "Sampler", "LoggingHandler", "InputExample"),
    *("export_", "losses", "evaluation", "readers", "models", "hard_negatives", "resolve_ids", "backend"),
)
_find = lazy_names(
    __name__,
    _embedder="MultiVectorEncoder SentenceTransformer",
    _shared="Encoder",
    cross_encoder="CrossEncoder",
    sparse_encoder="SparseEncoder",
    util="SimilarityFunction quantize_embeddings",
)


def __getattr__(name: str) -> Any:
    if any(part in name for part in _REFUSED):
        raise NotImplementedError(f"{name} is not supported: use sentence_transformers to train and evaluate")
    return _find(name)
