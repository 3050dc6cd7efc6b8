"""Methods of a model for embeddings, ranks, labels and scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from metal_prefill._engine import Engine
from metal_prefill._support.arguments import Logits, Progress, TokenIds
from metal_prefill.session import Session
from metal_prefill.tasks._scoring import check_prompts, score_many

if TYPE_CHECKING:
    from metal_prefill.tasks._classification import Classification
    from metal_prefill.tasks._reranking import Ranked
    from metal_prefill.tasks._token_labels import Entity


class TaskMethods:
    """Work that is prefill only, over an engine."""

    @property
    def engine(self) -> Engine:
        """The engine handle."""
        raise NotImplementedError

    def score(self, tokens: TokenIds, *, progress: Progress | None = None) -> Logits:
        """Log probability of each token given those before it, from an empty context.

        Leaves the default session alone. See :meth:`Session.score`.
        """
        with Session(self.engine, self.engine.session()) as scratch:
            return scratch.score(tokens, progress=progress)

    def score_many(self, prompts: Sequence[TokenIds], *, progress: Progress | None = None) -> list[Logits]:
        """Score many prompts, computing what they share only once.

        A common beginning, such as a question before its possible answers, is found whatever the order of the
        prompts. Leaves the default session alone.

        Parameters
        ----------
        prompts
            Token ids of each, at least two.
        progress
            Called after each prompt with the number of prompts done and the number in all. An exception in it
            stops the work.

        Returns
        -------
        list of numpy.ndarray
            For each prompt what :meth:`score` returns for it: float32, ``[n - 1]``.

        Raises
        ------
        ValueError, TypeError, ContextOverflowError
            As in :meth:`score`; the message names the prompt. Nothing was computed.
        """
        engine = self.engine
        limit = engine.max_context + 1  # the last token is only predicted
        return score_many(
            engine, check_prompts(prompts, engine.config.vocab_size, least=2, limit=limit), progress
        )

    def embed(
        self,
        texts: Iterable[str],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        pooling: Literal["none", "mean", "cls", "last"] | None = None,
        instruction: str | None = None,
        truncate: Literal["error", "end"] | str = "error",
        unicode: Literal["NFC"] | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Turn texts into vectors whose products say how near the texts are in meaning.

        Texts go through the model together, and the same text is computed once. What a text gets does not
        depend on the others: on the CPU bit for bit. The default session does not change, and no K and V
        is kept.

        Parameters
        ----------
        texts
            Any number. The tokens that begin and end texts are added as the file's tokenizer requires.
        normalize
            Divide vectors by their length.
        dimensions
            Keep so many of the first values, as models trained with Matryoshka losses allow; the length
            is then that of what is kept.
        pooling
            How the hidden states of a text become one vector; None selects the pooling of the file
            (``{arch}.pooling_type``). ``"last"`` and ``"cls"`` take the state of the last and of the
            first token, ``"mean"`` the mean of all, ``"none"`` returns all of them, after the projection of
            a model for late interaction.
        instruction
            Prompt of each text. ``"query"`` and ``"document"`` (or ``"passage"``) select the prompts for
            these: those of the file, which conversion takes from the folder of a model, or those of the
            model's card, if it is known here (``tasks.PROMPTS``). With pooling ``"none"``, ``"query"`` also
            expands queries if the file's model does (ColBERT). Other names of the file or card, such as
            ``"clustering"``, work in the same way. A text with ``{text}`` in it is the complete form. Any
            other text is the task: it is put into the form of the model's card if the card has one for
            tasks, and otherwise before each text. None selects the default prompt of the file; most files
            have none, and nothing is added.
        truncate
            ``"error"``: a text that does not fit the context is an error. ``"end"``: it loses its end, but
            for the token that ends texts and for what the instruction puts after it, and a ``UserWarning``
            counts and names such texts.
        unicode
            ``"NFC"``: bring texts into this form first, as transformers does for the vocabularies of
            ``qwen2`` and ``qwen3``. None leaves them as they are, as llama.cpp does.
        progress
            Called with the number of distinct texts done and the number in all.

        Returns
        -------
        numpy.ndarray
            float32 ``[texts, dimensions]``; with pooling ``"none"`` a list of ``[tokens, dimensions]``. The
            vector of a text without tokens is zero; a ``UserWarning`` names such texts.

        Raises
        ------
        TypeError, ValueError
            A text is not a string, or has lone surrogates; the message has its index. Or the pooling
            is not stated, or contradicts the file.
        ContextOverflowError
            A text has more tokens than the context holds; the message has its index. Nothing was computed.
        NumericalError, DeviceError, KVMemoryError
            While a text was computed; the message has its index.
        """
        from metal_prefill.tasks._embedding import embed

        return embed(
            self,
            texts,
            normalize=normalize,
            dimensions=dimensions,
            pooling=pooling,
            instruction=instruction,
            truncate=truncate,
            unicode=unicode,
            progress=progress,
        )

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        template: str | None = None,
        how: Literal["late"] | None = None,
        truncate: Literal["error", "end"] | str = "error",
        unicode: Literal["NFC"] | None = None,
    ) -> list[Ranked]:
        """Order documents by how well they answer a query.

        An encoder with a classification head (a cross-encoder) reads the query and a document as a pair. Its
        score is the sigmoid of its output, as in sentence-transformers; llama.cpp returns the output itself.
        Other files with a classification head read a template; a single output is the score. A generative
        model is asked for "yes" or "no", and only these two rows of its head are computed. What the prompts
        have in common, such as the query, is computed once.

        Parameters
        ----------
        query, documents
            Texts. Control tokens that they spell are text.
        top_n
            Return only so many of the best.
        instruction
            The task, where the template has a place for it; by default that of the model's card, web search.
            With late interaction, the prompt of the query, as in :meth:`embed`; by default ``"query"``, if
            prompts are known, and documents have the prompt ``"document"``.
        template
            Text with ``{query}`` and ``{document}``; by default ``tokenizer.chat_template.rerank`` of the
            file, or that of the card of Qwen3-Reranker. Encoders take none.
        how
            ``"late"``: late interaction. Query and documents go through the model separately, and the score
            is the sum of the largest similarity of each token of the query to any token of the document
            (MaxSim). This is the default for files that project each token (``dense_2.weight`` without
            pooling).
        truncate
            ``"error"``: a pair that does not fit the context is an error. ``"end"``: its document loses its
            end, and a ``UserWarning`` counts and names such documents. A cross-encoder cuts the longer of
            the two texts first, and both once they have the same length, as sentence-transformers does.
            Other models cut the query only if it exceeds the length to which they expand queries.
        unicode
            See :meth:`embed`.

        Returns
        -------
        list of Ranked
            The index of each document, its score and its text, the highest score first.

        Raises
        ------
        TypeError, ValueError, ContextOverflowError
            A document is not a string, cannot be encoded, has a prompt without tokens or does not fit; the
            message has its index. Or there is no template, the model is not a reranker, or an option is not
            one of this kind of model.
        """
        from metal_prefill.tasks._reranking import rerank

        return rerank(
            self,
            query,
            documents,
            top_n=top_n,
            instruction=instruction,
            template=template,
            how=how,
            truncate=truncate,
            unicode=unicode,
        )

    def classify(
        self,
        texts: Iterable[str | tuple[str, str]],
        labels: Sequence[str] | None = None,
        template: str | None = None,
        *,
        normalize_length: bool = True,
        calibrate: bool = False,
        truncate: Literal["error", "end"] | str = "error",
        unicode: Literal["NFC"] | None = None,
    ) -> Classification:
        """Find which of some labels fits each text.

        Parameters
        ----------
        texts
            Any number. An encoder also takes pairs of texts, such as a premise and a hypothesis.
        labels
            Texts; the model predicts how likely each is to follow. None selects the classes of the file's
            classification head. Their probabilities are the softmax of its outputs, or the sigmoid of each
            if the file requires that (``{arch}.classifier.activation``) or there is only one output.
        template
            Text with ``{text}``, and ``{label}`` at its end.
        normalize_length
            Compare log probabilities per token of a label, so that long labels are not at a disadvantage.
        calibrate
            Divide by the probability that a label has after texts without content (arXiv:2102.09690).
        truncate
            ``"error"``: a text that does not fit the context is an error. ``"end"``: it loses its end, and
            a ``UserWarning`` counts and names such texts. What the template puts after it is kept.
        unicode
            See :meth:`embed`.

        Returns
        -------
        Classification
            Names, probabilities and log likelihoods; ``best`` has the most probable label of each text.

        Raises
        ------
        TypeError, ValueError, ContextOverflowError
            A text is not a string, cannot be encoded, has no tokens (which a classification head needs) or
            does not fit; the message has its index. Or there is neither a list of labels nor a
            classification head.
        """
        from metal_prefill.tasks._classification import classify

        return classify(
            self,
            texts,
            labels,
            template=template,
            normalize_length=normalize_length,
            calibrate=calibrate,
            truncate=truncate,
            unicode=unicode,
        )

    def label_tokens(
        self,
        texts: Iterable[str],
        *,
        strategy: Literal["none", "simple", "first", "average", "max"] | str = "simple",
        ignore: Sequence[str] = ("O",),
        truncate: Literal["error", "end"] | str = "error",
        progress: Progress | None = None,
    ) -> list[list[Entity]]:
        """Label parts of texts, such as names, with a model for token classification.

        Adjacent tokens with the same label are one entity. In BIO tags, ``B-`` begins another one.

        Parameters
        ----------
        texts
            Any number.
        strategy
            How tokens become entities, named as in the pipelines of transformers. ``"simple"`` gives each
            token its most probable label. ``"first"``, ``"average"`` and ``"max"`` give all tokens of a word
            one label: that of the first token, of the mean of their probabilities, or of the most certain
            token. ``"none"`` returns each token with its tag.
        ignore
            Labels that are left out.
        truncate
            ``"error"``: a text that does not fit the context is an error. ``"end"``: it loses its end, and
            a ``UserWarning`` counts and names such texts.
        progress
            Called with the number of texts done and the number in all.

        Returns
        -------
        list of list of Entity
            The entities of each text in their order, with label, score and position in characters.

        Raises
        ------
        TypeError, ValueError, ContextOverflowError
            A text is not a string, has lone surrogates or does not fit; the message has its index. Or the
            file has no labels for tokens.
        """
        from metal_prefill.tasks._token_labels import label_tokens

        return label_tokens(
            self, texts, strategy=strategy, ignore=ignore, truncate=truncate, progress=progress
        )
