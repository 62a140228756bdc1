"""The HTTP application: which path is served by what."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ...system.errors import SmeltError
from .admin import Admin, LoadAdapter, LoadModel, UnloadAdapter, UnloadModel
from .anthropic.count import CountRequest, counted
from .anthropic.messages import MessagesRequest, answered_message
from .anthropic.model_list import HEADER, model_info, model_page
from .http.config import ServerConfig
from .http.descriptions import ERRORS, STREAMED
from .http.disconnect import ClientGone, unless_gone
from .http.errors import ApiError, refused, sentence, stopping
from .http.gate import Pass, RequestGate
from .http.middleware import ADMIN_PATHS, add_guards, body_of
from .http.sse import OPENAI, EventStream, StreamForm, event
from .http.validation import validation_problem
from .model.loader import ModelLoader
from .model.models import ServedModels
from .model.observer import Observer
from .model.running import Running
from .model.served_model import ServedModel
from .openai.chat import ChatRequest, answered
from .openai.completions import CompletionRequest, completed
from .openai.embeddings import EmbeddingRequest, embeddings
from .openai.model_list import model_entry
from .openai.responses.fields import ResponsesRequest
from .openai.responses.responses import RESPONSES, responded
from .openai.tokens import DetokenizeRequest, TokenizeRequest, detokenized, tokenized
from .page_routes import add_page
from .watch.metrics import Metrics
from .watch.tracing import Tracing, WithScope

# The client has closed the connection, and gets none of it.
_GONE = 499


Data = dict[str, Any]


class Answer(Protocol):
    """A request that runs, and its response: whole, or the events of a stream, which may have names."""

    running: Running

    async def whole(self) -> Data: ...

    def pieces(self) -> AsyncIterator[Data] | AsyncIterator[tuple[str, Data]]: ...


class Asks(Protocol):
    """The body of a request that is answered whole or in pieces."""

    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool | None: ...


B = TypeVar("B", bound=Asks)


class Server:
    """Models behind HTTP.

    Args:
        models: by name.
        config: the options.
        loader: of models that come while it runs; None if none may.

    Attributes:
        gate: who is let in.
        metrics: of its models, which it becomes the observer of.
        tracing: None if it is off.
        app: for an ASGI server.

    Raises:
        RuntimeProblem: tracing is on and OpenTelemetry is not installed.
    """

    def __init__(self, models: ServedModels, config: ServerConfig, loader: ModelLoader | None = None) -> None:
        self.models = models
        self.config = config
        self.gate = RequestGate(config.max_requests)
        self.metrics = Metrics(config.metrics_prefix, models)
        self.tracing = None if config.otlp_endpoint is None else Tracing(config.otlp_endpoint)
        self.app = app = FastAPI(
            title="Smelt", version=version("smelt"), docs_url=None, redoc_url=None, responses=ERRORS
        )
        app.exception_handler(ApiError)(_api_error)
        app.exception_handler(SmeltError)(_api_error)
        app.exception_handler(RequestValidationError)(_api_error)
        app.exception_handler(HTTPException)(_api_error)
        app.exception_handler(ClientGone)(_api_error)
        self._add_generation()
        self._add_anthropic()
        self._add_responses()
        self._add_tokens()
        self._add_status()
        self._add_metrics()
        if config.admin_keys:
            self._add_admin(Admin(models, loader, self, self.gate, config.drain_seconds))
        add_page(app)
        add_guards(app, config)
        if self.tracing is not None:
            app.add_middleware(WithScope)

    def _add_generation(self) -> None:
        @self.app.post("/v1/completions", responses=STREAMED)
        async def completions(body: CompletionRequest, request: Request) -> Response:
            return await self._answer(request, body, completed, "cmpl-")

        @self.app.post("/v1/chat/completions", responses=STREAMED)
        async def chat(body: ChatRequest, request: Request) -> Response:
            return await self._answer(request, body, answered, "chatcmpl-")

        @self.app.post("/v1/embeddings")
        async def embed(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
            served = self._found(request, body.model)
            with self.gate.enter(served):
                return await unless_gone(request, embeddings(body, served))

    def _add_responses(self) -> None:
        @self.app.post("/v1/responses", responses=STREAMED)
        async def responses(body: ResponsesRequest, request: Request) -> Response:
            return await self._answer(request, body, responded, "resp_", RESPONSES)

    def _add_anthropic(self) -> None:
        @self.app.post("/v1/messages", responses=STREAMED)
        async def messages(body: MessagesRequest, request: Request) -> Response:
            form = StreamForm(lambda problem: event(problem.anthropic(_name(request)), "error"))
            return await self._answer(request, body, answered_message, "msg_", form)

        @self.app.post("/v1/messages/count_tokens")
        async def count_tokens(body: CountRequest) -> dict[str, int]:
            return await counted(body, self.models.get(body.model))

    async def _answer(
        self,
        request: Request,
        body: B,
        start: Callable[[B, ServedModel, str], Awaitable[Answer]],
        prefix: str,
        form: StreamForm = OPENAI,
    ) -> Response:
        """An answer, whole or in pieces; its name begins with ``prefix``."""
        served = self._found(request, body.model)
        entered = self.gate.enter(served)

        async def begin() -> Answer:
            answer = await start(body, served, f"{prefix}{_name(request)}")
            request.state.running = answer.running
            return answer

        if not body.stream:
            with entered:
                return JSONResponse(await unless_gone(request, _whole(begin)))
        events = _events(begin, entered, form)
        try:
            return EventStream(await unless_gone(request, anext(events)), events)
        except BaseException:
            # They may not have begun, and do not close it then.
            entered.close()
            raise

    def _found(self, request: Request, name: str | None) -> ServedModel:
        """The model that a request is for, which its log line and the metrics name."""
        served = self.models.get(name)
        request.state.served, request.state.model = served.name, (served.base or served).name
        return served

    def _add_tokens(self) -> None:
        @self.app.post("/tokenize")
        async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
            return tokenized(body, self.models.get(body.model))

        @self.app.post("/detokenize")
        async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
            return detokenized(body, self.models.get(body.model))

    @property
    def _is_alive(self) -> bool:
        return all(model.is_alive for model in self.models)

    def _add_status(self) -> None:
        app = self.app

        @app.get("/health", response_class=Response)
        async def health() -> Response:
            return Response(status_code=200 if self._is_alive else 503)

        @app.get("/ready", response_class=Response)
        async def ready() -> Response:
            return Response(status_code=200 if self._is_alive and not self.gate.draining else 503)

        @app.get("/version")
        async def version_() -> dict[str, str]:
            return {"version": version("smelt")}

        @app.get("/load")
        async def load() -> dict[str, int]:
            return {"server_load": self.gate.inside}

        @app.get("/v1/models")
        async def models(request: Request) -> dict[str, Any]:
            if HEADER in request.headers:
                return model_page(list(self.models))
            return {"object": "list", "data": [model_entry(model) for model in self.models]}

        @app.get("/v1/models/{name:path}")
        async def model(name: str, request: Request) -> dict[str, Any]:
            found = self.models.get(name)
            return model_info(found) if HEADER in request.headers else model_entry(found)

    def _add_metrics(self) -> None:
        self.app.state.metrics = self.metrics
        for model in self.models:
            self._observe(model, self.metrics.models[(model.base or model).name])

        @self.app.get("/metrics", response_class=PlainTextResponse)
        async def metrics() -> Response:
            return Response(self.metrics.text(), media_type=self.metrics.media_type)

    def _add_admin(self, admin: Admin) -> None:
        app = self.app

        @app.post("/models/load")
        async def load(body: LoadModel) -> dict[str, Any]:
            return await admin.load(body)

        @app.post("/models/unload")
        async def unload(body: UnloadModel) -> dict[str, Any]:
            return await admin.unload(body)

        @app.post("/v1/load_lora_adapter")
        async def load_adapter(body: LoadAdapter) -> dict[str, Any]:
            return await admin.load_adapter(body)

        @app.post("/v1/unload_lora_adapter")
        async def unload_adapter(body: UnloadAdapter) -> dict[str, Any]:
            return await admin.unload_adapter(body)

    def give_up(self) -> None:
        """Answer all that is not finished with an error."""
        for model in self.models:
            model.abort_all(stopping())

    def add(self, model: ServedModel) -> None:
        """Measure a model, or an adapter with its base, from now on."""
        self._observe(model, self.metrics.add(model) if model.base is None else self.metrics.models[model.base.name])

    def remove(self, model: ServedModel) -> None:
        """Measure a model no more."""
        self.metrics.remove(model)

    def _observe(self, model: ServedModel, metrics: Observer) -> None:
        traced = () if self.tracing is None else (self.tracing.of(model.name),)
        model.observers = (metrics, *traced)


async def _whole(begin: Callable[[], Awaitable[Answer]]) -> dict[str, Any]:
    answer = await begin()
    with answer.running:
        return await answer.whole()


async def _events(begin: Callable[[], Awaitable[Answer]], entered: Pass, form: StreamForm) -> AsyncGenerator[bytes]:
    """A stream's events; a failure after the first is one of them."""
    with entered:
        answer = await begin()
        with answer.running:
            began = False
            try:
                async for piece in answer.pieces():
                    yield event(piece[1], piece[0]) if isinstance(piece, tuple) else event(piece)
                    began = True
            except ApiError as problem:
                if not began:
                    raise
                yield form.failure(problem)
            if form.end:
                yield form.end


def _name(request: Request) -> str:
    return str(request.state.request_id)


def _fields_of(request: Request) -> list[str]:
    """The fields that the body of a request may have."""
    field = getattr(request.scope.get("route"), "body_field", None)
    model = None if field is None else field.field_info.annotation
    return [each.alias or name for name, each in getattr(model, "model_fields", {}).items()]


async def _api_error(request: Request, error: Exception) -> Response:
    """Any failure in the form of the API that was called."""
    match error:
        case ApiError():
            problem = error
        case ClientGone():
            return Response(status_code=_GONE)
        case SmeltError():
            problem = refused(error)
        case RequestValidationError():
            problem = validation_problem(error, _fields_of(request))
        case HTTPException():
            problem = ApiError(
                error.status_code, sentence(Exception(f"{request.method} {request.url.path}: {error.detail}"))
            )
        case _:
            raise error
    path = request.scope["path"]
    request.state.problem = problem  # for the log
    if request.method == "POST" and path.startswith("/v1/") and path not in ADMIN_PATHS:
        request.app.state.metrics.refused(getattr(request.state, "model", None), problem)
    return JSONResponse(body_of(problem, request.url.path, _name(request)), problem.status, problem.headers)
