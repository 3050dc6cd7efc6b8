"""Methods of a model for embeddings, ranks, labels and log probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from metal_prefill._support.arguments import Logits, Progress, TokenIds
from metal_prefill.engine import Engine
from metal_prefill.session import Session
from metal_prefill.tasks._scoring import check_prompts, score_many

if TYPE_CHECKING:
    from metal_prefill.tasks._classification import Classification
    from metal_prefill.tasks._reranking import Ranked
    from metal_prefill.tasks._token_labels import Entity


class TaskMethods:
    """Tasks that need prefill only, over an engine."""

    @property
    def engine(self) -> Engine:
        """The engine handle."""
        raise NotImplementedError

    def score(self, tokens: TokenIds, *, progress: Progress | None = None) -> Logits:
        """Return the log probability of each token, given the tokens before it, from an empty context.

        The default session does not change. See :meth:`Session.score`.
        """
        with Session(self.engine, self.engine.session()) as scratch:
            return scratch.score(tokens, progress=progress)

    def score_many(self, prompts: Sequence[TokenIds], *, progress: Progress | None = None) -> list[Logits]:
        """Return the log probabilities of many prompts' tokens, and compute common prefixes once.

        Prompts with a common prefix, such as a question before its possible answers, may be in any order. The
        default session does not change.

        Parameters
        ----------
        prompts
            Token ids of each prompt, at least two.
        progress
            Called after each prompt with the number of prompts done and their total. An exception that it
            raises stops the call.

        Returns
        -------
        list of numpy.ndarray
            Result of :meth:`score` for each prompt: float32, ``[n - 1]``.

        Raises
        ------
        ValueError, TypeError, ContextOverflowError
            As in :meth:`score`, before any prompt is computed; the message has the prompt's index.
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
        """Compute embeddings: vectors whose inner products measure the similarity of texts.

        Texts are computed in batches, equal ones once. The vector of a text does not depend on the other
        texts, on the CPU bit for bit. The default session does not change.

        Parameters
        ----------
        texts
            Any number of texts. The tokenizer of the file adds tokens at their ends.
        normalize
            Divide vectors by their Euclidean norm.
        dimensions
            Number of first values to keep, as models trained with Matryoshka losses allow. Vectors are
            normalized afterwards.
        pooling
            Reduction of a text's hidden states to one vector; None selects that of the file
            (``{arch}.pooling_type``). ``"last"`` and ``"cls"`` select the state of the last and of the first
            token, ``"mean"`` computes the mean of all, ``"none"`` returns all of them, after the projection
            of a model for late interaction.
        instruction
            Prompt of each text. None selects the default prompt of the file; most files have none.

            ``"query"`` and ``"document"`` (or ``"passage"``) select prompts of the file, which conversion
            takes from the model's folder, or those of the model's card, if they are in ``tasks.PROMPTS``.
            Other names of the file or card, such as ``"clustering"``, work in the same way. With pooling
            ``"none"``, ``"query"`` also expands queries if the model requires it (ColBERT).

            A string that contains ``{text}`` is a template. Any other string is a description of the task. It
            is inserted into the template that the model's card has for tasks, and otherwise added before each
            text.
        truncate
            ``"error"``: a text longer than the context is an error. ``"end"``: its end is cut off, except
            for the end-of-text token and the part of the instruction after the text, and a ``UserWarning``
            counts and names such texts.
        unicode
            ``"NFC"``: normalize texts first, as transformers does for ``qwen2`` and ``qwen3``. None does not,
            like llama.cpp.
        progress
            Called with the number of distinct texts done and their total.

        Returns
        -------
        numpy.ndarray
            float32 ``[texts, dimensions]``; with pooling ``"none"``, a list of arrays ``[tokens,
            dimensions]``. The vector of a text without tokens is zero; a ``UserWarning`` names such texts.

        Raises
        ------
        TypeError, ValueError
            A text is not a string, or has lone surrogates; the message has its index. Or neither the file nor
            the call sets a pooling, or the two contradict each other.
        ContextOverflowError
            A text has more tokens than the context; the message has its index. Nothing was computed.
        NumericalError, DeviceError, KVMemoryError
            Computing a text failed; the message has its index.
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
        """Order documents by their relevance to a query.

        An encoder with a classification head (a cross-encoder) reads the query and a document as a pair. The
        score is the sigmoid of its output, as in sentence-transformers; llama.cpp returns the output itself.
        Other files with a classification head read a template; a single output is the score. The score of a
        generative model is its probability of "yes", relative to "no", as the next token; only these two rows
        of its head are computed. Common prefixes of the prompts, such as the query, are computed once.

        Parameters
        ----------
        query, documents
            Texts. If they spell control tokens, these are encoded as text.
        top_n
            Number of best documents to return; None returns all.
        instruction
            Description of the task, for templates that contain one; by default that of the model's card, web
            search. With late interaction, the prompt of the query, as in :meth:`embed`; if prompts are known,
            the default is ``"query"``, and documents have the prompt ``"document"``.
        template
            Text with ``{query}`` and ``{document}``; by default ``tokenizer.chat_template.rerank`` of the
            file, or that of the card of Qwen3-Reranker. Encoders do not support templates.
        how
            ``"late"``: late interaction. Query and documents go through the model separately, and the score
            is the sum, over the tokens of the query, of the largest similarity to any token of the document
            (MaxSim). This is the default for files that project each token (``dense_2.weight`` without
            pooling).
        truncate
            ``"error"``: a pair longer than the context is an error. ``"end"``: the end of its document is cut
            off, and a ``UserWarning`` counts and names such documents. A cross-encoder cuts the longer of the
            two texts first, and both once they have the same length, as in sentence-transformers. Other
            models cut the query only if it exceeds the length to which they expand queries.
        unicode
            See :meth:`embed`.

        Returns
        -------
        list of Ranked
            Index, score and text of each document, highest score first.

        Raises
        ------
        TypeError, ValueError, ContextOverflowError
            A document is not a string, cannot be encoded, has a prompt without tokens or does not fit; the
            message has its index. Or there is no template, the model is not a reranker, or this kind of model
            does not support an option.
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
        """Compute the probability of each label for each text.

        Parameters
        ----------
        texts
            Any number of texts. Encoders also accept pairs of texts, such as a premise and a hypothesis.
        labels
            Labels in words, whose probability to follow the text a generative model predicts. None selects
            the classes of the file's classification head. Their probabilities are the softmax of its outputs,
            or the sigmoid of each if the file requires it (``{arch}.classifier.activation``) or there is only
            one output.
        template
            Text that contains ``{text}`` and ends with ``{label}``, used with `labels`; by default
            the text, a blank line, ``Label:`` and the label.
        normalize_length
            Compare log probabilities per token of a label, so that long labels are not at a disadvantage.
        calibrate
            Divide by the probability of a label after texts without content (arXiv:2102.09690).
        truncate
            ``"error"``: a text longer than the context is an error. ``"end"``: its end is cut off, and a
            ``UserWarning`` counts and names such texts. The part of the template after the text is kept.
        unicode
            See :meth:`embed`.

        Returns
        -------
        Classification
            Labels, probabilities and log likelihoods; ``best`` has the most probable label of each text.

        Raises
        ------
        TypeError, ValueError, ContextOverflowError
            A text is not a string, cannot be encoded, has no tokens (which a classification head needs) or
            does not fit; the message has its index. Or there are neither labels nor a classification head.
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

        Adjacent tokens with the same label are one entity. In BIO tags, ``B-`` starts a new one.

        Parameters
        ----------
        texts
            Any number of texts.
        strategy
            Aggregation of tokens to entities, as in the pipelines of transformers. ``"simple"`` assigns each
            token its most probable label. ``"first"``, ``"average"`` and ``"max"`` assign all tokens of a
            word one label: that of the first token, of the mean of their probabilities, or of the most
            certain token. ``"none"`` returns each token with its tag.
        ignore
            Labels to omit from the result.
        truncate
            ``"error"``: a text longer than the context is an error. ``"end"``: its end is cut off, and a
            ``UserWarning`` counts and names such texts.
        progress
            Called with the number of texts done and their total.

        Returns
        -------
        list of list of Entity
            Entities of each text in order, with label, score and position in characters.

        Raises
        ------
        TypeError, ValueError, ContextOverflowError
            A text is not a string, has lone surrogates or does not fit; the message has its index. Or the
            file has no classification head for tokens.
        """
        from metal_prefill.tasks._token_labels import label_tokens

        return label_tokens(
            self, texts, strategy=strategy, ignore=ignore, truncate=truncate, progress=progress
        )
