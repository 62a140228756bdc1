"""OpenTelemetry: a span for each request, with the conventions' names for generative AI."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from ....system.errors import RuntimeProblem
from ...requests.output import RequestOutput
from ...requests.params import SamplingParams
from ..model.observer import Watch

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# Of the HTTP request that a task works on.
_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


class WithScope:
    """Remembers each HTTP request, for the spans of what it starts.

    Args:
        app: that serves it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        before = _scope.set(scope)
        try:
            await self._app(scope, receive, send)
        finally:
            _scope.reset(before)


class Tracing:
    """Sends spans to a collector, by OTLP over HTTP.

    Args:
        endpoint: the URL for traces.

    Attributes:
        provider: of the spans; not the process's.

    Raises:
        RuntimeProblem: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise RuntimeProblem(
                "otlp_endpoint is set, but OpenTelemetry is not installed; run pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or leave it out"
            ) from None
        # What the environment says, such as OTEL_SERVICE_NAME, comes first.
        resource = Resource.create({"service.name": "smelt"}).merge(OTELResourceDetector().detect())
        self.provider: TracerProvider = TracerProvider(resource=resource)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def of(self, model: str) -> ModelTracing:
        """The observer of a model's requests."""
        return ModelTracing(self.provider, model)


class ModelTracing:
    """Writes a span for each request of a model.

    Args:
        provider: of the spans.
        model: its name.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self.tracer = provider.get_tracer("smelt")
        self.model = model

    def watch(self, name: str, prompts: Sequence[list[int]], params: SamplingParams) -> Sequence[Watch]:
        """Measure a request."""
        request = _Request(self, name, len(prompts), params)
        return [partial(request.output, number) for number in range(len(prompts))]


class _Request:
    """One request, whose span is written when the last of its prompts has ended."""

    def __init__(self, tracing: ModelTracing, name: str, prompts: int, params: SamplingParams) -> None:
        self._tracing = tracing
        self._name = name
        self._params = params
        self._scope = _scope.get()
        self._ends: list[RequestOutput | None] = [None] * prompts
        self._start = time.time_ns()
        self._arrived = time.perf_counter()
        self._first: float | None = None

    def output(self, number: int, output: RequestOutput) -> None:
        """A prompt's output has grown, or ended."""
        if self._first is None and any(completion.token_ids for completion in output.outputs):
            self._first = time.perf_counter()
        if output.finished:
            self._ends[number] = output
            ends = [end for end in self._ends if end is not None]
            if len(ends) == len(self._ends):
                self._write(ends)

    def _write(self, outputs: list[RequestOutput]) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        seconds = time.perf_counter() - self._arrived
        scope = self._scope or {"path": "", "headers": ()}
        operation = "text_completion" if scope["path"] == "/v1/completions" else "chat"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracing.tracer.start_span(
            f"{operation} {self._tracing.model}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            start_time=self._start,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "smelt",
                "gen_ai.request.model": self._tracing.model,
                **self._asked(),
                "gen_ai.response.id": self._name,
                "gen_ai.response.model": self._tracing.model,
                "gen_ai.response.finish_reasons": [
                    completion.finish_reason or "" for output in outputs for completion in output.outputs
                ],
                "gen_ai.usage.input_tokens": sum(len(output.prompt_token_ids) for output in outputs),
                "gen_ai.usage.output_tokens": sum(
                    len(completion.token_ids) for output in outputs for completion in output.outputs
                ),
                "gen_ai.usage.cache_read.input_tokens": sum(output.num_cached_tokens for output in outputs),
                **self._latencies(outputs, seconds),
            },
        )
        error = next((output.error for output in outputs if output.error is not None), None)
        if error is not None:
            span.set_attribute("error.type", "engine")
            span.set_status(StatusCode.ERROR, error)
        span.end(end_time=self._start + round(seconds * 1e9))

    def _asked(self) -> dict[str, str | int | float | Sequence[str]]:
        """The parameters, without those that change nothing."""
        params = self._params
        asked: dict[str, str | int | float | Sequence[str] | None] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or None,
            "max_tokens": params.max_tokens,
            "seed": params.seed,
            "stop_sequences": params.stop or None,
            "frequency_penalty": params.frequency_penalty or None,
            "presence_penalty": params.presence_penalty or None,
            "choice.count": params.n if params.n > 1 else None,
        }
        return {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}

    def _latencies(self, outputs: list[RequestOutput], seconds: float) -> dict[str, float]:
        """In seconds, under vLLM's names: the conventions have none for servers' spans."""
        found = {"e2e": seconds}
        queued = [output.queue_seconds for output in outputs if output.queue_seconds is not None]
        if queued:
            found["time_in_queue"] = min(queued)
            found["time_in_model_inference"] = seconds - min(queued)
        if self._first is not None:
            found["time_to_first_token"] = first = self._first - self._arrived
            found["time_in_model_decode"] = seconds - first
            if queued:
                found["time_in_model_prefill"] = first - min(queued)
        return {f"gen_ai.latency.{name}": value for name, value in found.items()}
