"""An engine's speed on this machine, also relative to the machine's peak."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...system.errors import RuntimeProblem
from ...system.progress import Log
from ..engine.engine import Engine
from ..requests.params import SamplingParams
from ..requests.trace import Arrival
from ..speculation.counts import DraftCounts
from ..weights.offload import StreamCounts, hiding_sequences
from .load_result import LoadResult, RequestTimes, table_of_loads
from .machine_rates import MachineSpeed, machine_rates
from .workload import PromptMaker, random_prompt, text_prompts


@dataclass
class BenchResult:
    """A benchmark's result.

    Attributes:
        prefill_rate: prompt tokens a second, alone.
        decode_rate: generated tokens a second, alone.
        prefill_of_peak: prefill's share of the machine's matrix product rate; integer kernels may exceed it.
        decode_of_peak: decode's share of its memory bandwidth, counting each weight once per token.
        peak_memory: this process's peak memory in bytes: resident, or on its GPU.
        drafts: what became of drafts, by load; empty without a drafter.
        undrafted: with a drafter, the same loads without drafts.
    """

    machine: MachineSpeed
    prefill_rate: float
    decode_rate: float
    prefill_of_peak: float
    decode_of_peak: float
    loads: list[LoadResult] = field(default_factory=list)
    peak_memory: int | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    offload: str | None = None
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    undrafted: list[LoadResult] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)


def measure(
    engine: Engine,
    *,
    prompt: int,
    output: int,
    concurrencies: list[int],
    requests: int,
    trace: list[Arrival] | None = None,
    repeats: int = 5,
    log: Log = lambda _: None,
) -> BenchResult:
    """Measure an engine.

    Args:
        engine: a loaded engine that nothing else uses.
        prompt, output: lengths of the fixed shape.
        concurrencies: how many requests to keep in flight, one load each.
        requests: how many requests a load has, at least its concurrency.
        trace: arrivals to replay as one more load, instead of the fixed shapes' concurrencies if those are empty.
        repeats: of the single-request measurements, of which medians are reported.
        log: gets messages for the user.
    """
    if prompt + output > engine.max_model_len:
        raise RuntimeProblem(
            f"a prompt of {prompt} tokens and {output} to generate exceed the engine's max_model_len of"
            f" {engine.max_model_len}; lower them"
        )
    log("warming up")
    run_load(engine, "warm up", [Arrival(0, prompt, min(output, 8))], 1, seed=1)
    prompts = None
    if engine.drafting is not None and engine.tokenizer is not None:
        prompts = text_prompts(engine.tokenizer, max(prompt, *(arrival.prompt for arrival in trace or []), 1))
    alone = []
    for i in range(repeats):
        log(f"one request, {i + 1} of {repeats}")
        alone.append(run_load(engine, "alone", [Arrival(0, prompt, output)], 1, seed=100 + i, prompts=prompts))
    prefill = prompt / statistics.median(load.first_token_p50 for load in alone)
    rates = [load.decode_rate for load in alone if load.decode_rate is not None]
    decode = statistics.median(rates) if rates else 0.0
    loads, plain, counts = list[LoadResult](), list[LoadResult](), dict[str, DraftCounts]()
    streamed = []
    for concurrency in concurrencies:
        log(f"{concurrency} at once")
        arrivals = [Arrival(0, prompt, output)] * max(requests, concurrency)
        before, drafts = _stream_counts(engine), _draft_counts(engine)
        load, seed = f"{concurrency} at once", 1000 * concurrency
        if engine.drafting is not None:
            engine.cache.forget()  # a load whose prompts are in the cache would be compared with one whose are not
            with undrafted(engine):
                plain.append(run_load(engine, load, arrivals, concurrency, seed=seed, prompts=prompts))
            engine.cache.forget()
            engine.drafting.begin_load()
        loads.append(run_load(engine, load, arrivals, concurrency, seed=seed, prompts=prompts))
        streamed.append((concurrency, _stream_counts(engine).since(before)))
        if engine.drafting is not None:
            counts[loads[-1].name] = _draft_counts(engine).since(drafts)
    if trace:
        log("the trace")
        drafts = _draft_counts(engine)
        loads.append(run_load(engine, "trace", trace, None, seed=7, prompts=prompts))
        if engine.drafting is not None:
            counts["trace"] = _draft_counts(engine).since(drafts)
    peak, offload = peak_memory(engine.model.device), engine.offload_sentence()
    advice = hiding_sequences(sorted(streamed, key=lambda each: each[0]))
    if offload is not None and advice is not None:
        offload += f"; {advice}"
    log("measuring the machine")  # which takes a gigabyte
    machine = machine_rates(engine.model.device, engine.model.dtype)
    # On a CPU ranks share the machine; a GPU's rates are of one.
    devices = 1 if engine.model.device.type == "cpu" else engine.config.ranks
    return BenchResult(
        machine,
        prefill,
        decode,
        prefill * engine.cost.operations / (devices * machine.operations),
        decode * engine.cost.bytes / (devices * machine.read_bytes),
        loads,
        peak,
        engine.explain(),
        offload,
        counts,
        plain,
    )


def _stream_counts(engine: Engine) -> StreamCounts:
    """A copy of what bringing offloaded weights has taken so far."""
    stream = engine.model.stream
    return StreamCounts() if stream is None else replace(stream.counts)


def _draft_counts(engine: Engine) -> DraftCounts:
    return DraftCounts() if engine.drafting is None else engine.drafting.total.copy()


@contextmanager
def undrafted(engine: Engine) -> Iterator[None]:
    """Within it nothing is drafted: as without a drafter, a GPU's steps need not wait for each other."""
    scheduler, executor = engine.scheduler, engine.executor
    drafting, drafter = scheduler.drafting, executor.drafter
    scheduler.drafting = executor.drafter = None
    try:
        yield
    finally:
        scheduler.drafting, executor.drafter = drafting, drafter


