"""``smelt serve`` as a process: options, signals, and a restart after it was killed."""

from __future__ import annotations

import signal
import socket
import threading

import httpx2
import pytest
from smelt.compress.cli import app
from typer.testing import CliRunner

from ...serve_process import started

LONG = {"prompt": "Once upon a time", "max_tokens": 600, "temperature": 0, "ignore_eos": True}


def test_running_requests_end_after_sigterm_and_new_ones_are_refused() -> None:
    with started("--max-model-len", "700") as (process, url):
        answers: list[httpx2.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(httpx2.post(f"{url}/v1/completions", json=LONG, timeout=60))
        )
        thread.start()
        while httpx2.get(f"{url}/load").json()["server_load"] == 0:
            pass
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 600
        assert process.wait(20) == 0


@pytest.mark.slow
def test_what_has_not_ended_in_time_after_sigterm_is_answered_with_an_error() -> None:
    """In the API's form, as a stream's last event, and without a traceback."""
    many = {**LONG, "max_tokens": 900, "n": 16}
    with started("--drain-seconds", "0.2", "--max-num-seqs", "64") as (process, url):
        whole: list[httpx2.Response] = []
        events: list[str] = []

        def stream() -> None:
            with httpx2.stream("POST", f"{url}/v1/completions", json={**many, "stream": True}, timeout=60) as response:
                events.extend(response.iter_lines())

        threads = [
            threading.Thread(target=lambda: whole.append(httpx2.post(f"{url}/v1/completions", json=many, timeout=60))),
            threading.Thread(target=stream),
        ]
        for thread in threads:
            thread.start()
        while not events or httpx2.get(f"{url}/load").json()["server_load"] < 2:
            pass
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert process.wait(20) == 0
    assert whole[0].status_code == 503
    assert "did not finish this request" in whole[0].json()["error"]["message"]
    said = [event for event in events if event]
    assert "did not finish this request" in said[-2]
    assert said[-1] == "data: [DONE]"


@pytest.mark.slow
def test_keys_of_the_variable_may_have_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMELT_API_KEY", "correct horse\nbattery")
    with started() as (_, url):
        for key, status in (("correct horse", 200), ("battery", 200), ("correct", 401), ("horse", 401)):
            got = httpx2.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert got.status_code == status, key


@pytest.mark.slow
def test_a_killed_server_is_started_again_and_serves() -> None:
    for _ in range(2):
        with started() as (process, url):
            body = {**LONG, "max_tokens": 8}
            assert httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            threading.Thread(target=lambda url=url: _ignored(url), daemon=True).start()
            while httpx2.get(f"{url}/load").json()["server_load"] == 0:
                pass
            process.send_signal(signal.SIGKILL)
            assert process.wait(20) == -signal.SIGKILL


def _ignored(url: str) -> None:
    try:
        httpx2.post(f"{url}/v1/completions", json=LONG, timeout=60)
    except httpx2.HTTPError:
        return


@pytest.mark.slow
def test_several_models_answer_by_their_names() -> None:
    with started("--served-model-name", "first", "--model", "second=builtin:smelt-6m", "--max-num-seqs", "4") as (
        _,
        url,
    ):
        assert [each["id"] for each in httpx2.get(f"{url}/v1/models").json()["data"]] == ["first", "second"]
        texts = {
            httpx2.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 8, "model": name}, timeout=60).json()[
                "choices"
            ][0]["text"]
            for name in ("first", "second")
        }
        assert len(texts) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "second"], "NAME=PATH"),
        (["--model", "smelt-6m=builtin:smelt-6m"], "another model is named smelt-6m"),
        (["--model", "b=./not-there"], "not found"),
        (["--tool-call-parser", "qwen"], "tool_call_parser is 'qwen'"),
        (["--chat-template", "{% if x %}"], "the chat template: is not a Jinja template"),
        (["--chat-template", "not-there.jinja"], "the chat template not-there.jinja cannot be read"),
        (["--lora", "mine=./not-there"], "adapter_config.json"),
        (["--model", "b=builtin:smelt-6m", "--max-models", "1"], "--max-models is 1, but 2 models are named"),
        (["--log-format", "xml"], "log_format is 'xml'"),
        (["--policy", "fifo"], "policy is 'fifo'"),
        (["--host", "203.0.113.9"], "cannot listen on 203.0.113.9"),
    ],
)
def test_wrong_options_get_one_sentence(options: list[str], says: str) -> None:
    found = CliRunner().invoke(app, ["serve", "builtin:smelt-6m", *options])
    assert found.exit_code == 1
    assert says in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = CliRunner().invoke(app, ["serve", "builtin:smelt-6m", "--port", str(port)])
        assert found.exit_code == 1
        assert f"cannot listen on 127.0.0.1 port {port}" in found.stderr
