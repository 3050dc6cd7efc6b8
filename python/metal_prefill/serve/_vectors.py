"""Endpoints for vectors, ranks and classes, computed in passes shared with other requests."""

from __future__ import annotations

import base64
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import Progress, token_array
from metal_prefill.engine import Engine
from metal_prefill.errors import GGUFError, KVMemoryError
from metal_prefill.generation._engine_loop import EngineLoop
from metal_prefill.serve._completions import prompts_of
from metal_prefill.serve._endpoint import Reply
from metal_prefill.serve._errors import RETRY, ApiError, missing, unsupported
from metal_prefill.serve._forms import EmbeddingForm, EmbedForm, PredictForm, RerankForm
from metal_prefill.serve._generation import MOST_ANSWER, MOST_ESCAPED
from metal_prefill.serve._service import Service
from metal_prefill.tasks._classification import encode_for_head, head_logits
from metal_prefill.tasks._embedding import (
    EncodedTexts,
    check_length,
    check_pooling,
    embed_encoded,
    encode_texts,
    vector_width,
)
from metal_prefill.tasks._pooled_head import probabilities_of
from metal_prefill.tasks._prompts import PromptRules, role_of
from metal_prefill.tasks._reranking import Options, check_ranks, encode_documents
from metal_prefill.tasks._text_passes import TextPasses

_T = TypeVar("_T")

_NUMBER = 25  # maximum bytes of a number and a comma in JSON
_LABELED = 64  # maximum bytes of a score and the names of its fields in JSON
MOST_NUMBERS = MOST_ANSWER // _NUMBER  # of the vectors of a request


def _check_inputs(service: Service, count: int, param: str) -> None:
    if count > (limit := service.settings.max_inputs):
        raise ApiError(f"{param} has {count} texts; the limit is {limit}", param=param)


async def embed(service: Service, form: EmbeddingForm, reply: Reply) -> None:
    """Answer an embedding request, for texts or token ids."""
    vectors, encoded = await _embedded(service, form, reply)
    usage = _usage(sum(map(len, encoded.prompts)), form.truncate, len(encoded.cut))
    if empty := encoded.empty:
        usage["empty_texts"] = len(empty)
    packed = form.encoding_format == "base64"
    answer = _answer(vectors, packed, {"model": reply.model, "usage": usage})
    await reply.pieces(answer, sum(vector.nbytes for vector in vectors))


async def embed_inputs(service: Service, form: EmbedForm, reply: Reply) -> None:
    """Answer an embedding request of text-embeddings-inference with a list of vectors."""
    same = EmbeddingForm(
        input=form.inputs,
        normalize=form.normalize,
        dimensions=form.dimensions,
        instruction=form.prompt_name,
        truncate="end" if form.truncate else None,
    )
    vectors, _ = await _embedded(service, same, reply)
    size = sum(vector.nbytes for vector in vectors)
    await reply.pieces(_listed(map(_vector, vectors)), size)


async def predict(service: Service, form: PredictForm, reply: Reply) -> None:
    """Answer a classification request of text-embeddings-inference."""
    given = [form.inputs] if isinstance(form.inputs, str) else form.inputs
    single = all(isinstance(item, str) for item in given)
    items = [[item for item in given if isinstance(item, str)]] if single else given
    _check_inputs(service, len(items), "inputs")
    texts: list[str | tuple[str, str]] = []
    for i, item in enumerate(items):
        parts = [item] if isinstance(item, str) else item
        if len(parts) not in (1, 2):
            raise ApiError(f"inputs[{i}] has {len(parts)} texts, must have one or two", param="inputs")
        for part in parts:
            service.check_text(part, f"inputs[{i}]")
        texts.append(parts[0] if len(parts) == 1 else (parts[0], parts[1]))
    engine, head = service.engine, service.engine.head
    size = len(texts) * sum(MOST_ESCAPED * len(label.encode()) + _LABELED for label in head.labels)
    if size > MOST_ANSWER:
        raise ApiError(
            f"inputs: {len(texts)} texts with {len(head.labels)} labels each exceed an answer of "
            f"{MOST_ANSWER} bytes",
            param="inputs",
            code="answer_too_large",
        )
    rules = PromptRules("end" if form.truncate else "error")
    with service.admitted(1):
        encoded = await service.prepare(lambda: encode_for_head(engine, texts, rules))
        reply.end_turn()
        logits = await _compute(service, lambda passes: head_logits(passes, encoded))
    scores = logits if form.raw_scores else probabilities_of(head, logits)
    found = [
        sorted(
            ({"score": score, "label": label} for score, label in zip(row, head.labels, strict=True)),
            key=lambda item: -item["score"],
        )
        for row in scores.tolist()
    ]
    await reply.json(found[0] if single else found)


