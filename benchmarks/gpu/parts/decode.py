"""Whole engines on a Llama-3-8B with random weights: tokens a second, a profile of a decode step by kernel, the first request."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from smelt.runtime.kernels.tiles.tile import text, tiles_of

from ..job import Job, Row
from ..place import Place
from ..random_checkpoints import LLAMA, QWEN, TINY, write

if TYPE_CHECKING:
    from smelt.runtime import Engine

IMPORTS = ("transformers", "compressed_tensors", "pydantic", "loguru", "psutil", "smelt.runtime")
CONTEXT, GENERATED, REPEATS = 512, 128, 5
# Formats, keys and values, batches; the most important first.
RUNS = (
    ("w4a16", "auto", (1, 64)),
    ("bf16", "auto", (1, 64)),
    ("fp8", "auto", (1, 64)),
    ("w4a16 and an int8 head", "fp8", (1,)),
)


def jobs(place: Place) -> list[Job]:
    """The goals' formats: for each a checkpoint is written, loaded, measured and removed."""
    return of(place, RUNS[:1] if place.rehearses or place.quick else RUNS[:2])


def of(place: Place, runs: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[Job]:
    """Jobs of some of :data:`RUNS`."""
    tiles = hashlib.sha256(text(tiles_of(place.device)).encode()).hexdigest()[:12]
    return [
        Job(
            f"{stored}, {cache} cache",
            partial(_run, stored, cache, (1, 2) if place.rehearses else batches),
            {"format": stored, "cache": cache, "tiles": tiles},
            limit_s=170,
            fresh=True,
        )
        for stored, cache, batches in runs
    ]


def _run(stored: str, cache: str, batches: tuple[int, ...], place: Place) -> Iterator[Row]:
    size = TINY if place.rehearses else QWEN if place.quick else LLAMA
    context, generated = (10, 4) if place.rehearses else (CONTEXT, GENERATED)
    with tempfile.TemporaryDirectory(dir=place.scratch) as folder:
        path = write(Path(folder), size, stored, place.device)
        begun = time.perf_counter()
        engine = place.engine(
            path,
            kv_dtype=cache,
            max_sequences=max(batches),
            max_length=context + generated + 1,
            token_budget=64 if place.rehearses else 2048,
            share_prefixes=False,
            **({"kv_cache_bytes": 64 << 20} if place.rehearses else {}),
        )
        place.wait()
        # Kernels are compiled meanwhile, unless Triton has them from before.
        yield {"model": size.name, "ready_s": time.perf_counter() - begun}
    asked = _Asked(engine, context, generated)
    first, *later = (asked.alone() for _ in range(2 if place.rehearses else REPEATS + 1))
    yield {"first": first / median(later), "request_s": median(later), "prompt": context, "generated": generated}
    read = engine.model.bytes_per_token()
    for batch in batches:
        rates = [asked.rate(batch) for _ in range(1 if place.rehearses else REPEATS)]
        # Of a step, weights alone.
        yield {"batch": batch, "tokens_per_s": median(rates), "weights_bytes": read}
        yield from asked.profile(batch, place)


class _Asked:
    """Requests with random prompts, each another."""

    def __init__(self, engine: Engine, context: int, generated: int) -> None:
        self._engine, self._context, self._generated = engine, context, generated
        self._seeds = iter(range(10**6))

    def _add(self) -> str:
        from smelt.runtime import SamplingParams
        from smelt.runtime.measure.workload import random_prompt

        prompt = random_prompt(self._context, self._engine.model.spec.vocabulary, next(self._seeds))
        params = SamplingParams(max_tokens=self._generated, temperature=0, ignore_eos=True)
        return self._engine.add_request(prompt, params)

    def alone(self) -> float:
        """Seconds of one request, from its arrival to its last token."""
        begun = time.perf_counter()
        self._add()
        self._finish()
        return time.perf_counter() - begun

    def _finish(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def _started(self, batch: int) -> None:
        """So many sequences, each with its first token."""
        waiting = {self._add() for _ in range(batch)}
        while waiting:
            waiting -= {output.id for output in self._engine.step()}

    def rate(self, batch: int) -> float:
        """Tokens a second once all sequences have their first."""
        self._started(batch)
        begun, seconds, tokens = time.perf_counter(), 0.0, 0
        while self._engine.has_work:
            stepped = self._engine.step()
            if len(stepped) < batch and tokens:
                break  # the first ones are through
            tokens += len(stepped)
            seconds = time.perf_counter() - begun
        self._finish()
        return tokens / seconds

    def profile(self, batch: int, place: Place) -> Iterator[Row]:
        """By kernel: launches and time of a step; and how long the device had nothing to do."""
        from torch.profiler import ProfilerActivity, profile

        steps = 2 if place.rehearses else 32
        self._started(batch)
        activity = ProfilerActivity.CPU if place.rehearses else ProfilerActivity.CUDA
        with profile(activities=[activity], acc_events=True) as seen:
            for _ in range(steps):
                self._engine.step()
            place.wait()
        self._finish()
        kernels: dict[str, list[float]] = defaultdict(list)
        first, last = float("inf"), 0.0
        for event in seen.events() or []:
            if place.rehearses or event.device_type == torch.autograd.DeviceType.CUDA:
                span: Any = event.time_range
                kernels[event.name].append(span.end - span.start)
                first, last = min(first, span.start), max(last, span.end)
        busy = sum(sum(times) for times in kernels.values())
        yield {"batch": batch, "step_us": (last - first) / steps, "busy_us": busy / steps}
        for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:40]:
            each = {"kernel": name[:80], "launches": len(times) / steps, "microseconds": sum(times) / steps}
            yield {"batch": batch, **each}
