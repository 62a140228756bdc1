"""`smelt bench --server` counts what comes, and says what a server cannot do. Speed itself is no test's business."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from smelt.compress.cli import app
from smelt.runtime.measure.bench import BenchResult, table
from smelt.runtime.measure.load_result import LoadResult, RequestTimes
from smelt.runtime.measure.machine_rates import MachineSpeed
from smelt.runtime.measure.server_bench import ServerBench, ServerBenchResult, measure_server, server_table
from smelt.runtime.measure.server_client import ServerClient, ServerProblem
from smelt.runtime.measure.server_info import ServerInfo
from smelt.runtime.requests.trace import Arrival
from smelt.runtime.serve.http.config import ServerConfig
from smelt.system.errors import SmeltError
from typer.testing import CliRunner

from ..serve.serving import Serving, serving
from .proxy import Proxy, listening, without

SMALL = ["--prompt", "7", "--output", "4", "--requests", "4"]


def _bench(url: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--server", url, *options])


def _refusal(result: Result) -> str:
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("smelt: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def _lasting(notes: list[str]) -> list[str]:
    """Those that do not depend on how busy the machine is."""
    return [note for note in notes if not note.startswith("sent several tokens of")]


def test_every_token_is_counted_as_on_an_engine(server: Serving, tmp_path: Path) -> None:
    rows = ["2023-11-16 18:17:03.0,5,3", "2023-11-16 18:17:03.25,9,2", "2023-11-16 18:17:04.0,5000,2"]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    loads = ["--concurrency", "1", "--concurrency", "3", "--trace", str(tmp_path / "trace.csv")]
    done = _bench(server.url, *SMALL, *loads, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [
        (load["name"], load["requests"], load["prompt_tokens"], load["output_tokens"]) for load in found["loads"]
    ] == [
        ("1 at once", 4, 28, 16),
        ("3 at once", 4, 28, 16),
        ("trace", 2, 14, 5),
    ]
    for load in found["loads"]:
        assert load.keys() == {each.name for each in dataclasses.fields(LoadResult)}
        assert load["output_rate"] == pytest.approx(load["output_tokens"] / load["seconds"])
        assert 0 < load["first_token_p50"] <= load["first_token_p99"] <= load["completion_p99"] <= load["seconds"]
    assert found["loads"][2]["seconds"] >= 0.25
    assert _lasting(found["notes"]) == []
    assert found["server"] | {"version": None} == {
        "url": server.url,
        "program": "Smelt",
        "version": None,
        "model": "smelt-6m",
        "root": "smelt-6m",
        "longest": 1024,
    }
    assert found["server"]["version"]


def test_the_prompts_are_random_token_ids_and_the_outputs_have_their_length(server: Serving) -> None:
    proxy = Proxy(server.url)
    with listening(proxy) as url, ServerBench(url + "/v1/") as bench:
        proxy.passed.clear()
        proxy.connections.clear()
        proxy.most_inside = 0
        arrivals = [Arrival(0, length, output) for length, output in ((40, 3), (41, 5), (42, 2), (43, 9), (44, 4))]
        found = bench.run_load("five", arrivals, 3)
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in proxy.passed) == [
        (each.prompt, each.output) for each in sorted(arrivals, key=lambda arrival: arrival.prompt)
    ]
    assert len({tuple(body["prompt"][:16]) for body in proxy.passed}) == 5, "prompts share a prefix"
    assert found.output_tokens == 3 + 5 + 2 + 9 + 4
    assert proxy.most_inside == 3
    assert len(proxy.connections) == 3, "connections are used again"


def test_arrivals_do_not_wait_for_each_other(server: Serving) -> None:
    proxy = Proxy(server.url)
    with listening(proxy) as url, ServerBench(url) as bench:
        proxy.most_inside = 0
        found = bench.run_load("trace", [Arrival(0, 8, 60)] * 6, None)
    assert proxy.most_inside == 6
    assert (found.requests, found.output_tokens) == (6, 360)


def test_the_tables_of_an_engine_and_of_a_server_can_be_read_line_by_line() -> None:
    load = LoadResult.of("2 at once", [RequestTimes(0, 5, [0.1, 0.2]), RequestTimes(0, 5, [0.1, 0.25])], 0.3)
    info = ServerInfo("http://here:8000", "vLLM", "0.19.1", "my-llama", None, 2048)
    ours = table(BenchResult(MachineSpeed(1e9, 1e12, "float32", "cpu"), 1234.4, 56.78, 0.5, 0.5, [load])).splitlines()
    theirs = server_table(ServerBenchResult(info, 1234.4, 56.78, [load], ["is slow"])).splitlines()
    assert theirs[:4] == [
        "server    vLLM 0.19.1 at http://here:8000, model my-llama",
        "prefill   1234 tokens/s alone",
        "decode    56.8 tokens/s alone",
        "note      the server is slow",
    ]
    assert ours[-3:] == theirs[-3:]
    assert [line.split(",")[0] for line in ours[1:3]] == theirs[1:3]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("missing", "notes"),
    [
        (("ids",), ["takes no prompts of token ids"]),
        (("ignore_eos",), ["does not take ignore_eos"]),
        (("stream_options",), ["does not say how many tokens"]),
        (("continuous_usage_stats",), []),
        (
            ("ids", "ignore_eos", "stream_options"),
            ["takes no prompts of token ids", "does not take ignore_eos", "does not say how many tokens"],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_a_server_that_can_do_less_is_measured_and_it_is_said(
    missing: tuple[str, ...], notes: list[str], server: Serving
) -> None:
    proxy = Proxy(server.url, change=without(*missing))
    with listening(proxy) as url, ServerBench(url) as bench:
        found = measure_server(bench, prompt=50, output=4, concurrencies=[2], requests=3, repeats=1)
    for note in notes:
        assert any(sentence.startswith(note) for sentence in found.notes), found.notes
    assert len([each for each in _lasting(found.notes) if not each.startswith("ended")]) == len(notes)
    (load,) = found.loads
    assert load.requests == 3
    assert load.output_tokens <= 12
    if "ids" in missing and "stream_options" not in missing:
        asked = [body["prompt"] for body in proxy.passed[-3:]]
        model = next(iter(server.models))
        assert load.prompt_tokens == sum(len(model.encode(text)) for text in asked)
        assert load.prompt_tokens == pytest.approx(150, rel=0.3)
    else:
        assert load.prompt_tokens == 150


def test_outputs_that_end_early_are_counted_as_they_came(server: Serving) -> None:
    proxy = Proxy(server.url, change=lambda body: {**body, "max_tokens": min(3, body["max_tokens"])})
    with listening(proxy) as url, ServerBench(url) as bench:
        found = measure_server(bench, prompt=9, output=6, concurrencies=[2], requests=4, repeats=2)
    assert found.loads[0].output_tokens == 12
    # Of the warm-up, the two alone and the four.
    assert _lasting(found.notes) == ["ended 7 outputs before they had the length that was asked for"]


def _no_continuous_usage(body: dict[str, Any]) -> dict[str, Any] | str:
    return "unknown field" if "continuous_usage_stats" in body.get("stream_options", {}) else body


@pytest.mark.parametrize(
    ("change", "time_between"), [(dict, "0"), (_no_continuous_usage, "each answer's mean")], ids=["parts", "whole"]
)
def test_tokens_that_come_several_at_a_time_are_counted(change: Any, time_between: str, server: Serving) -> None:
    with listening(_Pairs(Proxy(server.url, change=change))) as url, ServerBench(url) as bench:
        found = measure_server(bench, prompt=9, output=8, concurrencies=[1], requests=2, repeats=1)
    assert found.loads[0].output_tokens == 16
    between = found.loads[0].between_tokens_p50
    assert between is not None
    assert (between == 0) == (time_between == "0")
    assert found.decode_rate > 0
    assert found.notes == [f"sent several tokens of 4 answers at once: the time between them is {time_between}"]


def _ignores_continuous_usage(body: dict[str, Any]) -> dict[str, Any]:
    options = {
        name: value for name, value in body.get("stream_options", {}).items() if name != "continuous_usage_stats"
    }
    return {**body, "stream_options": options} if "stream_options" in body else body


def test_a_server_that_accepts_vllms_field_and_does_not_know_it(server: Serving) -> None:
    """llama.cpp's: the numbers of tokens come with the last part, and times with each part."""
    with listening(Proxy(server.url, change=_ignores_continuous_usage)) as url, ServerBench(url) as bench:
        assert bench.features.counts == "whole"
        found = measure_server(bench, prompt=9, output=30, concurrencies=[1], requests=2, repeats=1)
    assert found.loads[0].output_tokens == 60
    assert found.decode_rate is not None
    assert found.loads[0].first_token_p50 < found.loads[0].completion_p50