async def _embedded(
    service: Service, form: EmbeddingForm, reply: Reply
) -> tuple[npt.NDArray[np.float32], EncodedTexts]:
    inputs = prompts_of(form.input, "input")
    _check_inputs(service, len(inputs), "input")
    engine = service.engine
    packed = form.encoding_format == "base64"

    def encode() -> EncodedTexts:
        try:
            pooling = check_pooling(engine, service.settings.pooling)
        except ValueError as error:
            hint = " (set by the server option --pooling)" if service.settings.pooling else ""
            raise unsupported(f"{error}{hint}") from None
        if pooling == "none" and packed:
            raise unsupported(
                "encoding_format base64 has no shape, and this model has a vector for each token: use float",
                "encoding_format",
            )
        try:
            width = vector_width(engine, pooling, form.dimensions)
        except ValueError as error:
            raise ApiError(str(error), param="dimensions") from None
        service.check_text(form.instruction or "", "instruction")
        rules = PromptRules(form.truncate or "error", form.unicode, form.split_special_tokens)
        texts = [text for text in inputs if isinstance(text, str)]
        tokens = [ids for ids in inputs if not isinstance(ids, str)]
        if texts and tokens:
            raise ApiError("input must be texts or token ids, not some of both", param="input")
        for i, text in enumerate(texts):
            service.check_text(text, f"text {i}")
        encoded = encode_texts(engine, texts, role_of(engine, pooling, form.instruction), rules)
        for i, given in enumerate(tokens):
            try:
                ids = token_array(given, engine.config.vocab_size)
            except ValueError as error:
                raise ApiError(f"text {i}: {error}", param="input") from None
            if form.truncate == "end" and len(ids) > engine.max_context:
                ids = ids[: engine.max_context]
                encoded.cut.append(i)
            check_length(engine, len(ids), f"text {i}")
            service.note_foreign_ids(ids.tolist())
            encoded.prompts.append(ids)
            encoded.expansions.append(0)
        count = sum(map(len, encoded.prompts)) if pooling == "none" else len(inputs)
        if count * width > MOST_NUMBERS:
            raise ApiError(
                f"input: {count} vectors of {width} numbers; an answer may have {MOST_NUMBERS} numbers",
                param="input",
                code="answer_too_large",
            )
        return encoded

    with service.admitted(1):
        encoded = await service.prepare(encode)
        reply.end_turn()

        def compute(passes: SharedPasses) -> Any:
            return embed_encoded(
                passes,
                encoded,
                pooling=service.settings.pooling,
                normalize=form.normalize is not False,
                dimensions=form.dimensions,
            )

        vectors = await _compute(service, compute)
    return vectors, encoded


def _answer(
    vectors: Iterable[npt.NDArray[np.float32]], packed: bool, rest: dict[str, Any]
) -> Iterator[bytes]:
    """Yield the JSON of an answer in parts; `rest` are its last fields."""
    before = b'{"object":"list","data":['
    for i, vector in enumerate(vectors):
        yield before + b'{"object":"embedding","index":%d,"embedding":' % i
        if packed:
            yield b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
        else:
            yield from _vector(vector)
        before = b"},"
    yield b"}]," + msgspec.json.encode(rest)[1:]


def _vector(vector: npt.NDArray[np.float32]) -> Iterator[bytes]:
    """Yield the JSON of a vector, or of a matrix row by row."""
    if vector.ndim == 1:
        yield msgspec.json.encode(vector.tolist())
    else:
        yield from _listed([msgspec.json.encode(row.tolist())] for row in vector)


