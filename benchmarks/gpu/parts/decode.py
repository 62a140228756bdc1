"""Whole engines on a Llama-3-8B with random weights: tokens a second with and without overlapping launches, a profile of a decode step, the first request."""

from __future__ import annotations

import gc
import hashlib
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from smelt.runtime.fusions import Fusions
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
            limit_s=200,
            fresh=True,
        )
        for stored, cache, batches in runs
    ]


def _run(stored: str, cache: str, batches: tuple[int, ...], place: Place) -> Iterator[Row]:
    size = TINY if place.rehearses else QWEN if place.quick else LLAMA
    with tempfile.TemporaryDirectory(dir=place.scratch) as folder:
        path = write(Path(folder), size, stored, place.device)
        yield from _overlapped(path, size.name, cache, batches, place)
        gc.collect()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
        yield from _apart(path, cache, batches, place)


def _overlapped(path: Path, name: str, cache: str, batches: tuple[int, ...], place: Place) -> Iterator[Row]:
    """As it is used."""
    begun = time.perf_counter()
    asked = _asked(path, cache, batches, place, Fusions())
    # Kernels are compiled meanwhile, unless Triton has them from before.
    yield {"model": name, "ready_s": time.perf_counter() - begun}
    first, *later = (asked.alone() for _ in range(2 if place.rehearses else REPEATS + 1))
    sizes = {"prompt": asked.context, "generated": asked.generated}
    yield {"first": first / median(later), "request_s": median(later), **sizes}
    read = asked.engine.model.bytes_per_token()
    for batch in batches:
        rates = [asked.rate(batch) for _ in range(1 if place.rehearses else REPEATS)]
        # Of a step, weights alone.
        yield {"batch": batch, "tokens_per_s": median(rates), "weights_bytes": read}


def _apart(path: Path, cache: str, batches: tuple[int, ...], place: Place) -> Iterator[Row]:
    """Each launch after the end of the one before: kernels that overlap seem to take as long as they wait."""
    asked = _asked(path, cache, batches, place, Fusions().without("overlap"))
    asked.alone()
    for batch in batches:
        rates = [asked.rate(batch) for _ in range(1 if place.rehearses else REPEATS)]
        yield {"batch": batch, "tokens_per_s_apart": median(rates)}
        yield from asked.profile(batch, place)


def _asked(path: Path, cache: str, batches: tuple[int, ...], place: Place, fusions: Fusions) -> _Asked:
    context, generated = (10, 4) if place.rehearses else (CONTEXT, GENERATED)
    engine = place.engine(
        path,
        kv_cache_dtype=cache,
        max_num_seqs=max(batches),
        max_model_len=context + generated + 1,
        max_num_batched_tokens=64 if place.rehearses else 2048,
        enable_prefix_caching=False,
        fusions=fusions,
        **({"kv_cache_memory_bytes": 64 << 20} if place.rehearses else {}),
    )
    place.wait()
    return _Asked(engine, context, generated)


class _Asked:
    """Requests with random prompts, each another."""

    def __init__(self, engine: Engine, context: int, generated: int) -> None:
        self.engine, self.context, self.generated = engine, context, generated
        self._seeds = iter(range(10**6))

    def _add(self) -> str:
        from smelt.runtime import SamplingParams
        from smelt.runtime.measure.workload import random_prompt

        prompt = random_prompt(self.context, self.engine.model.spec.vocabulary, next(self._seeds))
        params = SamplingParams(max_tokens=self.generated, temperature=0, ignore_eos=True)
        return self.engine.add_request(prompt, params)

    def alone(self) -> float:
        """Seconds of one request, from its arrival to its last token."""
        begun = time.perf_counter()
        self._add()
        self._finish()
        return time.perf_counter() - begun

    def _finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def _started(self, batch: int) -> None:
        """So many sequences, each with its first token."""
        waiting = {self._add() for _ in range(batch)}
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}

    def rate(self, batch: int) -> float:
        """Tokens a second once all sequences have their first."""
        self._started(batch)
        begun, seconds, tokens = time.perf_counter(), 0.0, 0
        while self.engine.has_work:
            stepped = self.engine.step()
            if len(stepped) < batch and tokens:
                break  # the first ones are through
            tokens += len(stepped)
            seconds = time.perf_counter() - begun
        self._finish()
        return tokens / seconds

    def profile(self, batch: int, place: Place) -> Iterator[Row]:
        """By kernel and grid: launches and time of a step; and how long the device had nothing to do."""
        from torch.profiler import ProfilerActivity, profile

        steps = 2 if place.rehearses else 32
        self._started(batch)
        activity = ProfilerActivity.CPU if place.rehearses else ProfilerActivity.CUDA
        with profile(activities=[activity], acc_events=True) as seen:
            for _ in range(steps):
                self.engine.step()
            place.wait()
        self._finish()
        with tempfile.TemporaryDirectory() as folder:
            # Only what is exported has grids.
            trace = Path(folder) / "trace.json"
            seen.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        kinds = ("cpu_op",) if place.rehearses else ("kernel", "gpu_memcpy", "gpu_memset")
        events = [event for event in events if event.get("cat") in kinds]
        kernels: dict[tuple[str, str], list[float]] = defaultdict(list)
        for event in events:
            grid = event.get("args", {}).get("grid", [])
            kernels[event["name"][:80], " x ".join(str(size) for size in grid)].append(event["dur"])
        span = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
        busy = sum(sum(times) for times in kernels.values())
        yield {"batch": batch, "step_us": span / steps, "busy_us": busy / steps}
        for (name, grid), times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:40]:
            each = {"kernel": name, "launches": len(times) / steps, "microseconds": sum(times) / steps}
            yield {"batch": batch, **each, **({"grid": grid} if grid else {})}