class _Pairs:
    """Merges the texts of two events into one, as a server does for a client that reads slowly."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        held: list[dict[str, Any]] = []

        async def merged(message: dict[str, Any]) -> None:
            body = message.get("body", b"")
            if not body.startswith(b"data: {"):
                await send(message)
                return
            chunk = json.loads(body.removeprefix(b"data: "))
            if chunk["choices"]:
                held.append(chunk)
                if len(held) < 2 and chunk["choices"][0]["finish_reason"] is None:
                    return
                chunk["choices"][0]["text"] = "".join(each["choices"][0]["text"] for each in held)
                held.clear()
            await send({**message, "body": b"data: " + json.dumps(chunk).encode() + b"\n\n"})

        await self._application(scope, receive, merged)


@pytest.mark.parametrize(
    ("answers", "name", "longest"),
    [
        # As these programs answer.
        (
            {
                "/v1/models": {
                    "object": "list",
                    "data": [{"id": "smelt-6m", "object": "model", "created": 1, "owned_by": "vllm", "root": "/models/six", "parent": None, "max_model_len": 512, "permission": []}],
                },
                "/version": {"version": "0.19.1"},
            },
            "vLLM 0.19.1",
            512,
        ),
        (
            {
                "/v1/models": {
                    "object": "list",
                    "models": [{"name": "six.gguf"}],
                    "data": [{"id": "smelt-6m", "object": "model", "created": 1, "owned_by": "llamacpp", "meta": {"n_ctx_train": 1024}}],
                },
                "/version": {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}},
                "/props": {"build_info": "b7100-0a1b2c3d", "total_slots": 4},
            },
            "llama.cpp b7100-0a1b2c3d",
            None,
        ),
        (
            {"/v1/models": {"data": [{"id": "smelt-6m"}]}, "/version": {}},
            "an unknown program of unknown version",
            None,
        ),
    ],
    ids=["vllm", "llama.cpp", "unknown"],
)  # fmt: skip
def test_servers_are_known_by_what_they_say(
    answers: dict[str, Any], name: str, longest: int | None, server: Serving
) -> None:
    with listening(Proxy(server.url, answers=answers)) as url, ServerBench(url) as bench:
        assert bench.info.full_name == name
        assert bench.info.longest == longest
        assert bench.run_load("one", [Arrival(0, 5, 3)], 1).output_tokens == 3


def test_an_unreachable_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = _refusal(_bench(f"http://127.0.0.1:{port}", *SMALL))
    assert said.startswith(f"smelt: http://127.0.0.1:{port}: cannot be reached (")
    assert said.endswith("); start the server, or correct the address")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://here", "http://", "http://here:port", "runs/w4"])
def test_what_is_no_address(url: str) -> None:
    said = _refusal(_bench(url))
    assert said == f"smelt: --server {url}: is not the address of a server, such as http://localhost:8000"


def test_keys(server: Serving) -> None:
    with serving(list(server.models), ServerConfig(api_keys=("right",))) as guarded:
        assert "needs an API key (401: There is no API key" in _refusal(_bench(guarded.url, *SMALL))
        wrong = _refusal(_bench(guarded.url, *SMALL, "--api-key", "wrong"))
        assert wrong.endswith(
            "refuses the API key (401: The API key is not one of this server's); give one that it knows with --api-key"
        )
        assert "characters that no HTTP header can have" in _refusal(
            _bench(guarded.url, *SMALL, "--api-key", "schlüssel")
        )
        done = _bench(guarded.url, *SMALL, "--concurrency", "1", "--api-key", "right")
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("server    Smelt ")


def test_models(server: Serving) -> None:
    assert _refusal(_bench(server.url, *SMALL, "--model", "other")).endswith(
        ": serves no model 'other'; it serves smelt-6m"
    )
    several = {"/v1/models": {"data": [{"id": "smelt-6m"}, {"id": "other"}]}}
    with listening(Proxy(server.url, answers=several)) as url:
        assert _refusal(_bench(url, *SMALL)).endswith(": serves smelt-6m, other; choose one with --model")
        # A server may list what it does not have.
        assert "refused /v1/completions (404: The model 'other' is not served here" in _refusal(
            _bench(url, *SMALL, "--model", "other")
        )
    for answer, sentence in (
        ({"/v1/models": {"data": []}}, "serves no model; load one there"),
        ({"/v1/models": ["?"]}, "has no /v1/models; give the address of a server with OpenAI's API"),
    ):
        with listening(Proxy(server.url, answers=answer)) as url:
            assert _refusal(_bench(url, *SMALL)) == f"smelt: {url}: {sentence}"


def test_what_is_no_server_with_openais_api(server: Serving) -> None:
    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": b"<html>It works!</html>"})

    with listening(page) as url:
        assert "/v1/models: is not JSON; give the address of a server with OpenAI's API" in _refusal(_bench(url))
    with listening(Proxy(f"{server.url}/nothing")) as url:
        assert "has no /v1/models" in _refusal(_bench(url))


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (b"", "closed the connection in the middle of an answer ("),
        (
            b'data: {"error": {"message": "out of memory.", "type": "server_error", "code": 500}}\n\n',
            "failed in the middle of an answer (out of memory); its log may say why",
        ),
        (b"data: {oops\n\n", "sent a part of a stream that is no JSON object"),
        (b": nothing\n\n", "ended an answer before it was complete; its log may say why"),
    ],
    ids=["closed", "error", "garbled", "ended"],
)
def test_a_failure_in_the_middle_of_an_answer(last: bytes, sentence: str, server: Serving) -> None:
    with listening(Proxy(server.url, breaks_after=5, last=last)) as url:
        said = _refusal(_bench(url, "--prompt", "7", "--output", "20"))
    assert said.startswith(f"smelt: {url}: {sentence}")


def test_a_connection_that_is_closed_as_it_is_used_again() -> None:
    """As llama.cpp's server does after a hundred requests: here after one, when the next has come."""

    async def ask() -> tuple[list[Any], int, str]:
        connections = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await reader.readuntil(b"\r\n\r\n")
            if connections <= 4:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n7")
                await writer.drain()
                await reader.readuntil(b"\r\n\r\n")
            writer.close()

        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with listening, ServerClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}") as client:
            found = [await client.get("/v1/models") for _ in range(4)]
            with pytest.raises(ServerProblem) as raised:
                await client.get("/v1/models")
        return found, connections, str(raised.value)

    found, connections, said = asyncio.run(ask())
    assert found == [7] * 4
    assert connections == 5, "the last request is sent again only once"
    assert "closed the connection in the middle of an answer" in said


