"""Two replicas on Ray Serve, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ....serve_process import started

pytest.importorskip("ray.serve", reason="needs Ray Serve, which is in the dev extra")
pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"max_tokens": 900, "temperature": 0, "ignore_eos": True}
REPLICA = "x-smelt-replica"


def replicated(*options: str) -> contextlib.AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    return started("--replicas", "2", *options, ends_gently=True)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with replicated("--max-num-seqs", "16", "--drain-seconds", "1", "--dtype", "float32") as (_, address):
        yield address


def ask(url: str, prompt: str, session: str | None = None, **changes: Any) -> httpx2.Response:
    headers = {} if session is None else {"x-session-id": session}
    return httpx2.post(
        f"{url}/v1/completions",
        json={**LONG, "max_tokens": 4, "prompt": prompt, **changes},
        headers=headers,
        timeout=120,
    )


def replica_processes() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.joinpath("cmdline").read_bytes().startswith(b"ray::ServeReplica:smelt"):
                found.append(int(path.name))
    return found


def test_sessions_keep_their_replica_and_its_prefix(url: str) -> None:
    homes = set()
    for number in range(8):
        story = f"{number} is a number. " * 20
        first = ask(url, story)
        again = ask(url, story + first.json()["choices"][0]["text"] + " And")
        assert again.headers[REPLICA] == first.headers[REPLICA]
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
        homes.add(first.headers[REPLICA])
    assert len(homes) == 2, "both have some"
    named = {ask(url, str(number), session="mine").headers[REPLICA] for number in range(6)}
    assert len(named) == 1


def test_a_beginning_that_all_share_does_not_fill_one_replica(url: str) -> None:
    story = "Answer the question. " * 20
    answers: list[httpx2.Response] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(ask(url, f"{story}{n}", max_tokens=60))) for n in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.headers[REPLICA] for answer in answers}) == 2


def test_answers_and_errors_are_those_of_one_server(url: str) -> None:
    assert [each["id"] for each in httpx2.get(f"{url}/v1/models").json()["data"]] == ["smelt-6m"]
    wrong = ask(url, "a", wrong=1)
    assert wrong.status_code == 400
    assert wrong.json()["error"]["code"] == "unknown_parameter"
    message = httpx2.post(f"{url}/v1/messages", json={}, timeout=60)
    assert message.json()["type"] == "error"
    assert httpx2.get(url).status_code == 200
    page = httpx2.get(f"{url}/metrics").text
    assert len(set(re.findall(r'smelt:num_requests_running\{model_name="smelt-6m",replica="(\w+)"\}', page))) == 2


def test_a_client_that_leaves_ends_its_request(url: str) -> None:
    with httpx2.stream("POST", f"{url}/v1/completions", json={**LONG, "prompt": "a", "stream": True}) as found:
        next(found.iter_lines())
    ends = time.monotonic() + 10
    while True:
        running = re.findall(r"smelt:num_requests_running\{.*\} (\S+)", httpx2.get(f"{url}/metrics").text)
        if len(running) == 2 and set(running) == {"0.0"}:
            return
        assert time.monotonic() < ends
        time.sleep(0.2)


def test_a_killed_replica_loses_only_its_running_requests(url: str) -> None:
    """Streams that had begun get an error event, whole answers are computed again, and a new replica comes."""
    assert len(replica_processes()) == 2
    wanted = {number: ask(url, f"{number} is", max_tokens=900).json()["choices"][0]["text"] for number in range(8)}
    streams: dict[int, list[dict[str, Any]]] = {number: [] for number in wanted}
    wholes: dict[int, httpx2.Response] = {}

    def stream(number: int) -> None:
        body = {**LONG, "prompt": f"{number} is", "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as found:
            for line in found.iter_lines():
                if line.startswith("data: {"):
                    streams[number].append(json.loads(line[6:]))

    def whole(number: int) -> None:
        wholes[number] = ask(url, f"{number} is", max_tokens=900)

    threads = [threading.Thread(target=work, args=(number,)) for number in wanted for work in (stream, whole)]
    for thread in threads:
        thread.start()
    while not all(streams.values()):
        time.sleep(0.005)
    os.kill(replica_processes()[0], signal.SIGKILL)
    for thread in threads:
        thread.join(120)

    lost = {number for number, events in streams.items() if "error" in events[-1]}
    assert lost
    assert lost != set(wanted)
    for number, events in streams.items():
        if number in lost:
            assert events[-1]["error"]["code"] == "replica_died"
        else:
            assert "".join(event["choices"][0]["text"] for event in events) == wanted[number]
    assert {number: found.json()["choices"][0]["text"] for number, found in wholes.items()} == wanted

    ends = time.monotonic() + 60
    while len(replica_processes()) < 2:
        assert time.monotonic() < ends, "no new replica"
        time.sleep(0.2)


def test_what_a_full_replica_refuses_goes_to_the_other_one() -> None:
    with replicated("--max-num-seqs", "1", "--max-waiting", "1") as (_, address):
        homes = {ask(address, "a", session=f"{number}").headers[REPLICA] for number in range(8)}
        assert len(homes) == 2
        for number in range(3):
            found: list[httpx2.Response] = []
            asked = {"session": f"{number}", "max_tokens": 900}
            threads = [
                threading.Thread(target=lambda asked=asked, found=found: found.append(ask(address, "a", **asked)))
                for _ in range(3)
            ]
            for thread in threads:
                thread.start()
                time.sleep(0.05)  # the first one computes, the second one waits, and the third one is too many
            for thread in threads:
                thread.join()
            assert [each.status_code for each in found] == [200] * 3
            assert {each.headers[REPLICA] for each in found} == homes


def test_what_runs_ends_after_sigterm_and_nothing_stays() -> None:
    others = set(replica_processes())
    with replicated("--max-num-seqs", "4") as (process, address):
        answers: list[httpx2.Response] = []
        thread = threading.Thread(target=lambda: answers.append(ask(address, "a", max_tokens=900)))
        thread.start()
        while httpx2.get(f"{address}/load").json()["server_load"] == 0:
            pass
        mine = set(replica_processes()) - others
        assert len(mine) == 2
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert answers[0].json()["usage"]["completion_tokens"] == 900
        assert process.wait(60) == 0
    assert not mine & set(replica_processes())


def test_what_does_not_end_after_sigterm_is_answered_with_an_error() -> None:
    with replicated("--drain-seconds", "0.5") as (process, address):
        answers: list[httpx2.Response] = []
        events: list[str] = []

        def stream() -> None:
            body = {**LONG, "prompt": "The river", "n": 16, "stream": True}
            with httpx2.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
                events.extend(line for line in response.iter_lines() if line)

        threads = [
            threading.Thread(target=lambda: answers.append(ask(address, "The city", max_tokens=900, n=16))),
            threading.Thread(target=stream),
        ]
        for thread in threads:
            thread.start()
        while not events or httpx2.get(f"{address}/load").json()["server_load"] < 2:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert process.wait(60) == 0
    assert answers[0].status_code == 503
    assert "did not finish this request" in answers[0].json()["error"]["message"]
    assert "did not finish this request" in events[-2]
    assert events[-1] == "data: [DONE]"


def test_replicas_of_two_ranks_are_replaced_if_a_rank_is_lost() -> None:
    with replicated("--max-num-seqs", "4", "--tp", "2", "--dtype", "float32") as (process, address):
        wanted = ask(address, "The river").json()["choices"][0]["text"]
        ranks = [rank for replica in replica_processes() for rank in _children(replica)]
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        # The replica without it answers nothing: each request goes to the other one.
        assert {ask(address, "The river", session=f"{number}").status_code for number in range(8)} == {200}
        ends = time.monotonic() + 120
        while len(now := {rank for replica in replica_processes() for rank in _children(replica)} - set(ranks)) < 1:
            assert time.monotonic() < ends, "no new replica"
            time.sleep(0.2)
        for number in range(4):
            again = ask(address, "The river", session=f"{number}")
            assert again.json()["choices"][0]["text"] == wanted
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    ends = time.monotonic() + 10
    while any(Path(f"/proc/{rank}").exists() for rank in {*ranks, *now}):
        assert time.monotonic() < ends, "a rank is left"
        time.sleep(0.2)


def _children(parent: int) -> list[int]:
    """The ranks that a replica has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            above = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            if above == parent and b"smelt.runtime.engine.ranks.worker" in path.joinpath("cmdline").read_bytes():
                found.append(int(path.name))
    return found