def _listed(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield a JSON list of items, each given in parts."""
    before = b"["
    for item in items:
        yield before
        yield from item
        before = b","
    yield b"]" if before == b"," else b"[]"


def _usage(tokens: int, truncate: str | None, cut: int) -> dict[str, int]:
    """Return the counts of a request, and of texts that lost their ends if it allows that."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {**usage, "truncated_texts": cut} if truncate == "end" else usage


async def rank(service: Service, form: RerankForm, reply: Reply) -> None:
    given = form.documents if form.texts is None else form.texts
    if given is None:
        raise missing("documents")
    _check_inputs(service, len(given), "documents")
    documents = [_document(document, i, form.rank_fields) for i, document in enumerate(given)]
    for i, text in enumerate(documents):
        service.check_text(text, f"documents[{i}]")
    service.check_text(form.query, "query")
    service.check_text(form.instruction or "", "instruction")
    cuts = form.truncate is True or form.truncate == "end"
    rules = PromptRules("end" if cuts else "error", form.unicode, form.split_special_tokens)
    options = Options(
        form.instruction, how=form.how, rules=rules, label=form.label, most_tokens=form.max_tokens_per_doc
    )
    _check_ranks(service, options)

    def answer(passes: SharedPasses) -> Any:
        if form.texts is not None:  # as text-embeddings-inference
            scores, logits = ranking.score(passes, ranking.prompts)
            shown = logits if form.raw_scores else scores
            return [
                {
                    "index": i,
                    "score": float(shown[i]),
                    **({"text": documents[i]} if form.return_text else {}),
                }
                for i in np.argsort(-logits, kind="stable")[: form.top_n].tolist()
            ]
        results = [
            {
                "index": item.index,
                "relevance_score": item.score,
                **({} if form.return_documents is False else {"document": {"text": item.document}}),
            }
            for item in ranking.ranked(passes, form.top_n)
        ]
        return {
            "id": uuid.uuid4().hex,
            "model": reply.model,
            "results": results,
            "usage": _usage(passes.tokens, rules.truncate, ranking.cut_texts),  # a shared prefix counts once
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }

    engine = service.engine
    with service.admitted(1):
        ranking = await service.prepare(lambda: encode_documents(engine, form.query, documents, options))
        reply.end_turn()
        answered = await _compute(service, answer)
    await reply.json(answered)


def _document(document: str | dict[str, Any], i: int, fields: Sequence[str] | None) -> str:
    """Return the text of a document: of an object that of its fields, of several as lines with names."""
    if isinstance(document, str):
        return document
    names = ["text"] if fields is None else [name for name in fields if name in document]
    values = [value for name in names if isinstance(value := document.get(name), str)]
    if not values or len(values) < len(names):
        wanted = "'text'" if fields is None else f"texts of rank_fields: {', '.join(fields)}"
        raise ApiError(f"documents[{i}] must be a text or an object with {wanted}", param=f"documents[{i}]")
    return values[0] if len(names) == 1 else "\n".join(map("{}: {}".format, names, values))


def _check_ranks(service: Service, options: Options) -> None:
    """Raise `ApiError` if the model does not rank documents in this way."""
    engine, name = service.engine, service.names[0]
    try:
        check_ranks(engine, options)
    except GGUFError:
        raise unsupported(f"{name} does not support reranking: its file has no template for it") from None
    except ValueError as error:
        raise unsupported(f"{name} does not support reranking in this way: {error}") from None


async def _compute(service: Service, work: Callable[[SharedPasses], _T]) -> _T:
    """Run a function in a thread whose passes are shared with texts of other requests."""
    passes = SharedPasses(service.engine, service.loop)
    try:
        return await anyio.to_thread.run_sync(
            lambda: work(passes), limiter=service.text_workers, abandon_on_cancel=True
        )
    except KVMemoryError as error:
        if passes.future is None:  # it would not fit even alone
            raise
        # Unlike a text, it does not wait for the pages of others.
        raise ApiError(str(error), status=503, code="kv_memory_exceeded", headers=RETRY) from None
    finally:
        passes.cancel()


class SharedPasses(TextPasses):
    """Passes of the engine loop for embedding and reranking, shared with the texts of other requests."""

    def __init__(self, engine: Engine, loop: EngineLoop) -> None:
        super().__init__(engine)
        self._loop = loop
        self._lock = threading.Lock()
        self._cancelled = False
        self.future: Future[list[Any]] | None = None  # of the latest passes
        self.tokens = 0  # tokens computed for this request

    def run(self, requests: Sequence[_core.Computation], progress: Progress | None = None) -> list[Any]:
        with self._lock:
            if self._cancelled:
                raise CancelledError
            self.future = self._loop.submit(requests)
        results = self.future.result()
        self.tokens += sum(request.computed for request in requests)
        return results

    def cancel(self) -> None:
        """Make the pending call, and further ones, raise CancelledError."""
        with self._lock:
            self._cancelled = True
            if self.future is not None:
                self.future.cancel()
