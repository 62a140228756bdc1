"""``/metrics``, read as Prometheus reads it, against what was served."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from smelt.runtime.engine.engine import Engine
from smelt.runtime.serve.http.config import ServerConfig

from ...tiny import REPOSITORY, SMELT_6M
from ..drive import engine as small_engine
from .serving import Serving, served, serving

DASHBOARD = REPOSITORY / "docs" / "dashboards" / "smelt-grafana.json"
PROMPT = "The city of"

# vLLM's names and types, without the prefix, and its histograms' buckets.
FIRST = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
]
BETWEEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
TOKENS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]  # smelt-6m takes 1024
BUCKETS = {
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": BETWEEN,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_params_n": [1, 2, 5, 10, 20],
}
TYPES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "admission_rejections": "counter",
    **dict.fromkeys(BUCKETS, "histogram"),
}
REASONS = {"stop", "length", "abort", "deadline", "error"}
REFUSALS = {"busy", "draining", "invalid", "too_long"}


class Page:
    """What a server's ``/metrics`` says now."""

    def __init__(self, url: str, prefix: str = "smelt") -> None:
        self.response = httpx2.get(f"{url}/metrics")
        assert self.response.status_code == 200
        self.prefix = f"{prefix}:"
        self.all: dict[str, Metric] = {each.name: each for each in text_string_to_metric_families(self.response.text)}

    @property
    def families(self) -> dict[str, Metric]:
        """Those of the server, without the prefix and without the times at which they were created."""
        return {
            name.removeprefix(self.prefix): each
            for name, each in self.all.items()
            if name.startswith(self.prefix) and not name.endswith("_created")
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The value of the only sample that has these labels."""
        values = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == self.prefix + name and labels.items() <= sample.labels.items()
        ]
        assert len(values) == 1, f"{name} {labels}: {values}"
        return values[0]

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values that are not 0, by a label."""
        found = self.families[name].samples
        return {sample.labels[label]: sample.value for sample in found if sample.value}


@pytest.fixture
def fresh(engine: Engine) -> Iterator[Serving]:
    """A server whose counts are 0, on the engine of all."""
    with serving([served(engine)]) as found:
        yield found


def _complete(server: Serving, **body: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 4} | body
    found = httpx2.post(f"{server.url}/v1/completions", json=asked, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


def _eventually(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends, "it has not come to pass"
        time.sleep(0.01)


@contextlib.contextmanager
def _held(engine: Engine) -> Iterator[threading.Event]:
    """The engine waits in the middle of its next step, with its lock held, until this ends; the event says that it does."""
    waits, goes_on = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        waits.set()
        assert goes_on.wait(60)

    engine.core.on_step = wait
    try:
        yield waits
    finally:
        engine.core.on_step = None
        goes_on.set()


@contextlib.contextmanager
def _asking(server: Serving, **body: Any) -> Iterator[list[httpx2.Response]]:
    """A completion that is asked for in a thread; the response is there at the end."""
    found: list[httpx2.Response] = []
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, **body}

    def ask() -> None:
        found.append(httpx2.post(f"{server.url}/v1/completions", json=asked, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    yield found
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("prefix", ["smelt", "vllm"])
def test_names_types_and_buckets_are_vllms(engine: Engine, prefix: str) -> None:
    with serving([served(engine)], ServerConfig(metrics_prefix=prefix)) as found:
        page = Page(found.url, prefix)
    assert {name: family.type for name, family in page.families.items()} == TYPES
    for name, family in page.families.items():
        labels = {label for sample in family.samples for label in sample.labels}
        extra = {"request_success": {"finished_reason"}, "admission_rejections": {"reason"}}
        extra["cache_config_info"] = {"block_size", "num_gpu_blocks"}
        assert labels - {"le"} == {"model_name"} | extra.get(name, set())
        assert {sample.labels["model_name"] for sample in family.samples} == {"smelt-6m"}
    for name, buckets in BUCKETS.items():
        found_buckets = [
            float(sample.labels["le"]) for sample in page.families[name].samples if sample.name.endswith("_bucket")
        ]
        assert found_buckets == [*buckets, float("inf")]


def test_all_is_there_and_zero_before_the_first_request(fresh: Serving, engine: Engine) -> None:
    page = Page(fresh.url)
    for name in TYPES.keys() - {"cache_config_info", "num_preemptions"}:
        assert {sample.value for sample in page.families[name].samples} == {0}, name
    info = page.families["cache_config_info"].samples
    assert [(sample.labels["block_size"], sample.labels["num_gpu_blocks"], sample.value) for sample in info] == [
        (str(engine.cache.block_size), str(engine.cache.blocks), 1)
    ]
    assert {sample.labels["finished_reason"] for sample in page.families["request_success"].samples} == REASONS
    assert {sample.labels["reason"] for sample in page.families["admission_rejections"].samples} == REFUSALS


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.1",
        "*/*",
    ],
    ids=["prometheus-2", "prometheus-3", "curl"],
)
def test_the_format_is_plain_whoever_asks(fresh: Serving, accept: str) -> None:
    """Otherwise Prometheus 2 gets names with an underscore instead of the colon."""
    found = httpx2.get(f"{fresh.url}/metrics", headers={"Accept": accept})
    assert found.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "smelt:num_requests_running{" in found.text


def test_no_key_is_needed(engine: Engine) -> None:
    with serving([served(engine)], ServerConfig(api_keys=("secret",))) as found:
        assert httpx2.get(f"{found.url}/v1/models").status_code == 401
        assert Page(found.url)("num_requests_running") == 0


def test_counts_are_those_of_what_was_served(fresh: Serving) -> None:
    asked = [
        {"max_tokens": 7},
        {"prompt": [PROMPT, "Once upon a time"], "max_tokens": 5},
        {"n": 3, "temperature": 1, "max_tokens": 4},
    ]
    began = time.perf_counter()
    usage = [_complete(fresh, **body)["usage"] for body in asked]
    chat = {
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "stream": True, "ignore_eos": True,
        "temperature": 0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    lines = httpx2.post(f"{fresh.url}/v1/chat/completions", json=chat, timeout=60).text.split("\n\n")
    usage.append(json.loads(lines[-3].removeprefix("data: "))["usage"])
    took = time.perf_counter() - began
    prompts, outputs = (sum(each[kind] for each in usage) for kind in ("prompt_tokens", "completion_tokens"))
    assert outputs == 7 + 2 * 5 + 3 * 4 + 6

    page = Page(fresh.url)
    assert (page("prompt_tokens_total"), page("generation_tokens_total")) == (prompts, outputs)
    assert page.by("request_success", "finished_reason") == {"length": 5}
    for name in BUCKETS.keys() - {"inter_token_latency_seconds"}:
        assert page(f"{name}_count") == 5, name
    assert page("request_prompt_tokens_sum") == prompts
    assert page("request_generation_tokens_sum") == outputs
    assert page("request_params_n_sum") == 1 + 2 + 3 + 1
    assert page("request_params_max_tokens_sum") == 7 + 2 * 5 + 4 + 6
    assert page("request_generation_tokens_bucket", le="5.0") == 2, "the two of 5; the three samples have 12 together"
    parts = {part: page(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode", "inference")}
    assert parts["prefill"] + parts["decode"] == pytest.approx(parts["inference"])
    assert parts["queue"] + parts["inference"] == pytest.approx(page("e2e_request_latency_seconds_sum"))
    assert parts["queue"] + parts["prefill"] == pytest.approx(page("time_to_first_token_seconds_sum"))
    assert min(parts.values()) > 0
    # Two of the five ran at the same time.
    assert page("e2e_request_latency_seconds_sum") < 2 * took


def test_steps_after_the_first_are_timed_also_for_a_slow_reader(fresh: Serving) -> None:
    _complete(fresh, max_tokens=9)
    assert Page(fresh.url)("inter_token_latency_seconds_count") == 8
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{fresh.url}/v1/completions", json=body) as found:
        for _ in found.iter_lines():
            time.sleep(0.02)
    assert Page(fresh.url)("inter_token_latency_seconds_count") == 8 + 29


def test_a_request_that_stops_has_stopped(fresh: Serving) -> None:
    text = _complete(fresh, max_tokens=20)["choices"][0]["text"]
    found = _complete(fresh, max_tokens=20, stop=text[10:14])
    assert found["choices"][0]["finish_reason"] == "stop"
    assert Page(fresh.url).by("request_success", "finished_reason") == {"length": 1, "stop": 1}


def test_samples_that_end_differently_count_as_the_longest(fresh: Serving) -> None:
    body: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 12}
    texts = [choice["text"] for choice in _complete(fresh, **body)["choices"]]
    choices = _complete(fresh, **body, stop=texts[0][5:])["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length", "length"]
    assert Page(fresh.url).by("request_success", "finished_reason") == {"length": 2}


def test_no_limit_is_the_models(fresh: Serving) -> None:
    """A chat without one."""
    body = {"messages": [{"role": "user", "content": "hello"}], "stop": ["e", "a", "\n", " "], "seed": 1}
    found = httpx2.post(f"{fresh.url}/v1/chat/completions", json=body, timeout=60).json()
    assert Page(fresh.url)("request_params_max_tokens_sum") == 1024 - found["usage"]["prompt_tokens"]


def test_the_prefix_cache_is_counted_in_tokens(fresh: Serving) -> None:
    prompt = "The history of metrics is a long one. " * 8
    usage = [_complete(fresh, prompt=prompt, max_tokens=2)["usage"] for _ in range(3)]
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usage]
    assert cached[1] == cached[2] > 16
    page = Page(fresh.url)
    assert page("prefix_cache_queries_total") == sum(each["prompt_tokens"] for each in usage)
    assert page("prefix_cache_hits_total") == sum(cached)


def test_without_a_prefix_cache_nothing_is_looked_up() -> None:
    with serving([served(small_engine(SMELT_6M, enable_prefix_caching=False))]) as found:
        _complete(found)
        page = Page(found.url)
    assert page("prompt_tokens_total") > 0
    assert page("prefix_cache_queries_total") == page("prefix_cache_hits_total") == 0


def test_what_runs_and_waits_is_read_during_a_step(fresh: Serving, engine: Engine) -> None:
    """Whose thread has the engine's lock."""
    with contextlib.ExitStack() as asked, _held(engine) as waits:
        first = asked.enter_context(_asking(fresh, prompt=[7] * 40))
        assert waits.wait(20)
        second = asked.enter_context(_asking(fresh, prompt=[7] * 40))
        _eventually(lambda: Page(fresh.url)("num_requests_waiting") == 1)
        page = Page(fresh.url)
        assert page("num_requests_running") == 1
        assert engine.cache.block_size == 16
        assert page("kv_cache_usage_perc") == pytest.approx(3 / engine.cache.blocks)
        time.sleep(0.2)
    assert [response.status_code for response in (*first, *second)] == [200, 200]
    page = Page(fresh.url)
    assert page("request_queue_time_seconds_sum") > 0.2, "the second one has waited for the first one's step"
    assert page("num_requests_running") == page("num_requests_waiting") == page("kv_cache_usage_perc") == 0


def test_preemptions_are_the_schedulers() -> None:
    block = 8 * 2 * 6 * 4 * 32 * 4
    running = small_engine(SMELT_6M, kv_cache_memory_bytes=10 * block, admission="immediate", max_model_len=80)
    with serving([served(running)]) as found:
        _complete(found, prompt=[[5] * 30, [6] * 30], max_tokens=20)
        page = Page(found.url)
    assert page("num_preemptions_total") == running.scheduler.preemptions > 0


def test_a_client_that_leaves_has_aborted(fresh: Serving, engine: Engine) -> None:
    """One while it is computed and one while it waits, which has no times but that of its end."""
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
    with _held(engine) as waits:
        for _ in range(2):
            with pytest.raises(httpx2.ReadTimeout):
                httpx2.post(f"{fresh.url}/v1/completions", json=body, timeout=0.5)
            assert waits.is_set()
        _eventually(lambda: fresh.server.gate.inside == 0)
    _eventually(lambda: Page(fresh.url)("request_success_total", finished_reason="abort") == 2)
    page = Page(fresh.url)
    assert page.by("request_success", "finished_reason") == {"abort": 2}
    assert page("e2e_request_latency_seconds_count") == page("request_generation_tokens_count") == 2
    assert page("request_queue_time_seconds_count") == page("time_to_first_token_seconds_count") == 1
    assert page("request_decode_time_seconds_count") == 1
    assert page("prompt_tokens_total") == len(next(iter(fresh.models)).encode(PROMPT))


def test_a_stream_that_is_left_has_aborted(fresh: Serving) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{fresh.url}/v1/completions", json=body, timeout=60) as found:
        next(found.iter_lines())
    _eventually(lambda: Page(fresh.url)("request_success_total", finished_reason="abort") == 1)
    page = Page(fresh.url)
    assert 1 <= page("generation_tokens_total") == page("request_generation_tokens_sum") < 1000
    assert page("num_requests_running") == page("num_requests_waiting") == 0


def test_a_failed_step_is_an_error(fresh: Serving, engine: Engine) -> None:
    def fail(_: object) -> None:
        raise OSError("the device is gone")

    engine.core.on_step = fail
    try:
        found = httpx2.post(f"{fresh.url}/v1/completions", json={"prompt": PROMPT})
    finally:
        engine.core.on_step = None
    assert found.status_code == 500
    assert Page(fresh.url).by("request_success", "finished_reason") == {"error": 1}


def test_refusals_are_counted_by_reason(engine: Engine) -> None:
    def status(path: str, body: Any) -> int:
        return httpx2.post(f"{found.url}{path}", json=body).status_code

    with serving([served(engine)], ServerConfig(max_requests=1)) as found:
        assert status("/v1/completions", {"prompt": "a", "temperature": 3}) == 400
        assert status("/v1/completions", {"prompt": [[5], []]}) == 400
        assert status("/v1/chat/completions", {"messages": []}) == 400
        assert status("/v1/completions", {"prompt": [5] * 2000, "stream": True}) == 400
        # These are not refused for the server's sake.
        assert status("/v1/completions", {"prompt": "a", "model": "other"}) == 404
        assert status("/tokenize", {}) == 400
        with contextlib.ExitStack() as asked, _held(engine) as waits:
            asked.enter_context(_asking(found))
            assert waits.wait(20)
            for stream in (False, True):
                assert status("/v1/completions", {"prompt": "a", "stream": stream}) == 429
        found.server.gate.draining = True
        assert status("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}) == 503
        page = Page(found.url)
    assert page.by("admission_rejections", "reason") == {"invalid": 3, "too_long": 1, "busy": 2, "draining": 1}
    assert page.by("request_success", "finished_reason") == {"length": 1}
    assert page("e2e_request_latency_seconds_count") == 1


def test_each_model_has_its_series(engine: Engine) -> None:
    with serving([served(engine, "one"), served(engine, "two")]) as found:
        _complete(found, model="one", max_tokens=3)
        _complete(found, model="two", max_tokens=5)
        assert httpx2.post(f"{found.url}/v1/completions", json={"model": "two", "prompt": []}).status_code == 400
        page = Page(found.url)
    assert page.by("generation_tokens", "model_name") == {"one": 3, "two": 5}
    assert page.by("admission_rejections", "model_name") == {"two": 1}
    for name, kind in TYPES.items():
        if kind != "histogram" and name not in ("request_success", "admission_rejections"):
            assert [sample.labels["model_name"] for sample in page.families[name].samples] == ["one", "two"], name
    for name in BUCKETS.keys() - {"inter_token_latency_seconds"}:
        assert page(f"{name}_count", model_name="one") == page(f"{name}_count", model_name="two") == 1, name


def test_the_dashboard_asks_for_what_there_is(engine: Engine) -> None:
    with serving([served(engine)], ServerConfig(metrics_prefix="vllm")) as found:
        page = Page(found.url, "vllm")
    labels: dict[str, set[str]] = {}
    for family in page.families.values():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert set(variables["prefix"]["query"].split(",")) == {"smelt", "vllm"}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) >= 10
    for expression in [*asked, variables["model"]["definition"]]:
        expression = expression.replace("${prefix}", "vllm")
        names = re.findall(r"[a-z_]+:[a-z0-9_]+", expression)
        assert names, expression
        assert set(names) <= labels.keys(), expression
        by = {label for found_by in re.findall(r"by \(([^)]*)\)", expression) for label in found_by.split(", ")}
        assert by <= labels[names[0]], expression
        assert expression.count("(") == expression.count(")")
        # Counters are only meaningful as rates.
        assert all("rate(" in expression for name in names if name.endswith(("_total", "_bucket", "_sum")))
    assert all(set(re.findall(r"\$\{?([a-z]+)", expression)) <= variables.keys() for expression in asked)
