"""A server's numbers for Prometheus, under vLLM's names."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...requests.output import RequestOutput
from ...requests.params import SamplingParams
from ...speculation.counts import DraftCounts
from ..http.errors import ApiError
from ..model.observer import Watch
from ..model.served_model import ServedModel

# Of a request whose samples ended differently, the first of them.
_REASONS: tuple[str, ...] = ("error", "deadline", "abort", "length", "stop")
_REFUSALS = {429: "busy", 503: "draining", 400: "invalid"}
_TOO_LONG = "too_long"

_UNTIL_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_SAMPLES = (1, 2, 5, 10, 20)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...] | None]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _UNTIL_FIRST),
    "inter_token_latency_seconds": ("Between two steps that gave a request tokens.", _BETWEEN),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _REQUEST),
    "request_queue_time_seconds": ("From a request's arrival until it was first computed.", _REQUEST),
    "request_prefill_time_seconds": ("From then to its first token.", _REQUEST),
    "request_decode_time_seconds": ("From its first token to its last.", _REQUEST),
    "request_inference_time_seconds": ("From when it was first computed to its last token.", _REQUEST),
    "request_prompt_tokens": ("Tokens of a request's prompt.", None),
    "request_generation_tokens": ("Tokens of a request's output, of all its samples.", None),
    "request_params_n": ("Samples that a request asked for.", _SAMPLES),
    "request_params_max_tokens": ("Tokens that a request allowed; without a limit, those that its model has room for.", None),
}  # fmt: skip


class Buckets:
    """A histogram's counts. prometheus_client's own costs several microseconds for each token of each stream.

    Args:
        bounds: of its buckets, without infinity.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, model: str) -> None:
        """Write it as a model's."""
        below = list(accumulate(self._counts))
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric([model], list(zip(names, below, strict=True)), self._sum)


