"""A server's manners: who is let in, who has left, and what a request may cost."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import sys
import threading
import time
from typing import Any

import httpx2
import pytest
from smelt.runtime import SamplingParams
from smelt.runtime.engine.engine import Engine
from smelt.runtime.serve.http.config import ServerConfig
from smelt.runtime.serve.http.log import JsonFormatter
from smelt.system.errors import SmeltError

from ...tiny import SMELT_6M
from .serving import Serving, served, serving

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


def _until(holds: Any, seconds: float = 20.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if holds():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(stream: bool, server: Serving, engine: Engine) -> None:
    assert _until(lambda: not engine.has_work)
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request(
        "POST", "/v1/completions", json.dumps({**LONG, "stream": stream}), {"Content-Type": "application/json"}
    )
    assert _until(lambda: len(engine.scheduler.running) == 1)
    steps = 0

    def count(_: Any) -> None:
        nonlocal steps
        steps += 1

    engine.core.on_step = count
    connection.close()
    if connection.sock is not None:
        connection.sock.close()
    assert _until(lambda: not engine.has_work), "the request runs to its end"
    engine.core.on_step = None
    engine.cache.check([])
    assert steps < 800, "it ended by itself"
    assert _until(lambda: server.server.gate.inside == 0)


@pytest.mark.slow
def test_a_reader_that_does_not_read_holds_nobody(server: Serving, engine: Engine) -> None:
    """Its socket fills up; others are served meanwhile, and its request ends by itself."""
    host, port = server.url.removeprefix("http://").split(":")
    slow = socket.create_connection((host, int(port)))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({**LONG, "stream": True, "logprobs": 20}).encode()
    slow.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        + str(len(body)).encode() + b"\r\n\r\n" + body
    )  # fmt: skip
    found = httpx2.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 8}, timeout=60)
    assert found.status_code == 200
    assert _until(lambda: not engine.has_work, 60)
    slow.close()
    assert _until(lambda: server.server.gate.inside == 0)


def test_keys_are_needed_where_there_are_some(engine: Engine) -> None:
    with serving([served(engine)], ServerConfig(api_keys=("first", "second"))) as found:
        url = f"{found.url}/v1/models"
        assert httpx2.get(url).status_code == 401
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}, {"x-api-key": "firs"}):
            refused = httpx2.get(url, headers=headers)
            assert refused.status_code == 401
            assert "API key" in refused.json()["error"]["message"]
        assert httpx2.post(f"{found.url}/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": "Bearer first"}, {"authorization": "bearer second"}, {"x-api-key": "second"}):
            assert httpx2.get(url, headers=headers).status_code == 200
        for path in ("/health", "/ready", "/version"):
            assert httpx2.get(f"{found.url}{path}").status_code == 200


@pytest.mark.parametrize("has_length", [True, False])
def test_large_bodies_are_refused_before_they_are_read(has_length: bool, engine: Engine) -> None:
    with serving([served(engine)], ServerConfig(max_body_bytes=2000)) as found:
        body = json.dumps({"prompt": "a" * 3000}).encode()
        content = body if has_length else iter([body[:1500], body[1500:]])
        answer = httpx2.post(
            f"{found.url}/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "The request's body has more than 2000 bytes."
        assert httpx2.post(f"{found.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_more_requests_than_allowed_are_asked_to_come_back(engine: Engine) -> None:
    with serving([served(engine)], ServerConfig(max_requests=2)) as found:

        async def many() -> list[httpx2.Response]:
            async with httpx2.AsyncClient(timeout=60) as client:
                return list(
                    await asyncio.gather(
                        *(
                            client.post(f"{found.url}/v1/completions", json={**LONG, "max_tokens": 300})
                            for _ in range(6)
                        )
                    )
                )

        answers = asyncio.run(many())
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert found.server.gate.inside == 0


def test_the_engines_own_queue_is_a_limit_too() -> None:
    engine = Engine(SMELT_6M, max_num_seqs=1, max_waiting=1, quiet=True)
    with serving([served(engine)]) as found:

        async def many() -> list[int]:
            async with httpx2.AsyncClient(timeout=60) as client:
                answers = await asyncio.gather(
                    *(client.post(f"{found.url}/v1/completions", json={**LONG, "max_tokens": 200}) for _ in range(8))
                )
                return [answer.status_code for answer in answers]

        statuses = asyncio.run(many())
        assert set(statuses) == {200, 429}
        assert statuses.count(429) >= 4


@pytest.mark.slow
def test_a_draining_server_finishes_what_runs(engine: Engine) -> None:
    with serving([served(engine)]) as found:
        answers: list[httpx2.Response] = []
        asked = threading.Thread(
            target=lambda: answers.append(
                httpx2.post(f"{found.url}/v1/completions", json={**LONG, "max_tokens": 400}, timeout=60)
            )
        )
        asked.start()
        assert _until(lambda: found.server.gate.inside == 1)
        found.server.gate.draining = True
        assert httpx2.get(f"{found.url}/ready").status_code == 503
        assert httpx2.get(f"{found.url}/health").status_code == 200
        refused = httpx2.post(f"{found.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        asked.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 400


def test_pages_of_other_origins_are_let_in_by_name_only(engine: Engine) -> None:
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    with serving([served(engine)]) as found:
        answer = httpx2.options(f"{found.url}/v1/completions", headers=asked)
        assert "access-control-allow-origin" not in answer.headers
    with serving([served(engine)], ServerConfig(allowed_origins=("https://example.org",))) as found:
        answer = httpx2.options(f"{found.url}/v1/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        other = httpx2.options(f"{found.url}/v1/completions", headers={**asked, "Origin": "https://example.com"})
        assert "access-control-allow-origin" not in other.headers


def test_a_request_keeps_the_id_it_comes_with(server: Serving) -> None:
    for given, is_kept in (("abc-1.2_X", True), ("x" * 65, False), ("a b", False), ("a\tb", False)):
        found = httpx2.post(
            f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": given}
        )
        assert (found.headers["x-request-id"] == given) == is_kept
        assert found.json()["id"] == f"cmpl-{found.headers['x-request-id']}"


def test_an_id_may_come_twice_at_the_same_time(server: Serving) -> None:
    async def both() -> list[int]:
        async with httpx2.AsyncClient(timeout=60) as client:
            asked = [
                client.post(
                    f"{server.url}/v1/completions", json={**LONG, "max_tokens": 50}, headers={"X-Request-Id": "twice"}
                )
                for _ in range(2)
            ]
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    assert asyncio.run(both()) == [200, 200]


def test_errors_of_http_have_the_apis_form(server: Serving) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/../etc/passwd", 404),
    ):
        found = httpx2.request(method, f"{server.url}{path}")
        assert found.status_code == status
        assert found.json()["error"]["message"]
    found = httpx2.post(f"{server.url}/v1/completions", content=b"{no", headers={"Content-Type": "application/json"})
    assert found.status_code == 400
    assert "not JSON" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "x", "max_token": 3}, "Unknown field 'max_token'; did you mean max_tokens?"),
        ({"prompt": "x", "guided_json": {}}, "Unknown field 'guided_json'; use structured_outputs."),
        ({"prompt": "x", "extra_body": {}}, "put its fields beside the others"),
        ({"prompt": "x", "zzzzzzzz": 1}, "Unknown field 'zzzzzzzz'; leave it out."),
        (
            {
                "prompt": "x",
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "foo": 1}},
            },
            "Unknown field 'response_format.json_schema.foo'; leave it out.",
        ),
        (None, "it is not sent as application/json"),
    ],
)
def test_what_is_wrong_with_a_body_says_what_to_do(body: Any, said: str, server: Serving) -> None:
    url = f"{server.url}/v1/completions"
    found = httpx2.post(url, content=b'{"prompt": "x"}') if body is None else httpx2.post(url, json=body)
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"]
)
@pytest.mark.parametrize("kind", ["text/plain", "application/xml", None])
def test_bodies_of_other_types_are_refused(path: str, kind: str | None, server: Serving) -> None:
    found = httpx2.post(
        f"{server.url}{path}", content=b'{"input": "a"}', headers={"Content-Type": kind} if kind else {}
    )
    assert found.status_code == 400, found.text


def test_deeply_nested_json_is_refused(server: Serving) -> None:
    body = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    found = httpx2.post(f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == 400


def test_concurrent_streams_get_their_own_tokens(server: Serving, engine: Engine) -> None:
    """In float32 a request's tokens do not depend on the others'; each is that of the engine alone."""
    prompts = [f"Story {i}: the" for i in range(24)]
    wanted = [
        engine.generate(prompt, SamplingParams(temperature=0, max_tokens=10 + i))[0].outputs[0].text
        for i, prompt in enumerate(prompts)
    ]

    async def text(client: httpx2.AsyncClient, i: int) -> str:
        found = ""
        body = {"prompt": prompts[i], "temperature": 0, "max_tokens": 10 + i, "stream": True}
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["choices"][0]["text"]
        return found

    async def every() -> list[str]:
        async with httpx2.AsyncClient(timeout=60) as client:
            return list(await asyncio.gather(*(text(client, i) for i in range(len(prompts)))))

    assert asyncio.run(every()) == wanted


@pytest.mark.parametrize(
    ("change", "says"),
    [({"port": 70000}, "port"), ({"api_keys": ("",)}, "API key"), ({"metrics_prefix": "a b"}, "metrics_prefix")],
)
def test_wrong_options_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SmeltError, match=says):
        ServerConfig(**change)


def test_a_deadline_ends_a_request_and_frees_its_blocks(server: Serving, engine: Engine) -> None:
    found = httpx2.post(f"{server.url}/v1/completions", json={**LONG, "deadline": 0.05}, timeout=60)
    assert found.status_code == 408
    assert found.json()["error"]["code"] == "deadline_exceeded"
    assert found.headers["x-should-retry"] == "false"
    assert _until(lambda: not engine.has_work)
    engine.cache.check([])
    with httpx2.stream(
        "POST", f"{server.url}/v1/completions", json={**LONG, "deadline": 0.2, "stream": True}, timeout=60
    ) as streamed:
        events = [json.loads(line[6:]) for line in streamed.iter_lines() if line.startswith("data: {")]
    assert len(events) > 1
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    in_time = httpx2.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 3, "deadline": 50}, timeout=60)
    assert in_time.status_code == 200
    assert httpx2.post(f"{server.url}/v1/completions", json={**LONG, "deadline": 0}).status_code == 400


def test_requests_are_logged_with_their_numbers(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "smelt.serve.requests")
    headers = {"X-Request-Id": "my-own"}
    httpx2.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 3}, headers=headers, timeout=60)
    httpx2.post(f"{server.url}/v1/completions%0Asmelt: hacked", json={})
    httpx2.get(f"{server.url}/health")
    httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_token": 3})
    assert _until(lambda: len(caplog.records) == 3)
    first, second, third = (json.loads(JsonFormatter().format(record)) for record in caplog.records)
    assert first["seconds"] > 0
    assert {key: first[key] for key in ("request_id", "method", "path", "status", "model", "completion_tokens")} == {
        "request_id": "my-own", "method": "POST", "path": "/v1/completions", "status": 200, "model": "smelt-6m",
        "completion_tokens": 3,
    }  # fmt: skip
    assert first["prompt_tokens"] == 4
    assert first["finish_reasons"] == ["length"]
    assert first["level"] == "info"
    assert second["status"] == 404
    assert third["status"] == 400
    assert third["error_code"] == "unknown_parameter"
    assert "max_tokens" in third["error"]
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_failures_are_logged_as_one_json_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("smelt.serve", logging.ERROR, "", 0, "failed %s", ("here",), sys.exc_info())
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text)["message"] == "failed here"
    assert "ValueError: two\nlines" in json.loads(text)["exception"]
