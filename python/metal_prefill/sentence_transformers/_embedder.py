"""Vectors of texts and of their tokens: ``SentenceTransformer``, ``MultiVectorEncoder``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np

from metal_prefill._support.arguments import integer, one_of
from metal_prefill.files._metadata_keys import SIMILARITY_KEY, TRUNCATE_KEY
from metal_prefill.files._task_config import NORM, NORMALIZE, TANH_INT8
from metal_prefill.sentence_transformers._shared import CUT, Encoder, ModelName, returned
from metal_prefill.sentence_transformers.util import (
    SIMILARITIES,
    Array,
    Similarity,
    SimilarityFunction,
    UnsupportedName,
    maxsim,
    maxsim_pairwise,
    normalized,
    quantize_embeddings,
)
from metal_prefill.tasks._embedding import EncodedTexts, embed_encoded, encode_texts
from metal_prefill.tasks._prompts import DOCUMENT_NAMES, PLAIN, document_role, query_role, text_role
from metal_prefill.tasks._text_passes import TextPasses

BODY = "Transformer"  # class of the module for hidden states
_OF_BODY = ("max_seq_length", "tokenizer", "tokenize")  # its attributes that a model has, too
_KINDS = {NORMALIZE: "Normalize", NORM: "LayerNorm", TANH_INT8: "FlexibleQuantizer"}  # of steps, but dense


class VectorEncoder(Encoder):
    """A model whose results are compared by a similarity."""

    # By name: functions that compare all items with all others, and those in the same place.
    similarities: ClassVar[Mapping[str, tuple[Similarity, Similarity]]] = SIMILARITIES

    @property
    def similarity_fn_name(self) -> str:
        """Name of the similarity."""
        return self._similarity

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: str | SimilarityFunction) -> None:
        stated = name.value if isinstance(name, SimilarityFunction) else name
        one_of("similarity_fn_name", stated, self.similarities)
        self._similarity = stated

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the similarity of each item of the first argument with each of the second."""
        return self.similarities[self._similarity][0](embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the similarity of items in the same place."""
        return self.similarities[self._similarity][1](embeddings1, embeddings2)


class Module:
    """A module of a model; the transformer has the limit of texts and the tokenizer."""

    def __init__(self, model: Encoder, kind: str) -> None:
        vars(self).update(_model=model, _kind=kind)

    def __repr__(self) -> str:
        return f"{self._kind}()"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in _OF_BODY or self._kind != BODY:
            raise UnsupportedName(f"the attribute {name} of a {vars(self).get('_kind')} is not supported")
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(self, name)  # raises an error for names that are not supported
        setattr(self._model, name, value)


class SentenceTransformer(VectorEncoder):
    """A model that computes a vector for each text; :class:`Encoder` describes further arguments.

    Indices select its modules. ``model[0]`` has `max_seq_length` and `tokenizer`; other attributes of modules
    raise NotImplementedError.

    Parameters
    ----------
    similarity_fn_name : {"cosine", "dot", "euclidean", "manhattan"} or SimilarityFunction
        Similarity of vectors; by default that of the model, or the cosine.
    truncate_dim
        Number of first values of each vector to keep.
    """

    def __init__(
        self,
        model_name_or_path: ModelName = None,
        *,
        similarity_fn_name: str | SimilarityFunction | None = None,
        truncate_dim: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model_name_or_path, **options)
        self.similarity_fn_name = similarity_fn_name or self._stated(SIMILARITY_KEY, "cosine")
        self.truncate_dim = truncate_dim or self._stated(TRUNCATE_KEY, None)

    def __repr__(self) -> str:
        return "".join([f"{type(self).__name__}(\n", *(f"  ({i}): {m}\n" for i, m in enumerate(self)), ")"])

    def __len__(self) -> int:
        return len(self._kinds())

    def __iter__(self) -> Iterator[Module]:
        return (Module(self, kind) for kind in self._kinds())

    def __getitem__(self, index: int) -> Module:
        return list(self)[integer("the index of a module", index)]

    def encode(
        self,
        inputs: Any = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        *,
        sentences: Any = None,
        **options: Any,
    ) -> Any:
        """Compute the vectors of texts.

        Parameters are those of sentence-transformers. `output_value` also accepts ``"token_embeddings"``, the
        hidden states of the tokens of each text, and None, a dict of both for each text. `device` must be
        that of the model; `pool` and `chunk_size` have no effect.

        Returns
        -------
        numpy.ndarray, torch.Tensor or list
            float32 ``[texts, dim]``, or ``[dim]`` for one text.
        """
        self._check_call(options, device)
        one_of("output_value", str(output_value), ("sentence_embedding", "token_embeddings", "None"))
        count = self.truncate_dim if truncate_dim is None else truncate_dim
        inputs, prompt = sentences if inputs is None else inputs, self._prompt(prompt, prompt_name)
        parts, single = self._encoded(inputs, prompt, batch_size, show_progress_bar)
        found: list[Any] = []
        for encoded in parts:
            if output_value == "token_embeddings":
                found += self._states(encoded)
                continue
            vectors = self._vectors(encoded)[:, : count and integer("truncate_dim", count, 1)]
            vectors = normalized(vectors) if normalize_embeddings else vectors
            if output_value is None:
                names = ("input_ids", "token_embeddings", "sentence_embedding")
                values = zip(encoded.prompts, self._states(encoded), vectors, strict=True)
                found += [dict(zip(names, text, strict=True)) for text in values]
            else:
                found.append(vectors)
        if output_value != "sentence_embedding":
            return found[0] if single else found
        whole = quantize_embeddings(np.concatenate(found), precision) if found else np.array([], np.float32)
        return returned(whole, single, convert_to_numpy, convert_to_tensor)

    def tokenize(self, texts: Sequence[str]) -> dict[str, Array]:
        """Return the token ids of texts, ``[texts, tokens]``, with a mask that is 0 after each text."""
        prompts = encode_texts(self.engine, texts, rules=CUT).prompts
        shape = (len(prompts), max(map(len, prompts), default=0))
        ids, mask = np.full(shape, self.tokenizer.pad_id or 0, np.int64), np.zeros(shape, np.int64)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)], mask[i, : len(prompt)] = prompt, 1
        return {"input_ids": ids, "attention_mask": mask}

    def get_embedding_dimension(self) -> int:
        """Return the length of vectors."""
        width = super().get_embedding_dimension()
        return width if self.truncate_dim is None else min(width, self.truncate_dim)

    @contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Set :attr:`truncate_dim` in a context."""
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_sentence_embeddings = truncate_embeddings

    def _stated(self, key: str, default: Any) -> Any:
        return self.engine.gguf.metadata.get(key, default)

    def _normalizes(self) -> bool:
        return bool(self._stated(f"{self.engine.config.architecture}.embedding_normalize", False))

    def _kinds(self) -> list[str]:
        """Return the class of each module."""
        body = [BODY, "Pooling"] if self.engine.config.n_layers else ["StaticEmbedding"]
        steps = [*self.engine.head.steps, *([NORMALIZE] if self._normalizes() else [])]
        return body + [_KINDS.get(step, "Dense") for step in steps]

    def _vectors(self, encoded: EncodedTexts) -> Any:
        head, config, normalize = self.engine.head, self.engine.config, self._normalizes()
        pooling = head.pooling or ("last" if config.causal else "mean")
        passes = TextPasses(self.engine)
        return embed_encoded(passes, encoded, normalize=normalize, pooling=pooling, dimensions=head.width)

    def _states(self, encoded: EncodedTexts) -> Any:
        return embed_encoded(TextPasses(self.engine), encoded, normalize=False, pooling="none")


class MultiVectorEncoder(VectorEncoder):
    """A model that computes a vector for each token of a text; :class:`Encoder` describes further arguments.

    Parameters
    ----------
    similarity_fn_name : {"maxsim", "meanmaxsim"}
        Sum or mean, over the tokens of a query, of the largest similarity to a token of a document.
    """

    similarities: ClassVar[Mapping[str, tuple[Similarity, Similarity]]] = {
        "maxsim": (maxsim, maxsim_pairwise),
        "meanmaxsim": (
            partial(maxsim, length_normalize=True),
            partial(maxsim_pairwise, length_normalize=True),
        ),
    }

    def __init__(
        self, model_name_or_path: ModelName = None, *, similarity_fn_name: str = "maxsim", **options: Any
    ) -> None:
        super().__init__(model_name_or_path, **options)
        self.similarity_fn_name = similarity_fn_name

    def encode(
        self,
        inputs: Any = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: str | None = "token_embeddings",
        convert_to_numpy: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        token_pooling: Any = None,
        task: str | None = None,
        **options: Any,
    ) -> Any:
        """Compute the vectors of the tokens of texts, which are arrays of rows of length 1.

        Parameters are those of sentence-transformers. Queries (`task`) may be expanded; some tokens of
        documents, and of texts without a task, have no vectors.

        Returns
        -------
        list of numpy.ndarray
            float32 ``[tokens, dim]`` for each text, or one array for one text.
        """
        self._check_call(options, device)
        if output_value != "token_embeddings" or token_pooling is not None:
            name = "token_pooling" if token_pooling is not None else f"output_value {output_value!r}"
            raise NotImplementedError(f"MultiVectorEncoder does not support {name}")
        prompt, role = self._prompt(prompt, prompt_name), document_role(self.engine, PLAIN)
        if task == "query":
            role = query_role(self.engine, PLAIN)
        elif task not in DOCUMENT_NAMES:
            # The length of documents does not apply, but texts lack the same tokens.
            role = text_role(self.engine)._replace(skipped=role.skipped)
        parts, single = self._encoded(inputs, prompt, batch_size, show_progress_bar, role)
        passes = TextPasses(self.engine)
        found = [rows for encoded in parts for rows in embed_encoded(passes, encoded, pooling="none")]
        return found[0] if single else found
