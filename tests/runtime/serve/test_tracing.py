"""Spans, as a collector gets them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from smelt.runtime.engine.engine import Engine
from smelt.runtime.serve.app import Server
from smelt.runtime.serve.http.config import ServerConfig
from smelt.runtime.serve.model.models import ServedModels
from smelt.system.errors import RuntimeProblem

from .serving import Serving, served, serving

PROMPT = "The city of"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass(frozen=True)
class Traced:
    """A server, the spans that it has written, and what a collector got.

    Attributes:
        serving: the server.
        memory: with the spans.
        collected: the bodies that were posted, with their paths.
    """

    serving: Serving
    memory: InMemorySpanExporter
    collected: list[tuple[str, bytes]]

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
        """Ask for something."""
        asked = {"temperature": 0, "ignore_eos": True, "max_tokens": 4} | body
        return httpx2.post(f"{self.serving.url}{path}", json=asked, headers=headers, timeout=60)

    def span(self) -> ReadableSpan:
        """The only one, once it is there."""
        ends = time.monotonic() + 20
        while not (found := self.memory.get_finished_spans()):
            assert time.monotonic() < ends, "there is no span"
            time.sleep(0.01)
        (span,) = found
        return span

    def attributes(self) -> dict[str, Any]:
        """Of the only span."""
        return dict(self.span().attributes or {})


@pytest.fixture
def traced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    collected: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collected.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        config = ServerConfig(otlp_endpoint=f"http://127.0.0.1:{collector.server_address[1]}/v1/traces")
        with serving([served(engine)], config) as found:
            memory = InMemorySpanExporter()
            tracing = found.server.tracing
            assert tracing is not None
            tracing.provider.add_span_processor(SimpleSpanProcessor(memory))
            yield Traced(found, memory, collected)
            tracing.provider.shutdown()
        collector.shutdown()


def test_a_completions_span(traced: Traced) -> None:
    before = time.time_ns()
    body = {"prompt": PROMPT, "max_tokens": 7, "top_p": 0.9, "seed": 3, "stop": ["@@"], "n": 2, "top_k": 5}
    found = traced.post("/v1/completions", body).json()
    span, attributes = traced.span(), traced.attributes()
    assert span.name == "text_completion smelt-6m"
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None
    assert span.end_time is not None
    assert before <= span.start_time < span.end_time <= time.time_ns()
    seconds = {name: attributes.pop(name) for name in list(attributes) if name.startswith("gen_ai.latency.")}
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "smelt",
        "gen_ai.request.model": "smelt-6m",
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("@@",),
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": found["id"],
        "gen_ai.response.model": "smelt-6m",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": found["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 14,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    waits, prefill, first, decode, inference, whole = (
        seconds.pop(f"gen_ai.latency.{name}")
        for name in (
            "time_in_queue",
            "time_in_model_prefill",
            "time_to_first_token",
            "time_in_model_decode",
            "time_in_model_inference",
            "e2e",
        )
    )
    assert not seconds
    assert min(waits, prefill, decode) > 0
    assert waits + prefill == pytest.approx(first)
    assert prefill + decode == pytest.approx(inference)
    assert waits + inference == pytest.approx(whole) == pytest.approx((span.end_time - span.start_time) / 1e9)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_span_continues_the_callers_trace(traced: Traced, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": stream}
    found = traced.post("/v1/chat/completions", body, traceparent=f"00-{TRACE}-{CALLER}-01", tracestate="a=b")
    span = traced.span()
    assert span.name == "chat smelt-6m"
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, CALLER)
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.context.trace_state.get("a") == "b"
    assert traced.attributes()["gen_ai.response.id"] in found.text


def test_a_caller_that_is_not_sampled_gets_no_span(traced: Traced) -> None:
    traced.post("/v1/completions", {"prompt": PROMPT}, traceparent=f"00-{TRACE}-{CALLER}-00")
    traced.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 9})
    assert traced.attributes()["gen_ai.request.max_tokens"] == 9


def test_prompts_share_their_requests_span(traced: Traced) -> None:
    found = traced.post("/v1/completions", {"prompt": [PROMPT, "Once upon a"]}).json()
    attributes = traced.attributes()
    assert attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert attributes["gen_ai.usage.input_tokens"] == found["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 8


def test_cached_tokens_are_said(traced: Traced) -> None:
    body = {"prompt": "A trace of a trace of a trace of " * 6}
    traced.post("/v1/completions", body)
    traced.memory.clear()
    cached = traced.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert traced.attributes()["gen_ai.usage.cache_read.input_tokens"] == cached > 0


def test_a_client_that_leaves_is_seen(traced: Traced) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{traced.serving.url}/v1/completions", json=body, timeout=60) as found:
        next(found.iter_lines())
    assert traced.attributes()["gen_ai.response.finish_reasons"] == ("abort",)
    assert traced.span().status.status_code is StatusCode.UNSET


def test_a_failed_step_is_an_error(traced: Traced, engine: Engine) -> None:
    def fail(_: object) -> None:
        raise OSError("the device is gone")

    engine.core.on_step = fail
    try:
        assert traced.post("/v1/completions", {"prompt": PROMPT}).status_code == 500
    finally:
        engine.core.on_step = None
    status = traced.span().status
    assert status.status_code is StatusCode.ERROR
    assert "failed" in (status.description or "")
    assert traced.attributes()["error.type"] == "engine"
    assert traced.attributes()["gen_ai.response.finish_reasons"] == ("error",)


def test_a_refused_request_has_no_span(traced: Traced) -> None:
    """Also where its first prompt could be served."""
    assert traced.post("/v1/completions", {"prompt": [[5], []]}).status_code == 400
    traced.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 9})
    assert traced.attributes()["gen_ai.request.max_tokens"] == 9


def test_the_collector_gets_them(traced: Traced) -> None:
    traced.post("/v1/completions", {"prompt": PROMPT})
    traced.span()
    tracing = traced.serving.server.tracing
    assert tracing is not None
    assert tracing.provider.force_flush()
    ((path, body),) = traced.collected
    assert path == "/v1/traces"
    (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert {each.key: each.value.string_value for each in sent.resource.attributes}["service.name"] == "smelt"
    (span,) = sent.scope_spans[0].spans
    assert span.name == "text_completion smelt-6m"
    assert {each.key: each.value.int_value for each in span.attributes}["gen_ai.usage.output_tokens"] == 4


def test_the_environment_names_the_service(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    server = Server(ServedModels([served(engine)]), ServerConfig(otlp_endpoint="http://localhost:4318/v1/traces"))
    assert server.tracing is not None
    assert server.tracing.provider.resource.attributes["service.name"] == "mine"
    server.tracing.provider.shutdown()


def test_what_is_not_installed_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(RuntimeProblem, match=r"pip install opentelemetry-sdk"):
        Server(ServedModels([served(engine)]), ServerConfig(otlp_endpoint="http://localhost:4318/v1/traces"))


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(RuntimeProblem, match="otlp_endpoint is 'localhost:4317'; it must be a URL such as"):
        ServerConfig(otlp_endpoint="localhost:4317")


@pytest.mark.slow
def test_nothing_is_imported_for_servers_without_it() -> None:
    code = "import sys, smelt.runtime.serve.app as _; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
