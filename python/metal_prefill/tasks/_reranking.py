"""Ranks of documents by their relevance to a query, from the score of each pair."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill._support.arguments import integer
from metal_prefill.engine import Engine, EngineOwner
from metal_prefill.files._gguf_file import dequantized
from metal_prefill.files._metadata_keys import RERANK_TEMPLATE_KEY
from metal_prefill.tasks._embedding import (
    DEFAULT_RULES,
    EncodedText,
    check_length,
    checked_texts,
    encode_texts,
    encode_tokens,
    vector_blocks,
)
from metal_prefill.tasks._pairs import EncodedPair, encode_pair
from metal_prefill.tasks._pooled_head import logits_of, sigmoid
from metal_prefill.tasks._prompts import (
    PromptRules,
    card_of,
    cut_notes,
    document_role,
    errors_of,
    numbered,
    prompt_form,
    query_role,
    shortened,
    warn,
)
from metal_prefill.tasks._similarity import maxsim
from metal_prefill.tasks._text_passes import Ids, TextPasses, finite, pooled_states

# From the card of Qwen3-Reranker, for files without a template.
TEMPLATES = {
    "qwen3": "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
}
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS = ("yes", "no")
Scores = npt.NDArray[np.float64]
Logit: TypeAlias = Callable[[npt.NDArray[np.float32]], float]  # of a pooled state
# Function of prompts that returns their scores, and the logits by which they are ordered.
ScoresOf: TypeAlias = Callable[[TextPasses, Sequence[Ids]], tuple[Scores, Scores]]
AFFIRMATIVE = (ANSWERS[0], "true", "positive")
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
        The probability of "yes" or of a class; for a classification head with one output, that output or its
        sigmoid; for late interaction, the sum of similarities.
    document : str
    """

    index: int
    score: float
    document: str


class Options(NamedTuple):
    """Options for scoring a query and a document; see :meth:`metal_prefill.Model.rerank`."""

    instruction: str | None = None
    template: str | None = None
    how: str | None = None
    rules: PromptRules = DEFAULT_RULES
    label: str | None = None
    most_tokens: int | None = None  # maximum of a document; later ones are omitted


class Ranking(NamedTuple):
    """Documents to rank, in tokens."""

    documents: Sequence[str]
    prompts: list[Ids]  # of each document: with the query, or for late interaction alone
    cut_texts: int  # number of texts that lost their ends
    notes: list[str]  # messages about these
    score: ScoresOf

    def ranked(self, passes: TextPasses, top_n: int | None) -> list[Ranked]:
        scores, logits = self.score(passes, self.prompts)
        # Stable: of equal logits, the earlier document is first.
        order = np.argsort(-logits, kind="stable")[:top_n].tolist()
        return [Ranked(i, float(scores[i]), self.documents[i]) for i in order]


