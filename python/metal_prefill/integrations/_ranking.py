"""Settings and model of the rerankers for LangChain and LlamaIndex, whose bases are classes of pydantic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr

from metal_prefill.model import Model
from metal_prefill.tasks._reranking import Ranked


class Reranker(BaseModel):  # type: ignore[misc,unused-ignore]
    """A model that ranks documents, and its options."""

    model: str | None = Field(default=None, description="model, as for metal_prefill.Model")
    top_n: int | None = Field(default=None, ge=1, description="number of documents; None keeps all")
    options: dict[str, Any] = Field(default_factory=dict, description="options of metal_prefill.Model.rerank")
    model_options: dict[str, Any] = Field(default_factory=dict, description="options of metal_prefill.Model")
    _model: Model = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Open the model."""
        super().model_post_init(context)
        self._model = Model(self.model, **self.model_options)

    def _ranked(self, query: str, texts: Sequence[str]) -> list[Ranked]:
        return self._model.rerank(query, texts, self.top_n, **self.options) if texts else []
