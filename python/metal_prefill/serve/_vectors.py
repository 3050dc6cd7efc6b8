"""Endpoints ``/v1/embeddings`` and ``/v1/rerank``, computed in passes shared with other requests."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from metal_prefill._support.arguments import token_array
from metal_prefill.errors import GGUFError
from metal_prefill.serve._bodies import MOST_ANSWER, Sender
from metal_prefill.serve._completions import prompts_of
from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import EmbeddingForm, RerankForm
from metal_prefill.serve._reply import Reply
from metal_prefill.serve._service import Service, SharedPasses
from metal_prefill.tasks._embedding import (
    EncodedText,
    EncodedTexts,
    check_length,
    check_pooling,
    embed_prompts,
    encode_tokens,
    vector_width,
)
from metal_prefill.tasks._prompt_rules import PromptRules, errors_of
from metal_prefill.tasks._prompts import prompt_form
from metal_prefill.tasks._reranking import Options, Ranked, encode_documents, kind_of, template_of
from metal_prefill.tasks._text_roles import role_of

_NUMBER = 25  # bytes of a number and a comma in JSON, at most
MOST_NUMBERS = MOST_ANSWER // _NUMBER  # of the vectors of a request


def _check_inputs(service: Service, count: int, param: str) -> None:
    if count > (limit := service.settings.max_inputs):
        raise ApiError(400, f"{param} has {count} texts; the limit is {limit}", param=param)


async def embed(service: Service, form: EmbeddingForm, reply: Reply, sender: Sender) -> None:
    """Answer an embedding request, for texts or token ids."""
    name = service.check_model(form.model)
    inputs = prompts_of(form.input, "input")
    _check_inputs(service, len(inputs), "input")
    engine = service.model.engine
    packed = form.encoding_format == "base64"

    def encode() -> EncodedTexts:
        try:
            pooling = check_pooling(engine, service.settings.pooling)
        except ValueError as error:
            raise ApiError(400, f"{error} (set by the server option --pooling)", code="unsupported") from None
        if pooling == "none" and packed:
            raise ApiError(
                400,
                "encoding_format base64 has no shape, and this model has a vector for each token: use float",
                param="encoding_format",
                code="unsupported",
            )
        service.check_text(form.instruction or "", "instruction")
        role = role_of(engine, pooling, form.instruction)
        prompt = prompt_form(engine, form.instruction)
        rules = PromptRules(form.truncate or "error", form.unicode)
        for i, text in enumerate(inputs):
            if isinstance(text, str):
                service.check_text(text, f"text {i}")
        encoded = EncodedTexts.none()
        made = prompt.tokens_of_all(engine.tokenizer, (t for t in inputs if isinstance(t, str)), rules)
        for i, text in enumerate(inputs):
            if isinstance(text, str):
                name = f"text {i}"
                with errors_of(name):
                    tokens = next(made)
                encoded.add(encode_tokens(engine, tokens, text, name, prompt, rules, role))
            else:
                try:
                    ids = token_array(text, engine.config.vocab_size)
                except ValueError as error:
                    raise ApiError(400, f"text {i}: {error}", param="input") from None
                cut = form.truncate == "end" and len(ids) > engine.max_context
                ids = ids[: engine.max_context] if cut else ids
                check_length(engine, len(ids), f"text {i}")
                encoded.add(EncodedText(ids, cut))
        count = sum(map(len, encoded.prompts)) if pooling == "none" else len(inputs)
        width = vector_width(engine, pooling, form.dimensions)
        if count * width > MOST_NUMBERS:
            raise ApiError(
                400,
                f"input: {count} vectors of {width} numbers; an answer may have {MOST_NUMBERS} numbers",
                param="input",
                code="answer_too_large",
            )
        return encoded

    with service.admitted(1):
        encoded = await service.prepare(encode)
        sender.turn.end()

        def compute(passes: SharedPasses) -> Any:
            return embed_prompts(
                passes,
                encoded.prompts,
                encoded.expansions,
                pooling=service.settings.pooling,
                dimensions=form.dimensions,
            )

        vectors = await service.compute(compute)
    usage = _usage(sum(map(len, encoded.prompts)), form.truncate, len(encoded.cut))
    if encoded.empty:
        usage["empty_texts"] = len(encoded.empty)
    size = sum(vector.nbytes for vector in vectors)
    await reply.pieces(_answer(vectors, packed, {"model": name, "usage": usage}), size, service.prepare)


def _answer(
    vectors: Iterable[npt.NDArray[np.float32]], packed: bool, rest: dict[str, Any]
) -> Iterator[bytes]:
    """Yield the JSON of an answer in parts; `rest` are its last fields."""
    before = b'{"object":"list","data":['
    for i, vector in enumerate(vectors):
        yield before + b'{"object":"embedding","index":%d,"embedding":' % i
        if packed:
            yield b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
        elif vector.ndim == 1:
            yield msgspec.json.encode(vector.tolist())
        else:
            for j, row in enumerate(vector):
                yield (b"," if j else b"[") + msgspec.json.encode(row.tolist())
            yield b"]" if len(vector) else b"[]"
        before = b"},"
    yield b"}]," + msgspec.json.encode(rest)[1:]


def _usage(tokens: int, truncate: str | None, cut: int) -> dict[str, int]:
    """Return the counts of a request; that of texts that lost their ends where it allows that."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {**usage, "truncated_texts": cut} if truncate == "end" else usage


async def rank(service: Service, form: RerankForm, reply: Reply, sender: Sender) -> None:
    """Answer a reranking request."""
    name = service.check_model(form.model)
    _check_inputs(service, len(form.documents), "documents")
    documents: list[str] = []
    for i, document in enumerate(form.documents):
        text = document if isinstance(document, str) else document.get("text")
        if not isinstance(text, str):
            raise ApiError(
                400, f"documents[{i}] must be a text or an object with 'text'", param=f"documents[{i}]"
            )
        service.check_text(text, f"documents[{i}]")
        documents.append(text)
    service.check_text(form.query, "query")
    service.check_text(form.instruction or "", "instruction")
    options = Options(
        form.instruction, how=form.how, rules=PromptRules(form.truncate or "error", form.unicode)
    )
    _check_ranks(service, options)

    def compute(passes: SharedPasses) -> tuple[list[Ranked], dict[str, int]]:
        ranked = ranking.ranked(passes, form.top_n)
        return ranked, _usage(passes.tokens, form.truncate, ranking.cut_texts)  # a shared prefix counts once

    engine = service.model.engine
    with service.admitted(1):
        ranking = await service.prepare(lambda: encode_documents(engine, form.query, documents, options))
        sender.turn.end()
        ranked, usage = await service.compute(compute)
    results = [
        {
            "index": item.index,
            "relevance_score": item.score,
            **({} if form.return_documents is False else {"document": {"text": item.document}}),
        }
        for item in ranked
    ]
    await reply.json(
        {
            "id": uuid.uuid4().hex,
            "model": name,
            "results": results,
            "usage": usage,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }
    )


def _check_ranks(service: Service, options: Options) -> None:
    """Raise `ApiError` if the model does not rank documents in this way."""
    engine, name = service.model.engine, service.names[0]
    try:
        if kind_of(engine, options) == "template":
            template_of(engine)
    except GGUFError:
        raise _no_ranks(f"{name} does not support reranking: its file has no template for it") from None
    except ValueError as error:
        raise _no_ranks(f"{name} does not support reranking in this way: {error}") from None


def _no_ranks(message: str) -> ApiError:
    return ApiError(400, message, code="unsupported")
