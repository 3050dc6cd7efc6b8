"""Routes of the server, and the static files of its page."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from metal_prefill.model import Model
from metal_prefill.serve import _chat, _completions, _forms, _messages, _responses, _vectors
from metal_prefill.serve._activity import pass_number
from metal_prefill.serve._endpoint import (
    OPENAI,
    Endpoint,
    Guard,
    Reply,
    Style,
    foreign,
    keyless,
    prefix_namespace,
    server_names,
)
from metal_prefill.serve._errors import ApiError, answer_error
from metal_prefill.serve._service import Service
from metal_prefill.serve._settings import Settings
from metal_prefill.text._segmentation import let_threads_run

_Form = TypeVar("_Form", bound=_forms.Form)


def make_app(model: Model, settings: Settings) -> Starlette:
    """Return the ASGI application, whose ``state`` has the :class:`Service`."""
    let_threads_run()
    service = Service(model, settings)

    async def described(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "metal_prefill",
            "max_model_len": model.max_context,
            "device": model.device,
            "tasks": await service.prepare(service.tasks),
        }

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [await described(name) for name in service.names]})

    async def one_model(request: Request) -> Response:
        return JSONResponse(await described(service.check_model(request.path_params["name"])))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.page(), media_type=service.metrics.content_type)

    async def activity(request: Request) -> Response:
        namespace = prefix_namespace(settings, request.headers, None)
        since = pass_number(request)
        return JSONResponse(await service.inspect(lambda: service.activity.described(namespace, since)))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await service.prepare(service.close)

    files = sorted(_PAGE_FOLDER.iterdir()) if settings.page else []
    page = [_route(path) for path in files if path.suffix in _MEDIA_TYPES]
    # Without a key, monitoring can probe the server, and the page can ask for one.
    open_paths = ["/health", *(route.path for route in page)]
    origins = list(settings.cors_origins)
    middleware = [
        Middleware(
            Guard, problem_of=partial(foreign, server_names(settings), {origin.lower() for origin in origins})
        )
    ]
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["Retry-After"],
            )
        )
    if settings.api_keys:
        keys = [key.encode("utf-8") for key in settings.api_keys]
        middleware.append(Middleware(Guard, problem_of=partial(keyless, keys, frozenset(open_paths))))

    def post(
        path: str,
        form: type[_Form],
        answer: Callable[[Service, _Form, Reply], Awaitable[None]],
        style: Style = OPENAI,
    ) -> Route:
        return Route(path, Endpoint(service, form, answer, style), methods=["POST"])

    responses = partial(_responses.responses, _responses.KeptConversations())
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            post("/v1/completions", _forms.CompletionForm, _completions.complete),
            post("/v1/chat/completions", _forms.ChatForm, _chat.chat),
            post("/v1/responses", _responses.ResponsesForm, responses, _responses.STYLE),
            post("/v1/messages", _messages.MessagesForm, _messages.messages, _messages.STYLE),
            post("/v1/messages/count_tokens", _messages.CountForm, _messages.count_tokens, _messages.STYLE),
            post("/v1/embeddings", _forms.EmbeddingForm, _vectors.embed),
            post("/embed", _forms.EmbedForm, _vectors.embed_inputs),
            post("/predict", _forms.PredictForm, _vectors.predict),
            post("/rerank", _forms.RerankForm, _vectors.rank),
            post("/v1/rerank", _forms.RerankForm, _vectors.rank),
            post("/v2/rerank", _forms.RerankForm, _vectors.rank),  # the path of Cohere's client
            post("/tokenize", _forms.TokenizeForm, _completions.tokenize),
            post("/detokenize", _forms.DetokenizeForm, _completions.detokenize),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/activity", activity),
            *page,
        ],
        middleware=middleware,
        lifespan=lifespan,
        # Starlette logs a traceback for errors that only the handler of `Exception` answers.
        exception_handlers=dict.fromkeys((HTTPException, ApiError, Exception), answer_error),
    )
    app.state.service = service
    return app


_PAGE_FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Only files of this server are loaded. With `require-trusted-types-for`, browsers that support it refuse to
# parse a string as HTML, so that a model's text cannot become markup.
_PAGE_HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # a newer version of the package has other files at the same paths
}


def _route(path: Path) -> Route:
    """Return the route of a file of the page; ``index.html`` is ``/``."""
    answer = Response(path.read_bytes(), headers={**_PAGE_HEADERS, "content-type": _MEDIA_TYPES[path.suffix]})

    async def send(request: Request) -> Response:
        return answer

    return Route("/" if path.name == "index.html" else f"/page/{path.name}", send)
