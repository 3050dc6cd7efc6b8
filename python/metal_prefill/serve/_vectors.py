"""Endpoints ``/v1/embeddings`` and ``/v1/rerank``, computed in passes shared with other requests."""

from __future__ import annotations

import base64
import uuid
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill._support.arguments import token_array
from metal_prefill.errors import GGUFError
from metal_prefill.serve._completions import prompts_of
from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import EmbeddingForm, RerankForm
from metal_prefill.serve._reply import Reply
from metal_prefill.serve._service import Service, SharedPasses
from metal_prefill.tasks._embedding import (
    check_length,
    check_pooling,
    embed_prompts,
    encode_texts,
    prompt_format,
)
from metal_prefill.tasks._reranking import rank_documents, template_of


def _check_inputs(service: Service, count: int, param: str) -> None:
    if count > (limit := service.settings.max_inputs):
        raise ApiError(400, f"{param} has {count} texts; the limit is {limit}", param=param)


async def embed(service: Service, form: EmbeddingForm, reply: Reply, namespace: str) -> None:
    """Answer an embedding request, for texts or token ids."""
    name = service.check_model(form.model)
    inputs = prompts_of(form.input, "input")
    _check_inputs(service, len(inputs), "input")
    engine = service.model.engine

    def encode() -> list[npt.NDArray[np.int32]]:
        try:
            check_pooling(engine, service.settings.pooling)
        except ValueError as error:
            raise ApiError(400, f"{error} (set by the server option --pooling)", code="unsupported") from None
        before, after = prompt_format(engine.config.architecture, form.instruction)
        prompts = []
        for i, text in enumerate(inputs):
            if isinstance(text, str):
                try:
                    prompts += encode_texts(engine, [text], before, after)
                except (TypeError, ValueError) as error:
                    raise type(error)(str(error).replace("text 0", f"text {i}", 1)) from None
                continue
            try:
                ids = token_array(text, engine.config.vocab_size)
            except ValueError as error:
                raise ApiError(400, f"text {i}: {error}", param="input") from None
            check_length(engine, len(ids), f"text {i}")
            prompts.append(ids)
        return prompts

    with service.admitted(1):
        prompts = await service.prepare(encode)

        def compute(passes: SharedPasses) -> Any:
            return embed_prompts(
                passes, prompts, pooling=service.settings.pooling, dimensions=form.dimensions
            )

        vectors: npt.NDArray[np.float32] = await service.compute(compute)
    packed = form.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if packed
            else vector.tolist(),
        }
        for i, vector in enumerate(vectors)
    ]
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    await reply.json({"object": "list", "data": data, "model": name, "usage": usage})


async def rank(service: Service, form: RerankForm, reply: Reply, namespace: str) -> None:
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
        documents.append(text)
    try:
        template = template_of(service.model.engine)
    except (ValueError, GGUFError):
        raise ApiError(
            400, f"{name} does not support reranking: its file has no template for it", code="unsupported"
        ) from None
    tokens = 0

    def compute(passes: SharedPasses) -> Any:
        nonlocal tokens
        ranked = rank_documents(
            passes,
            form.query,
            documents,
            top_n=form.top_n,
            instruction=form.instruction,
            template=template,
        )
        tokens = passes.tokens
        return ranked

    with service.admitted(1):
        ranked = await service.compute(compute)
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
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},  # a shared prefix counts once
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }
    )
