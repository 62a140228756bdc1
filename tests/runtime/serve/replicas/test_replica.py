"""A replica without Ray: the application's own answers, and metrics as one page."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from smelt.runtime.engine.setup.config import EngineConfig
from smelt.runtime.serve.http.config import ServerConfig
from smelt.runtime.serve.replicas.merged_metrics import merged
from smelt.runtime.serve.replicas.replica import LOGGED, EngineReplica, HttpRequest, ReplicaPlan

from ....tiny import SMELT_6M

ASK = {"prompt": "The city of", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def replica() -> EngineReplica:
    engine = EngineConfig(dtype="float32", max_num_seqs=4, quiet=True)
    return EngineReplica(ReplicaPlan({"smelt-6m": SMELT_6M}, {}, engine, ServerConfig()))


def asked(**changes: Any) -> HttpRequest:
    headers = [(b"content-type", b"application/json")]
    return HttpRequest("POST", "/v1/completions", b"", headers, json.dumps(ASK | changes).encode())


async def answer(replica: EngineReplica, request: HttpRequest) -> tuple[int, bytes]:
    start, *bodies, logged, end = [message async for message in replica.asgi(request)]
    assert logged["type"] == LOGGED
    if start["status"] == 200:
        assert (logged["fields"]["model"], logged["fields"]["completion_tokens"]) == ("smelt-6m", 6)
    return start["status"], b"".join(message["body"] for message in [*bodies, end])


def test_it_answers_as_the_application_does(replica: EngineReplica) -> None:
    status, body = asyncio.run(answer(replica, asked()))
    assert status == 200
    whole = json.loads(body)["choices"][0]["text"]
    status, body = asyncio.run(answer(replica, asked(stream=True)))
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert asyncio.run(answer(replica, asked(wrong=1)))[0] == 400
    replica.check_health()


def test_a_request_that_is_given_up_ends(replica: EngineReplica) -> None:
    model = next(iter(replica._server.models))

    async def give_up() -> None:
        messages = replica.asgi(asked(max_tokens=900, ignore_eos=True, stream=True))
        async for message in messages:
            if message["type"] == "http.response.body":
                break
        await messages.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)

    asyncio.run(give_up())
    ends = time.monotonic() + 20
    while model.engine.has_work:
        assert time.monotonic() < ends
        time.sleep(0.01)
    model.engine.cache.check([])


def test_metrics_of_replicas_are_one_page(replica: EngineReplica) -> None:
    page = replica._server.metrics.text().decode()
    found = list(text_string_to_metric_families(merged({"a": page, "b": page}).decode()))
    alone = list(text_string_to_metric_families(page))
    assert {family.name for family in found} == {family.name for family in alone}
    assert sum(len(family.samples) for family in found) == 2 * sum(len(family.samples) for family in alone)
    assert {sample.labels["replica"] for family in found for sample in family.samples} == {"a", "b"}
