"""Scores of pairs of texts: ``CrossEncoder``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from metal_prefill._support.arguments import items_of
from metal_prefill._support.tensors import as_array, as_tensor
from metal_prefill.sentence_transformers._shared import CUT, Encoder, ModelName, batches, returned
from metal_prefill.sentence_transformers.util import Array
from metal_prefill.tasks._classification import encode_for_head, head_logits
from metal_prefill.tasks._pooled_head import sigmoid, softmax
from metal_prefill.tasks._reranking import Options, encode_documents, scores_of
from metal_prefill.tasks._text_passes import TextPasses

Activation: TypeAlias = "str | Callable[[Any], Any]"

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda logits: logits,
    "Sigmoid": sigmoid,
    "Softmax": softmax,
    "Tanh": np.tanh,
}


class CrossEncoder(Encoder):
    """A model that reads two texts together and scores them; :class:`Encoder` describes further arguments.

    Parameters
    ----------
    num_labels
        Number of outputs, which must be that of the model.
    max_length
        Number of tokens after which pairs are cut.
    activation_fn
        Function of the outputs, ``[pairs, labels]``: a module of PyTorch, the name of one, or a function of
        an array. None selects that of the model, or else the sigmoid of a single output.
    """

    organization = "cross-encoder"

    def __init__(
        self,
        model_name_or_path: ModelName = None,
        num_labels: int | None = None,
        max_length: int | None = None,
        activation_fn: Activation | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model_name_or_path, **options)
        if num_labels not in (None, self.num_labels):
            raise NotImplementedError(f"num_labels is {num_labels}, but the model has {self.num_labels}")
        if max_length is not None:
            self.max_seq_length = max_length
        self.activation_fn = activation_fn

    max_length = Encoder.max_seq_length  # the name in earlier versions

    @property
    def num_labels(self) -> int:
        """Number of outputs."""
        return len(self.engine.head.labels) or 1

    def predict(
        self,
        inputs: Any = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        *,
        sentences: Any = None,
        **options: Any,
    ) -> Any:
        """Score pairs of texts.

        Parameters are those of sentence-transformers; `pool` and `chunk_size` have no effect. A prompt is the
        task of a generative model.

        Returns
        -------
        numpy.ndarray, torch.Tensor or list
            float32 ``[pairs]``, or ``[pairs, labels]`` if the model has several outputs.
        """
        self._check_call(options, device)
        pairs = items_of("inputs", sentences if inputs is None else inputs)
        single = bool(pairs) and isinstance(pairs[0], str)
        pairs = [tuple(pairs)] if single else pairs
        task = self._prompt(prompt, prompt_name) or None
        parts = [self._logits(batch, task) for batch in batches(pairs, batch_size, show_progress_bar)]
        scores = np.concatenate([np.empty((0, self.num_labels)), *parts])
        scores = self._activated(scores, activation_fn or self.activation_fn)
        if apply_softmax and scores.shape[-1] > 1:
            scores = softmax(scores)
        found = scores.astype(np.float32)
        found = found[:, 0] if found.shape[1] == 1 else found
        return returned(found, single, convert_to_numpy, convert_to_tensor)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        *rest: Any,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Order documents by their scores with a query; further arguments are those of :meth:`predict`.

        Returns
        -------
        list of dict
            ``corpus_id``, ``score`` and, if wanted, ``text`` of each document, highest score first.
        """
        if self.num_labels != 1:
            raise ValueError(f"rank needs a model with one output, not {self.num_labels}: use predict")
        texts = items_of("documents", documents)
        scores = as_array(self.predict([(query, text) for text in texts], *rest, **options))
        order = np.argsort(-scores, kind="stable")[:top_k].tolist()
        found = [{"corpus_id": i, "score": float(scores[i])} for i in order]
        return [item | {"text": texts[item["corpus_id"]]} for item in found] if return_documents else found

    def _logits(self, pairs: Sequence[Any], task: str | None) -> Array:
        """Return the outputs of pairs, float64 ``[pairs, labels]``."""
        engine = self.engine
        if not engine.config.has_head:
            if task is not None:
                raise NotImplementedError("a prompt is not supported by a model that reads two texts")
            return head_logits(TextPasses(engine), encode_for_head(engine, pairs, CUT))
        options = Options(task, rules=CUT)
        prompts = [encode_documents(engine, query, [text], options).prompts[0] for query, text in pairs]
        return scores_of(TextPasses(engine), prompts)[1][:, None]

    def _activated(self, logits: Array, activation: Activation | None) -> Array:
        if activation is None:
            plain = self.num_labels > 1 or (self.engine.head.labels and self.engine.head.scores == "none")
            activation = "Identity" if plain else "Sigmoid"
        name = activation if isinstance(activation, str) else type(activation).__name__
        function = _ACTIVATIONS.get(name.rpartition(".")[2])
        if function is not None:
            return function(logits)
        if isinstance(activation, str):
            raise NotImplementedError(f"activation_fn {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
        torch = sys.modules.get("torch")
        is_module = torch is not None and isinstance(activation, torch.nn.Module)
        return as_array(activation(as_tensor(logits) if is_module else logits))