def test_a_full_server(server: Serving) -> None:
    with serving(list(server.models), ServerConfig(max_requests=1)) as small:
        said = _refusal(_bench(small.url, "--prompt", "7", "--output", "60", "--concurrency", "4"))
    assert "has no room for another request (429: " in said
    assert said.endswith("; lower the concurrency, or try again later")


def test_lengths_that_the_server_does_not_take(server: Serving) -> None:
    said = _refusal(_bench(server.url, "--prompt", "1000", "--output", "25"))
    assert said.endswith("exceed the server's context length of 1024; lower them")
    # A server that does not say its length says so when it is exceeded.
    unsaid = {"/v1/models": {"data": [{"id": "smelt-6m"}]}}
    with listening(Proxy(server.url, answers=unsaid)) as url:
        said = _refusal(_bench(url, "--prompt", "1000", "--output", "25"))
    assert "refused /v1/completions (400: This model's maximum context length is 1024 tokens" in said


def test_a_failed_request_ends_the_others(server: Serving) -> None:
    """None of them is left running on the server."""
    engine = next(iter(server.models)).engine
    steps = 0

    def count(_: Any) -> None:
        nonlocal steps
        steps += 1

    with ServerBench(server.url) as bench:
        engine.core.on_step = count
        with pytest.raises(SmeltError, match="maximum context length is 1024"):
            bench.run_load("", [*[Arrival(0, 8, 1000)] * 3, Arrival(0.1, 1020, 5)], None)
        ends = time.monotonic() + 20
        while engine.has_work and time.monotonic() < ends:
            time.sleep(0.01)
        assert not engine.has_work
        engine.core.on_step = None
        assert steps < 900, "they ended by themselves"
        # The bench is of use afterwards.
        assert bench.run_load("", [Arrival(0, 8, 2)], 1).output_tokens == 2