def run_load(
    engine: Engine,
    name: str,
    arrivals: list[Arrival],
    in_flight: int | None,
    seed: int,
    prompts: PromptMaker | None = None,
    answers: list[list[int]] | None = None,
) -> LoadResult:
    """Serve arrivals at their times, or with ``in_flight`` concurrent requests.

    Args:
        engine: that nothing else uses.
        name: of the load.
        arrivals: prompts are made for them.
        in_flight: how many to keep running; None to follow the arrivals' times.
        seed: of the prompts.
        prompts: makes the prompts; random tokens if None.
        answers: gets each request's tokens, in the order of arrivals.
    """
    vocabulary = engine.model.spec.vocabulary
    make: PromptMaker = prompts or (lambda length, seed: random_prompt(length, vocabulary, seed))
    waiting = list(reversed(arrivals))
    came: dict[str, float] = {}
    tokens: dict[str, list[float]] = {}
    said: dict[str, list[int]] = {}
    begun = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter()
        while waiting and (_running(engine, came) < in_flight if in_flight else waiting[-1].at <= now - begun):
            arrival = waiting.pop()
            ids = make(arrival.prompt, seed + len(came))
            params = SamplingParams(max_tokens=arrival.output, temperature=0, ignore_eos=True)
            key = engine.add_request(ids, params)
            came[key] = begun + arrival.at if in_flight is None else time.perf_counter()
            tokens[key] = []
        if not engine.has_work:
            time.sleep(max(0.0, begun + waiting[-1].at - time.perf_counter()))
            continue
        for output in engine.step():
            times = tokens[output.request_id]
            # Of drafts several may come at once.
            said[output.request_id] = output.outputs[0].token_ids
            times.extend([time.perf_counter()] * (len(said[output.request_id]) - len(times)))
    seconds = time.perf_counter() - begun
    if answers is not None:
        answers.extend(list(said[key]) for key in came)
    requests = [
        RequestTimes(came[key], arrival.prompt, tokens[key]) for key, arrival in zip(came, arrivals, strict=True)
    ]
    return LoadResult.of(name, requests, seconds)


def _running(engine: Engine, names: Iterable[str]) -> int:
    return sum(engine.is_running(name) for name in names)


def peak_memory(device: torch.device) -> int | None:
    """This process's peak memory, resident or on a GPU; None where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def table(found: BenchResult) -> str:
    """The result for a terminal."""
    lines = [
        f"machine   {found.machine.read_bytes / 1e9:.1f} GB/s {'read' if found.machine.device == 'cpu' else 'copied'}, {found.machine.operations / 1e12:.2f} TFLOP/s in {found.machine.dtype}",
        f"prefill   {found.prefill_rate:.0f} tokens/s alone, {found.prefill_of_peak:.0%} of the machine's {found.machine.dtype} products",
        f"decode    {found.decode_rate:.1f} tokens/s alone, {found.decode_of_peak:.0%} of its memory bandwidth",
    ]
    if "layers" in found.kernels:
        lines.append(f"layers    {found.kernels['layers']}")
    if found.offload:
        lines.append(f"offload   {found.offload}")
    if found.peak_memory:
        lines.append(f"memory    {found.peak_memory / 1e6:.0f} MB at the peak")
    if found.loads:
        lines += ["", *table_of_loads(found.loads)]
    if found.drafts:
        lines += ["", *_drafts(found)]
    return "\n".join(lines)


def _drafts(found: BenchResult) -> list[str]:
    """What became of drafts, and what they gained by load."""
    lines = [f"{name:<14}{counts.sentence()}" for name, counts in found.drafts.items()]
    gains = [
        (load.name, load.output_rate / alone.output_rate)
        for load, alone in zip(found.loads, found.undrafted, strict=False)
    ]
    if not gains:
        return lines
    lines.append("speedup       " + ", ".join(f"{name} {gain:.2f}x" for name, gain in gains))
    losing = [name for name, gain in gains if gain < 1]
    lines.append(
        f"              drafts did not pay with {', '.join(losing)}"
        if losing
        else "              drafts paid with each load"
    )
    return lines