def rerank(
    model: EngineOwner,
    query: str,
    documents: Sequence[str],
    top_n: int | None = None,
    *,
    instruction: str | None = None,
    template: str | None = None,
    how: Literal["late"] | None = None,
    label: str | None = None,
    truncate: Literal["error", "end"] | str = "error",
    unicode: Literal["NFC"] | None = None,
    split_special_tokens: bool | None = None,
) -> list[Ranked]:
    """Order documents by their relevance to a query.

    An encoder with a classification head (a cross-encoder) reads the query and a document as a pair. The
    score is the sigmoid of its output, as in sentence-transformers; llama.cpp returns the output itself.
    Other files with a classification head read a template; a single output is the score. Of several classes,
    the score is the probability of one. The score of a
    generative model is its probability of "yes", relative to "no", as the next token; only these two rows
    of its head are computed. Common prefixes of the prompts, such as the query, are computed once.

    Parameters
    ----------
    query, documents
        Texts. Documents are in any sequence: a list, a generator, an array or a column of a table.
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
    label
        Class of the classification head whose probability is the score. By default, of two classes the one
        that affirms (``"yes"``, ``"true"``, ``"positive"``, ``"relevant"`` next to ``"not_relevant"``), or
        the second if they have no names. Otherwise it is required.
    truncate
        ``"error"``: a pair longer than the context is an error. ``"end"``: the end of its document is cut
        off, and a ``UserWarning`` counts and names such documents. A cross-encoder cuts the longer of the
        two texts first, and both once they have the same length, as in sentence-transformers. Other
        models cut the query only if it exceeds the length to which they expand queries.
    unicode, split_special_tokens
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
    engine, rules = model.engine, PromptRules(truncate, unicode, split_special_tokens).checked()
    ranking = encode_documents(engine, query, documents, Options(instruction, template, how, rules, label))
    warn(ranking.notes)
    return ranking.ranked(TextPasses(engine), top_n)


def encode_documents(engine: Engine, query: str, documents: Sequence[str], options: Options) -> Ranking:
    """Return the prompts of the documents.

    For parameters and errors see :meth:`metal_prefill.Model.rerank`.
    """
    if not isinstance(query, str):
        raise TypeError(f"query must be a string, got {type(query).__name__}")
    documents = checked_texts(documents, "document")
    kind = kind_of(engine, options)
    texts = documents
    if (count := options.most_tokens) is not None:
        spans = numbered(map(engine.tokenizer.encode_spans, documents), "document")
        texts = [
            text if len(tokens) <= count else text[: tokens[count].start]
            for text, tokens in zip(documents, spans, strict=True)
        ]
    score: ScoresOf
    if kind == "late":
        encoded, limit, score = _late_documents(engine, query, texts, options)
    else:
        encode = _pairs if kind == "pair" else _filled_templates
        encoded, limit = list(encode(engine, query, texts, options)), engine.max_context
        score = partial(scores_of, segments=[pair.segment for pair in encoded], label=options.label)
    for i, pair in enumerate(encoded):
        if not len(pair.ids):
            raise ValueError(f"document {i}: its prompt has no tokens")
    cut = [i for i, pair in enumerate(encoded) if pair.second_cut]
    query_cut = any(pair.first_cut for pair in encoded)
    notes = [CUT_QUERY if kind == "late" else CUT_WITH_DOCUMENT] if query_cut else []
    notes += cut_notes(cut, len(encoded), limit, "document")
    return Ranking(documents, [pair.ids for pair in encoded], len(cut) + query_cut, notes, score)


def kind_of(engine: Engine, options: Options) -> str:
    """Return how a model scores documents: "late", "pair" or "template"."""
    if options.how not in (None, "late"):
        raise ValueError(f"how must be 'late' or None, got {options.how!r}")
    head, name = engine.head, engine.name
    if options.how == "late" or (head.per_token and not head.labels):
        if head.labels or head.pooling == "rank":
            raise ValueError(f"{name} has a classification head, which scores pairs: leave how='late' out")
        if options.label is not None:
            raise ValueError(f"label is {options.label!r}, but late interaction has no classes")
        kind = "late"
    elif engine.config.has_head:
        kind = "template"
    else:
        if not head.labels:
            raise ValueError(
                f"{name} is an encoder without a classification head: it does not rank pairs of texts; "
                "compare vectors of `embed`, or select late interaction with how='late'"
            )
        kind = "pair"
    if kind != "late" and head.labels:
        scored_class(engine, options.label)
    if kind == "template":
        return kind
    if options.template is not None:
        raise ValueError(f"template is not supported: {name} does not read query and document as one text")
    if kind == "pair" and options.instruction is not None:
        raise ValueError(f"instruction is not supported: {name} has no place for it between two texts")
    return kind


def check_ranks(engine: Engine, options: Options) -> None:
    """Raise ValueError or GGUFError if the model does not rank documents in this way."""
    if kind_of(engine, options) == "template":
        template_of(engine)


def _late_documents(
    engine: Engine, query: str, documents: Sequence[str], options: Options
) -> tuple[list[EncodedPair], int, ScoresOf]:
    """Return documents in tokens, without the query, their limit, and the function of their scores."""
    known = bool(engine.prompts.by_name or card_of(engine))  # whether there are prompts of both kinds
    asked = _late_query(engine, query, options, "query" if known else None)
    role = document_role(engine, prompt_form(engine, "document" if known else None))
    texts = encode_texts(engine, documents, role, options.rules, "document")
    cut = frozenset(texts.cut)
    encoded = [EncodedPair(ids, len(ids), asked.cut, i in cut) for i, ids in enumerate(texts.prompts)]
    return encoded, role.limit, partial(_late_scores, query=asked, skipped=role.skipped)


def _late_query(engine: Engine, query: str, options: Options, default: str | None) -> EncodedText:
    form = prompt_form(engine, default if options.instruction is None else options.instruction)
    role = query_role(engine, form)
    has_limit = role.expansion is not None or engine.lengths.query is not None
    rules = options.rules if has_limit else options.rules._replace(truncate="error")
    with errors_of("the query"):
        tokens = form.tokens(engine.tokenizer, query, rules)
    encoded = encode_tokens(engine, tokens, query, "the query", role, rules)
    if not encoded.ids:
        raise ValueError("the query has no tokens")
    return encoded


def _pairs(engine: Engine, query: str, documents: Sequence[str], options: Options) -> Iterator[EncodedPair]:
    rules = options.rules
    tokenizer, parses = engine.tokenizer, rules.parses(engine.tokenizer)
    with errors_of("the query"):
        first = tokenizer.encode(rules.normalized(query), add_bos=False, parse_special=parses)
    parts = tokenizer.encode_all(map(rules.normalized, documents), parse_special=parses)
    for i, second in enumerate(numbered(parts, "document")):
        yield encode_pair(engine, first, second, f"document {i}", rules)


def _filled_templates(
    engine: Engine, query: str, documents: Sequence[str], options: Options
) -> Iterator[EncodedPair]:
    form = options.template if options.template is not None else template_of(engine)
    if "{query}" not in form or "{document}" not in form:
        raise ValueError(f"a template for reranking has {{query}} and {{document}}, got {form[:60]!r}")
    instruction = INSTRUCTION if options.instruction is None else options.instruction
    values = {"query": query, "instruction": instruction}
    _scorer(engine, options.label)  # raises an error before documents are encoded

    def encode(document: str) -> Ids:
        return encode_template(engine, form, {**values, "document": document}, options.rules)

    for i, document in enumerate(documents):
        with errors_of(f"document {i}"):
            ids = encode(document)
        cut = options.rules.truncate == "end" and len(ids) > engine.max_context
        if cut:
            kept = shortened(engine.tokenizer, document, lambda text: len(encode(text)) - engine.max_context)
            ids = encode(kept)
        check_length(engine, len(ids), f"document {i}")
        yield EncodedPair(ids, len(ids), False, cut)


def _late_scores(
    passes: TextPasses, prompts: Sequence[Ids], query: EncodedText, skipped: tuple[int, ...]
) -> tuple[Scores, Scores]:
    """Return the MaxSim score of each document, without the tokens that the model skips."""
    names = ["the query", *(f"document {i}" for i in range(len(prompts)))]
    expansions = [query.expansion, *(0 for _ in prompts)]
    every = [np.array(query.ids, np.int32), *prompts]
    blocks = vector_blocks(passes, "none", every, expansions, name_of=names.__getitem__)
    vectors = chain.from_iterable(blocks)
    asked = next(vectors)
    scores = maxsim(asked, (v[~np.isin(ids, skipped)] for ids, v in zip(prompts, vectors, strict=True)))
    return scores, scores


def scores_of(
    passes: TextPasses, prompts: Sequence[Ids], segments: Sequence[int] = (), label: str | None = None
) -> tuple[Scores, Scores]:
    """Return the score of each prompt, and the logits by which they are ordered.

    A shared prefix is computed once. The sigmoid of different logits above 37 is 1.
    """
    logit, has_sigmoid = _scorer(passes.engine, label)
    states = pooled_states(passes, passes.engine.head.state, prompts, segments, "document {}".format)
    logits = np.array([logit(state) for state in states])
    return sigmoid(logits) if has_sigmoid else logits, logits


def template_of(engine: Engine) -> str:
    """Return the template of the file, or that of its architecture; raises ValueError or GGUFError."""
    known = TEMPLATES.get(engine.config.architecture)
    template: str | None = engine.gguf.metadata.typed(RERANK_TEMPLATE_KEY, "string", default=known)
    if template is not None:
        return template
    raise ValueError(
        f"{engine.name} has no {RERANK_TEMPLATE_KEY}, and no template is known for "
        f"{engine.config.architecture}: pass `template`"
    )


def encode_template(
    engine: Engine, template: str, values: dict[str, str], rules: PromptRules = DEFAULT_RULES
) -> Ids:
    """Turn a template with its values into tokens.

    Control tokens that the template spells are recognized, those in values only if the rules require it.
    """
    tokenizer = engine.tokenizer
    pattern = re.compile("|".join(re.escape(f"{{{name}}}") for name in values))
    pieces = (
        piece
        if isinstance(piece, int)
        else rules.normalized(pattern.sub(lambda match: values[match[0][1:-1]], piece))
        for piece in tokenizer.split(template, parse_special=True)
    )
    ids = tokenizer.encode_pieces(pieces, parse_special=rules.parses(tokenizer))
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
    return np.array(ids, np.int32)


def scored_class(engine: Engine, label: str | None) -> int:
    """Return the index of the output of a classification head that determines the score.

    Without a label, it is that of an affirmative class, by convention the second of two.
    """
    labels = engine.head.labels
    listed = f"{engine.name} has a head of {len(labels)} classes ({', '.join(labels[:5])})"
    if label is not None:
        if not isinstance(label, str):
            raise TypeError(f"label must be a string, got {type(label).__name__}")
        if label not in labels or len(labels) == 1:
            raise ValueError(f"label is {label!r}, but {listed}")
        return labels.index(label)
    if len(labels) == 1:
        return 0
    if len(labels) == 2:
        names = list(map(str.casefold, labels))
        if [name[len(name.rstrip("0123456789")) :] for name in names] == ["0", "1"]:  # without names
            return 1
        for i, name in enumerate(names):
            if name in AFFIRMATIVE or names[1 - i].endswith(name):  # not_relevant, nicht relevant
                return i
    raise ValueError(f"{listed}: set `label` to the one whose probability ranks documents")


def _scorer(engine: Engine, label: str | None) -> tuple[Logit, bool]:
    """Return a function of the logit that orders documents, and whether the sigmoid of it is the score."""
    head = engine.head
    if not head.labels:
        if label is not None:
            raise ValueError(f"label is {label!r}, but {engine.name} has no classification head")
        return _answers(engine), True
    chosen = scored_class(engine, label)

    def logit(state: npt.NDArray[np.float32]) -> float:
        logits = logits_of(head, state).astype(np.float64)
        others = np.delete(logits, chosen)
        independent = head.scores == "sigmoid" or not len(others)
        return float(logits[chosen] - (0 if independent else np.logaddexp.reduce(others)))

    return logit, len(head.labels) > 1 or head.scores == "sigmoid"


def _answers(engine: Engine) -> Logit:
    """Score by the two rows of the output projection whose tokens are the answers."""
    tensors = engine.gguf.tensors
    tensor = tensors.get("output.weight", tensors["token_embd.weight"])
    rows = []
    for answer in ANSWERS:
        ids = engine.tokenizer.encode(answer, add_bos=False)
        if len(ids) != 1:
            raise ValueError(
                f"{engine.name} has no classification head, and {answer!r} is {len(ids)} tokens: "
                "it is not a reranker"
            )
        rows.append(dequantized(engine.gguf, tensor, slice(ids[0], ids[0] + 1))[0])
    difference = rows[0].astype(np.float64) - rows[1]

    def score(state: npt.NDArray[np.float32]) -> float:
        value = np.array([difference @ state.astype(np.float64)])
        return float(finite(value, "the difference of the answers' logits")[0])

    return score
