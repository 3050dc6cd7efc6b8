"""Ray Serve deployment: an ingress that reads requests, and replicas of the model that answer them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from metal_prefill.errors import MissingExtraError
from metal_prefill.hub._download import resolve_model
from metal_prefill.model import Model

try:
    from ray import serve as ray_serve
    from ray.exceptions import RayError
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response, StreamingResponse

    from metal_prefill.serve import Settings
    from metal_prefill.serve._app import make_app
    from metal_prefill.serve._bodies import Bodies
    from metal_prefill.serve._errors import ApiError
    from metal_prefill.serve._keys import prefix_key
    from metal_prefill.serve._relay import ResponseStart, answers, broken_answer, described, prefix_hash
except ImportError as error:
    needed = "pip install 'metal_prefill[ray,serve]'"
    raise MissingExtraError(f"serving on Ray needs: {needed} ({error})") from error

MOST_PREFIXES = 4096  # prompt prefixes that Ray tracks for each replica
MOST_TRIES = 3  # attempts for a request whose replicas die before they answer
MOST_REQUESTS = 10_000  # requests in flight at the ingress


class Replica:
    """Replica: a model and its server application."""

    def __init__(self, model: Any, settings: Settings, options: Mapping[str, Any]) -> None:
        self._app = make_app(Model(None if model is None else resolve_model(model), **options), settings)
        self._name = f"{socket.gethostname()}-{os.getpid()}"

    @ray_serve.multiplexed(max_num_models_per_replica=MOST_PREFIXES)  # type: ignore[misc]
    async def _remember(self, prefix: str) -> str:
        """Register a prefix with Ray, which then routes requests with the same prefix to this replica."""
        return prefix

    async def answer(
        self, request: Mapping[str, Any], body: bytes
    ) -> AsyncGenerator[ResponseStart | bytes, None]:
        """Answer a request in pieces."""
        if prefix := ray_serve.get_multiplexed_model_id():
            await self._remember(prefix)
        async for piece in answers(self._app, request, body):
            if isinstance(piece, ResponseStart):
                piece = piece._replace(headers=[*piece.headers, ("x-replica", self._name)])
            yield piece


class Ingress:
    """Ingress that reads requests and forwards each to the replica that has computed its prefix."""

    def __init__(self, replicas: Any, settings: Settings) -> None:
        self._replicas = replicas
        self._settings = settings
        self._bodies = Bodies(settings)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            body = await self._bodies.read(request)
        except ApiError as error:
            return error.response()
        except ClientDisconnect:
            return Response(status_code=499)
        options: dict[str, Any] = {"stream": True}
        if request.method == "POST":
            options["multiplexed_model_id"] = prefix_hash(body, prefix_key(self._settings, request.headers))
        failure: Exception | None = None
        for _ in range(MOST_TRIES):
            pieces = self._replicas.options(**options).answer.remote(described(request), body)
            try:
                first = await anext(aiter(pieces))
            except RayError as error:  # nothing was sent yet, so another replica can answer
                failure = error
                continue
            return _response(first, pieces)
        assert failure is not None
        return broken_answer(failure).response()


def _response(first: ResponseStart, pieces: AsyncIterator[bytes]) -> Response:
    # Ray sets these headers itself.
    headers = {n: v for n, v in first.headers if n not in ("content-length", "transfer-encoding")}
    if first.whole:
        return Response(first.body, first.status, headers)
    return StreamingResponse(_stream(first.body, pieces), first.status, headers)


async def _stream(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    yield first
    try:
        async for piece in pieces:
            yield piece
    except RayError as error:  # part of the answer was sent, which another replica cannot continue
        yield b"data: " + json.dumps(broken_answer(error).body()).encode() + b"\n\ndata: [DONE]\n\n"


def application(
    model: Any, replicas: int, cpus: float, settings: Settings, options: Mapping[str, Any]
) -> Any:
    """Return the application of :func:`metal_prefill.integrations.serve_app`."""
    room = settings.max_streams + settings.max_queue
    replica = ray_serve.deployment(Replica).options(
        name="Replica",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": cpus},
        max_ongoing_requests=room + 64,  # above its own limit, so that the replica itself answers 429
    )
    ingress = ray_serve.deployment(Ingress).options(
        name="Ingress", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=MOST_REQUESTS
    )
    return ingress.bind(replica.bind(model, settings, dict(options)), settings)
