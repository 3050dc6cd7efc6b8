"""Documents in the order in which they answer a query, by the score that a model gives to each pair."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metal_prefill._engine import Engine, EngineOwner
from metal_prefill._support.arguments import integer
from metal_prefill.errors import GGUFError
from metal_prefill.files._pooled_head import dequantized
from metal_prefill.tasks._embedding import DEFAULT_RULES, check_length
from metal_prefill.tasks._prompt_rules import PromptRules, shortened, warn_of_cut
from metal_prefill.tasks._text_passes import TextPasses, last_states

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


@dataclass(frozen=True)
class Ranked:
    """A document and its score.

    Attributes
    ----------
    index : int
        Of the document in the list that was given.
    score : float
        The probability of "yes", or, of a classification head with one output, that output.
    document : str
    """

    index: int
    score: float
    document: str


def rerank(
    model: EngineOwner,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None = None,
    instruction: str | None = None,
    template: str | None = None,
    truncate: str = "error",
    unicode: str | None = None,
) -> list[Ranked]:
    """Order documents by how well they answer a query; see :meth:`metal_prefill.Model.rerank`."""
    if top_n is not None:
        integer("top_n", top_n, 1)
    engine, rules = model.engine, PromptRules(truncate, unicode).checked()
    prompts, cut = encode_documents(engine, query, documents, instruction, template, rules)
    warn_of_cut(cut, len(prompts), engine.max_context, "document")
    return rank_prompts(TextPasses(engine), prompts, documents, top_n)


def encode_documents(
    engine: Engine,
    query: str,
    documents: Sequence[str],
    instruction: str | None,
    template: str | None,
    rules: PromptRules,
) -> tuple[list[npt.NDArray[np.int32]], list[int]]:
    """Return the prompt of the query with each document, and the indices of documents that lost their ends.

    For parameters and errors see :meth:`metal_prefill.Model.rerank`.
    """
    if isinstance(documents, (str, bytes)):
        raise TypeError(f"documents must be a sequence of strings, got one {type(documents).__name__}")
    if not isinstance(query, str):
        raise TypeError(f"query must be a string, got {type(query).__name__}")
    form = template if template is not None else template_of(engine)
    if "{query}" not in form or "{document}" not in form:
        raise ValueError(f"a template for reranking has {{query}} and {{document}}, got {form[:60]!r}")
    values = {"query": query, "instruction": INSTRUCTION if instruction is None else instruction}

    def encode(document: str) -> npt.NDArray[np.int32]:
        return encode_template(engine, form, {**values, "document": document}, rules)

    prompts, cut = [], []
    for i, document in enumerate(documents):
        if not isinstance(document, str):
            raise TypeError(f"document {i} must be a string, got {type(document).__name__}")
        try:
            ids = encode(document)
        except ValueError as error:
            raise ValueError(f"document {i}: {error}") from None
        if rules.truncate == "end" and len(ids) > engine.max_context:
            kept = shortened(engine.tokenizer, document, lambda text: len(encode(text)) - engine.max_context)
            ids = encode(kept)
            cut.append(i)
        if not len(ids):
            raise ValueError(f"document {i}: its prompt has no tokens")
        check_length(engine, len(ids), f"document {i}")
        prompts.append(ids)
    return prompts, cut


def rank_prompts(
    passes: TextPasses,
    prompts: Sequence[npt.NDArray[np.int32]],
    documents: Sequence[str],
    top_n: int | None,
) -> list[Ranked]:
    """Order documents by the scores of their prompts."""
    if not prompts:
        return []
    ranked = [Ranked(i, score, documents[i]) for i, score in enumerate(scores_of(passes, prompts))]
    ranked.sort(key=lambda item: -item.score)  # stable: of equal scores, the earlier document is first
    return ranked[:top_n]


def scores_of(passes: TextPasses, prompts: Sequence[npt.NDArray[np.int32]]) -> list[float]:
    """Return the score of each prompt, a query with a document; what all share is computed once."""
    score = _scorer(passes.engine)
    names = [f"document {i}" for i in range(len(prompts))]
    return [score(state) for state in last_states(passes, prompts, names)]


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
        f"{engine.path.name} has no {TEMPLATE_KEY}, and none is known for {engine.config.architecture}: "
        "give template="
    )


def encode_template(
    engine: Engine, template: str, values: dict[str, str], rules: PromptRules = DEFAULT_RULES
) -> npt.NDArray[np.int32]:
    """Turn a template with its values into tokens.

    Control tokens are those that the template spells, never what a value spells like one.
    """
    tokenizer = engine.tokenizer
    pattern = re.compile("|".join(re.escape(f"{{{name}}}") for name in values))
    ids = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    for piece in tokenizer.split(template, parse_special=True):
        if isinstance(piece, int):
            ids.append(piece)
        else:
            text = pattern.sub(lambda match: values[match[0][1:-1]], piece)
            ids += tokenizer.encode(rules.normalized(text), add_bos=False)
    return np.array(ids, np.int32)


def _scorer(engine: Engine) -> _Scorer:
    head = engine.head
    if not head.labels:
        return _Answers(engine)
    if len(head.labels) > 2:
        raise ValueError(
            f"{engine.path.name} has a head of {len(head.labels)} classes ({', '.join(head.labels[:5])}): "
            "reranking takes one or two; use classify"
        )
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
        logits = self._head.logits_of(state).astype(np.float64)
        if len(logits) == 1:
            return float(logits[0])
        return float(1 / (1 + np.exp(logits[1 - self._yes] - logits[self._yes])))


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
        return float(1 / (1 + np.exp((self._no - self._yes) @ state.astype(np.float64))))