class ModelMetrics:
    """One model's numbers: of its requests from an observer's view, and of its engine.

    A prompt counts as a request, with all its samples. All but the engine's state changes in the asyncio loop only.

    Args:
        model: whose requests are measured.
        tokens: bounds of the buckets that count tokens.
    """

    def __init__(self, model: ServedModel, tokens: tuple[float, ...]) -> None:
        self.model = model
        self.engine = model.engine
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.finished = dict.fromkeys(_REASONS, 0)
        self.refused = dict.fromkeys((*_REFUSALS.values(), _TOO_LONG), 0)
        self.histograms = {name: Buckets(bounds or tokens) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.between_tokens = self.histograms["inter_token_latency_seconds"]

    def watch(self, name: str, prompts: Sequence[list[int]], params: SamplingParams) -> Sequence[Watch]:
        """Measure a request's prompts."""
        return [_Watched(self, len(prompt), params).output for prompt in prompts]

    @property
    def drafts(self) -> DraftCounts:
        """What became of drafts."""
        drafting = self.engine.drafting
        return DraftCounts() if drafting is None else drafting.total

    @property
    def waiting(self) -> int:
        """Sequences that do not run yet."""
        return len(self.engine.scheduler.waiting) + self.engine.loop.arriving

    @property
    def cache_usage(self) -> float:
        """The share of the cache's blocks that sequences hold."""
        return 1 - self.engine.cache.free / self.engine.cache.blocks


class _Watched:
    """One prompt."""

    def __init__(self, metrics: ModelMetrics, prompt: int, params: SamplingParams) -> None:
        self._metrics = metrics
        self._prompt = prompt
        self._params = params
        self._tokens = 0
        self._arrived = self._first = self._last = time.perf_counter()

    def output(self, output: RequestOutput) -> None:
        """Its output has grown, or ended."""
        now = time.perf_counter()
        tokens = sum([len(completion.token_ids) for completion in output.outputs])
        if tokens > self._tokens:
            if self._tokens:
                self._metrics.between_tokens.observe(now - self._last)
            else:
                self._begin(output, now)
            self._metrics.generation_tokens += tokens - self._tokens
            self._tokens, self._last = tokens, now
        if output.finished:
            self._end(output, now)

    def _begin(self, output: RequestOutput, now: float) -> None:
        metrics = self._metrics
        self._first = now
        metrics.histograms["time_to_first_token_seconds"].observe(now - self._arrived)
        metrics.prompt_tokens += self._prompt
        if metrics.engine.config.enable_prefix_caching:
            metrics.prefix_queries += self._prompt
            metrics.prefix_hits += output.num_cached_tokens

    def _end(self, output: RequestOutput, now: float) -> None:
        metrics, params = self._metrics, self._params
        reasons = {completion.finish_reason for completion in output.outputs}
        metrics.finished[next(reason for reason in _REASONS if reason in reasons)] += 1
        found: dict[str, float] = {
            "e2e_request_latency_seconds": now - self._arrived,
            "request_prompt_tokens": self._prompt,
            "request_generation_tokens": self._tokens,
            "request_params_n": params.n,
            "request_params_max_tokens": params.max_tokens or metrics.model.longest - self._prompt,
        }
        if output.queue_seconds is not None:
            found["request_queue_time_seconds"] = output.queue_seconds
        if output.queue_seconds is not None and self._tokens:
            started = self._arrived + output.queue_seconds
            found["request_prefill_time_seconds"] = self._first - started
            found["request_decode_time_seconds"] = self._last - self._first
            found["request_inference_time_seconds"] = self._last - started
        for name, value in found.items():
            metrics.histograms[name].observe(value)


_Read = Callable[[ModelMetrics], float]
# Read when they are asked for, without the engine's lock: a step that takes long does not delay them.
_GAUGES: dict[str, tuple[str, _Read]] = {
    "num_requests_running": ("Sequences that run.", lambda m: len(m.engine.scheduler.running)),
    "num_requests_waiting": ("Sequences that wait to run.", lambda m: m.waiting),
    "kv_cache_usage_perc": ("The used share of the KV cache: 1 is all of it.", lambda m: m.cache_usage),
}
_COUNTERS: dict[str, tuple[str, _Read]] = {
    "num_preemptions": ("How often a sequence lost its cache blocks.", lambda m: m.engine.scheduler.preemptions),
    "prompt_tokens": ("Tokens of prompts.", lambda m: m.prompt_tokens),
    "generation_tokens": ("Tokens of outputs.", lambda m: m.generation_tokens),
    "prefix_cache_queries": ("Tokens of prompts that were looked up in the prefix cache.", lambda m: m.prefix_queries),
    "prefix_cache_hits": ("Those that were found there.", lambda m: m.prefix_hits),
    "spec_decode_num_drafts": ("Drafts that were verified.", lambda m: m.drafts.verified),
    "spec_decode_num_draft_tokens": ("Their tokens.", lambda m: m.drafts.all_drafted),
    "spec_decode_num_accepted_tokens": ("Those that became part of outputs.", lambda m: m.drafts.all_accepted),
}
_LABELLED_COUNTERS: dict[str, tuple[str, str, Callable[[ModelMetrics], dict[str, int]]]] = {
    "request_success": ("Requests that ended, by why they did.", "finished_reason", lambda m: m.finished),
    "spec_decode_num_accepted_tokens_per_pos": (
        "Accepted draft tokens, by their position in the draft.",
        "position",
        lambda m: {str(i): count for i, count in enumerate(list(m.drafts.accepted))},
    ),
    "admission_rejections": ("Requests that were refused, by why they were.", "reason", lambda m: m.refused),
}
_LABEL = "model_name"
_DRAFTS = "spec_decode"


class Metrics(Collector):
    """A server's numbers.

    Args:
        prefix: before all names.
        models: that are served.

    Attributes:
        registry: this server's own.
    """

    media_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, prefix: str, models: Iterable[ServedModel]) -> None:
        served = [model for model in models if model.base is None]
        self._prefix = prefix
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._tokens = _one_two_five(max((model.longest for model in served), default=1))
        self.models: dict[str, ModelMetrics] = {}
        for model in served:
            self.add(model)
        self.registry.register(self)

    def add(self, model: ServedModel) -> ModelMetrics:
        """Measure one more model."""
        found = self.models[model.name] = ModelMetrics(model, self._tokens)
        return found

    def remove(self, model: ServedModel) -> None:
        """A model is served no more; if it comes again, its numbers start at zero."""
        del self.models[model.name]

    def text(self) -> bytes:
        """All of them. Always in the plain format: in OpenMetrics' the colon of the names becomes an underscore."""
        return generate_latest(self.registry)

    def refused(self, model: str | None, problem: ApiError) -> None:
        """A request was not let in.

        Args:
            model: that it was for; None if that is not known, which counts for the default one.
            problem: the response.
        """
        reason = _TOO_LONG if problem.code == "context_length_exceeded" else _REFUSALS.get(problem.status)
        known = self.models.get(model or next(iter(self.models), ""))
        if reason is not None and known is not None:
            known.refused[reason] += 1

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        models = self.models.items()
        for name, (text, _) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=[_LABEL])
            for model, metrics in models:
                metrics.histograms[name].add_to(histogram, model)
            yield histogram
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=[_LABEL])
            for model, metrics in models:
                gauge.add_metric([model], read(metrics))
            yield gauge
        drafts = any(metrics.engine.drafting is not None for metrics in self.models.values())
        for name, (text, read) in _COUNTERS.items():
            if name.startswith(_DRAFTS) and not drafts:
                continue  # as in vLLM
            counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=[_LABEL])
            for model, metrics in models:
                counter.add_metric([model], read(metrics))
            yield counter
        for name, (text, label, read_each) in _LABELLED_COUNTERS.items():
            if name.startswith(_DRAFTS) and not drafts:
                continue
            counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=[_LABEL, label])
            for model, metrics in models:
                for reason, count in read_each(metrics).items():
                    counter.add_metric([model, reason], count)
            yield counter
        info = GaugeMetricFamily(
            f"{self._prefix}:cache_config_info", "The KV cache's size.", labels=[_LABEL, "block_size", "num_gpu_blocks"]
        )
        for model, metrics in models:
            cache = metrics.engine.cache
            info.add_metric([model, str(cache.block_size), str(cache.blocks)], 1)
        yield info


def _one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, …, up to a limit."""
    found: list[float] = []
    power = 1
    while power <= most:
        found += [step * power for step in (1, 2, 5) if step * power <= most]
        power *= 10
    return tuple(found)
