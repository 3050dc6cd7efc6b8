"""Text embedding as a scikit-learn transformer.

Needs scikit-learn (``pip install scikit-learn``).

>>> from sklearn.linear_model import LogisticRegression
>>> from sklearn.pipeline import make_pipeline
>>> from metal_prefill.integrations._sklearn import EmbeddingTransformer
>>> classifier = make_pipeline(EmbeddingTransformer("embedding.gguf"), LogisticRegression())
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill.errors import MissingExtraError
from metal_prefill.model import Model

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
except ImportError as error:
    raise MissingExtraError(f"EmbeddingTransformer needs: pip install scikit-learn ({error})") from error


class EmbeddingTransformer(
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]  # scikit-learn has no types
    TransformerMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """Transformer that embeds texts with a model; it has no fitted state.

    Copies and pickles reopen the file. The columns of the output are named ``embeddingtransformer0`` and
    so on (``get_feature_names_out``); ``set_output`` selects data frames.

    Parameters
    ----------
    path
        Model, as for :class:`metal_prefill.Model`. It must pool the states of a text into one vector.
    normalize, dimensions, pooling, instruction, truncate, unicode
        See :meth:`metal_prefill.Model.embed`.
    model_options
        Options of :class:`metal_prefill.Model`, such as ``{"threads": 2}``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        pooling: str | None = None,
        instruction: str | None = None,
        truncate: str = "error",
        unicode: str | None = None,
        model_options: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.normalize = normalize
        self.dimensions = dimensions
        self.pooling = pooling
        self.instruction = instruction
        self.truncate = truncate
        self.unicode = unicode
        self.model_options = model_options

    def fit(self, texts: Any = None, y: Any = None) -> EmbeddingTransformer:
        """Open the model."""
        self._open()
        return self

    def transform(self, texts: Iterable[str]) -> npt.NDArray[np.float32]:
        """Return the vectors of texts, float32 ``[texts, dimensions]``."""
        vectors: npt.NDArray[np.float32] = self._open().embed(
            texts,
            normalize=self.normalize,
            dimensions=self.dimensions,
            pooling=self.pooling,  # type: ignore[arg-type]  # embed checks it
            instruction=self.instruction,
            truncate=self.truncate,
            unicode=self.unicode,  # type: ignore[arg-type]
        )
        return vectors

    @property
    def _n_features_out(self) -> int:
        return self.dimensions or self._open().engine.head.width

    def _open(self) -> Model:
        key = (self.path, repr(self.model_options))
        if getattr(self, "_opened", (None, None))[0] != key:
            self._opened = (key, Model(self.path, **(self.model_options or {})))
        model: Model = self._opened[1]
        return model

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        tags.requires_fit = False
        return tags

    # Equivalent of __sklearn_tags__ for scikit-learn before 1.6.
    def _more_tags(self) -> dict[str, Any]:
        return {"X_types": ["string", "1darray"], "requires_fit": False}
