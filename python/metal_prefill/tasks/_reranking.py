"""Ranks of documents by their relevance to a query, from the score of each pair."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill._support.arguments import integer
from metal_prefill.engine import Engine, EngineOwner
from metal_prefill.errors import GGUFError
from metal_prefill.files._gguf_file import dequantized
from metal_prefill.tasks._embedding import DEFAULT_RULES, EncodedText, check_length, encode_text, encode_texts
from metal_prefill.tasks._late_interaction import late_scores
from metal_prefill.tasks._pairs import encode_pair, encode_part
from metal_prefill.tasks._pooled_head import logits_of, sigmoid
from metal_prefill.tasks._prompt_rules import PromptRules, cut_message, errors_of, numbered, shortened
from metal_prefill.tasks._prompts import has_prompts, prompt_form
from metal_prefill.tasks._text_passes import Ids, TextPasses, pooled_states
from metal_prefill.tasks._text_roles import document_role, query_role

TEMPLATE_KEY = "tokenizer.chat_template.rerank"

# As the card of Qwen3-Reranker defines it, for files that do not carry it.
TEMPLATES = {
    "qwen3": "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
}
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS = ("yes", "no")
CUT_QUERY = "the query is longer than those of its model and lost its end"
CUT_WITH_DOCUMENT = "the query lost its end, as it does not fit the context together with each document"


@dataclass(frozen=True)
class Ranked:
    """A document and its score.

    Attributes
    ----------
    index : int
        Index of the document in `documents`.
    score : float
        The probability of "yes"; for a classification head with one output, that output or its sigmoid; for
        late interaction, the sum of similarities.
    document : str
    """

    index: int
    score: float
    document: str


class Options(NamedTuple):
    """Options of how a query and a document are scored; see :meth:`metal_prefill.Model.rerank`."""

    instruction: str | None = None
    template: str | None = None
    how: str | None = None
    rules: PromptRules = DEFAULT_RULES


@dataclass(frozen=True)
class Ranking:
    """Documents to rank, in tokens.

    Attributes
    ----------
    prompts : list of int32 [n]
        Prompt of each document: with the query, or for late interaction alone.
    cut : list of int
        Indices of documents that lost their ends.
    limit : int
        Maximum number of tokens of a prompt.
    query : EncodedText or None
        The query, for late interaction.
    query_cut : bool
        Whether the query lost its end in any prompt.
    """

    documents: Sequence[str]
    prompts: list[Ids]
    cut: list[int]
    limit: int
    query: EncodedText | None = None
    query_cut: bool = False

    @property
    def cut_texts(self) -> int:
        """Number of texts that lost their ends."""
        return len(self.cut) + self.query_cut

    def notes(self) -> list[str]:
        """Return messages about the texts that lost their ends."""
        notes = [CUT_QUERY if self.query is not None else CUT_WITH_DOCUMENT] if self.query_cut else []
        if self.cut:
            notes.append(cut_message(self.cut, len(self.prompts), self.limit, "document"))
        return notes

    def ranked(self, passes: TextPasses, top_n: int | None) -> list[Ranked]:
        """Order the documents by their scores."""
        if not self.prompts:
            return []
        items = [Ranked(i, score, self.documents[i]) for i, score in enumerate(self._scores(passes))]
        items.sort(key=lambda item: -item.score)  # stable: of equal scores, the earlier document is first
        return items[:top_n]

    def _scores(self, passes: TextPasses) -> list[float]:
        if self.query is not None:
            return late_scores(passes, self.query, self.prompts)
        return scores_of(passes, self.prompts)


def rerank(
    model: EngineOwner,
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
        search. With late interaction, the prompt of the query, as in :meth:`Model.embed`; if prompts are
        known, the default is ``"query"``, and documents have the prompt ``"document"``.
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
        See :meth:`Model.embed`.

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
    if top_n is not None:
        integer("top_n", top_n, 1)
    engine, rules = model.engine, PromptRules(truncate, unicode).checked()
    ranking = encode_documents(engine, query, documents, Options(instruction, template, how, rules))
    for note in ranking.notes():
        warnings.warn(note, stacklevel=2)
    return ranking.ranked(TextPasses(engine), top_n)


def encode_documents(engine: Engine, query: str, documents: Sequence[str], options: Options) -> Ranking:
    """Return the prompts of the documents.

    For parameters and errors see :meth:`metal_prefill.Model.rerank`.
    """
    if isinstance(documents, (str, bytes)):
        raise TypeError(f"documents must be a sequence of strings, got one {type(documents).__name__}")
    if not isinstance(query, str):
        raise TypeError(f"query must be a string, got {type(query).__name__}")
    for i, document in enumerate(documents):
        if not isinstance(document, str):
            raise TypeError(f"document {i} must be a string, got {type(document).__name__}")
    encode = {"late": _encode_late, "pair": _encode_pairs, "template": _encode_templates}
    return encode[kind_of(engine, options)](engine, query, documents, options)


def kind_of(engine: Engine, options: Options) -> str:
    """Return how a model scores documents: "late", "pair" or "template".

    Raises
    ------
    ValueError
        The options do not fit the model, or the model does not rank documents.
    """
    if options.how not in (None, "late"):
        raise ValueError(f"how must be 'late' or None, got {options.how!r}")
    head, name = engine.head, engine.path.name
    if options.how == "late" or (head.per_token and not head.labels):
        if head.labels or head.pooling == "rank":
            raise ValueError(f"{name} has a classification head, which scores pairs: leave how='late' out")
        kind = "late"
    elif engine.config.has_head:
        return "template"
    else:
        if not head.labels:
            raise ValueError(
                f"{name} is an encoder without a classification head: it does not rank pairs of texts; "
                "compare vectors of embed, or select late interaction with how='late'"
            )
        check_scores(engine)
        kind = "pair"
    if options.template is not None:
        raise ValueError(f"template is not supported: {name} does not read query and document as one text")
    if kind == "pair" and options.instruction is not None:
        raise ValueError(f"instruction is not supported: {name} has no place for it between two texts")
    return kind


def _encode_late(engine: Engine, query: str, documents: Sequence[str], options: Options) -> Ranking:
    known = has_prompts(engine)
    asked = options.instruction if options.instruction is not None else "query" if known else None
    role = query_role(engine)
    has_limit = role.expansion is not None or engine.lengths.query is not None
    rules = options.rules if has_limit else options.rules._replace(truncate="error")
    encoded = encode_text(engine, query, "the query", prompt_form(engine, asked), rules, role)
    if not len(encoded.ids):
        raise ValueError("the query has no tokens")
    form = prompt_form(engine, "document" if known else None)
    role = document_role(engine)
    ranking = Ranking(documents, [], [], role.limit, encoded, encoded.cut)
    texts = encode_texts(engine, documents, form, options.rules, role, "document")
    cut = frozenset(texts.cut)
    for i, ids in enumerate(texts.prompts):
        _add(ranking, ids, i in cut)
    return ranking


def _encode_pairs(engine: Engine, query: str, documents: Sequence[str], options: Options) -> Ranking:
    rules = options.rules
    first = encode_part(engine, query, "the query", rules)
    parts = engine.tokenizer.encode_all(map(rules.normalized, documents))
    pairs = []
    for i, second in enumerate(numbered(parts, "document")):
        pairs.append(encode_pair(engine, first, second, f"document {i}", rules))
    query_cut = any(pair.first_cut for pair in pairs)
    ranking = Ranking(documents, [], [], engine.max_context, query_cut=query_cut)
    for pair in pairs:
        _add(ranking, pair.ids, pair.second_cut)
    return ranking


def _encode_templates(engine: Engine, query: str, documents: Sequence[str], options: Options) -> Ranking:
    form = options.template if options.template is not None else template_of(engine)
    if "{query}" not in form or "{document}" not in form:
        raise ValueError(f"a template for reranking has {{query}} and {{document}}, got {form[:60]!r}")
    instruction = INSTRUCTION if options.instruction is None else options.instruction
    values = {"query": query, "instruction": instruction}

    def encode(document: str) -> Ids:
        return encode_template(engine, form, {**values, "document": document}, options.rules)

    ranking = Ranking(documents, [], [], engine.max_context)
    for i, document in enumerate(documents):
        with errors_of(f"document {i}"):
            ids = encode(document)
        cut = options.rules.truncate == "end" and len(ids) > engine.max_context
        if cut:
            kept = shortened(engine.tokenizer, document, lambda text: len(encode(text)) - engine.max_context)
            ids = encode(kept)
        check_length(engine, len(ids), f"document {i}")
        if i == 0:
            _scorer(engine)  # raises an error before further documents are encoded
        _add(ranking, ids, cut)
    return ranking


def _add(ranking: Ranking, ids: Ids, cut: bool) -> None:
    i = len(ranking.prompts)
    if not len(ids):
        raise ValueError(f"document {i}: its prompt has no tokens")
    if cut:
        ranking.cut.append(i)
    ranking.prompts.append(ids)


def scores_of(passes: TextPasses, prompts: Sequence[Ids]) -> list[float]:
    """Return the score of each prompt, a query with a document; a shared prefix is computed once."""
    score = _scorer(passes.engine)
    names = [f"document {i}" for i in range(len(prompts))]
    return [score(state) for state in pooled_states(passes, passes.engine.head.state, prompts, names)]


def template_of(engine: Engine) -> str:
    """Return the template of the file, or that of its architecture; raises ValueError or GGUFError."""
    template = engine.gguf.metadata.get(TEMPLATE_KEY)
    if isinstance(template, str):
        return template
    if template is not None:
        kind = engine.gguf.metadata.type_name(TEMPLATE_KEY)
        raise GGUFError(f"{engine.path}: {TEMPLATE_KEY} has type {kind}, expected string")
    if engine.config.architecture in TEMPLATES:
        return TEMPLATES[engine.config.architecture]
    raise ValueError(
        f"{engine.path.name} has no {TEMPLATE_KEY}, and no template is known for "
        f"{engine.config.architecture}: a template is required"
    )


def encode_template(
    engine: Engine, template: str, values: dict[str, str], rules: PromptRules = DEFAULT_RULES
) -> Ids:
    """Turn a template with its values into tokens.

    Control tokens are those that the template spells, never what a value spells like one.
    """
    tokenizer = engine.tokenizer
    pattern = re.compile("|".join(re.escape(f"{{{name}}}") for name in values))
    ids = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    ids += tokenizer.encode_pieces(
        piece
        if isinstance(piece, int)
        else rules.normalized(pattern.sub(lambda match: values[match[0][1:-1]], piece))
        for piece in tokenizer.split(template, parse_special=True)
    )
    return np.array(ids, np.int32)


def check_scores(engine: Engine) -> None:
    """Raise ValueError if the classification head has more classes than a score comes from."""
    labels = engine.head.labels
    if len(labels) > 2:
        raise ValueError(
            f"{engine.path.name} has a head of {len(labels)} classes ({', '.join(labels[:5])}): "
            "reranking takes one or two; use classify"
        )


def _scorer(engine: Engine) -> _Scorer:
    if not engine.head.labels:
        return _Answers(engine)
    check_scores(engine)
    return _Classes(engine)


class _Scorer:
    def __call__(self, state: npt.NDArray[np.float32]) -> float:
        raise NotImplementedError


class _Classes(_Scorer):
    """By a classification head: of two classes the probability of "yes", or of the first."""

    def __init__(self, engine: Engine) -> None:
        self._head = engine.head
        labels = self._head.labels
        self._yes = labels.index(ANSWERS[0]) if ANSWERS[0] in labels else 0

    def __call__(self, state: npt.NDArray[np.float32]) -> float:
        logits = logits_of(self._head, state).astype(np.float64)
        if len(logits) == 1:
            return float(sigmoid(logits)[0] if self._head.scores == "sigmoid" else logits[0])
        return float(sigmoid(logits[self._yes] - logits[1 - self._yes]))


class _Answers(_Scorer):
    """By the two rows of the output projection whose tokens are the answers."""

    def __init__(self, engine: Engine) -> None:
        tensors = engine.gguf.tensors
        tensor = tensors.get("output.weight", tensors["token_embd.weight"])
        rows = []
        for answer in ANSWERS:
            ids = engine.tokenizer.encode(answer, add_bos=False)
            if len(ids) != 1:
                raise ValueError(
                    f"{engine.path.name} has no classification head, and {answer!r} is {len(ids)} tokens: "
                    "it is not a reranker"
                )
            rows.append(dequantized(engine.gguf, tensor, slice(ids[0], ids[0] + 1))[0])
        self._yes, self._no = (row.astype(np.float64) for row in rows)

    def __call__(self, state: npt.NDArray[np.float32]) -> float:
        return float(sigmoid((self._yes - self._no) @ state.astype(np.float64)))
