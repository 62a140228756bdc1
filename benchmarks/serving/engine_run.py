"""Requests at their times on a real engine, counted as the simulator counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from smelt.runtime import Engine, SamplingParams
from smelt.runtime.measure.workload import random_prompt
from smelt.runtime.requests.trace import Arrival
from smelt.runtime.scheduling.plan import StepPlan
from smelt.runtime.scheduling.scheduler import Scheduler
from smelt.runtime.simulate.results import Histogram, Served, SimulationResult

_WARM = 4


@dataclass
class _Seen:
    """A request on its way: its number, when it was to come and when it came, and its first and its latest token."""

    number: int
    arrival: Arrival
    came: float
    first: float | None = None
    last: float = 0.0


class EngineRun:
    """An engine that serves arrivals with random prompts, whose outputs never end early.

    Args:
        engine: that has no work.

    Attributes:
        served, pauses, steps, busy, swapped, filled, reserved, wasted, now, scheduler: as :class:`Replica`'s.
    """

    def __init__(self, engine: Engine) -> None:
        self.served: list[Served] = []
        self.pauses = Histogram()
        self.steps = 0
        self.busy = 0.0
        self.swapped = 0
        self.filled = self.reserved = self.wasted = 0.0
        self.now = 0.0
        self._engine = engine
        self._seen: dict[str, _Seen] = {}

    @property
    def scheduler(self) -> Scheduler:
        """The engine's."""
        return self._engine.scheduler

    @classmethod
    def of(cls, engine: Engine, arrivals: Sequence[Arrival]) -> SimulationResult:
        """Serve requests, after some others for which buffers are allocated."""
        short = Arrival(0.0, min(100, engine.max_model_len // 2), 8)
        cls(engine).serve([short] * _WARM)
        run = cls(engine)
        run.serve(arrivals)
        return SimulationResult.of(engine.config.policy, [run])

    def serve(self, arrivals: Sequence[Arrival]) -> None:
        """Serve all of them."""
        waiting = list(enumerate(arrivals))[::-1]
        engine, engine.core.on_step = self._engine, self._count
        began = time.perf_counter()
        while waiting or engine.has_work:
            now = time.perf_counter() - began
            while waiting and waiting[-1][1].at <= now:
                number, arrival = waiting.pop()
                ids = random_prompt(arrival.prompt, engine.model.spec.vocabulary, number)
                params = SamplingParams(max_tokens=arrival.output, temperature=0, ignore_eos=True)
                self._seen[engine.add_request(ids, params)] = _Seen(number, arrival, time.perf_counter() - began)
            if not engine.has_work:
                time.sleep(max(0.0, began + waiting[-1][1].at - time.perf_counter()))
                continue
            self._step(began)
        engine.core.on_step = None

    def _step(self, began: float) -> None:
        before = time.perf_counter()
        outputs = self._engine.step()
        after = time.perf_counter()
        self.now = after - began
        self.busy += after - before
        self._hold(after - before)
        for output in outputs:
            seen = self._seen[output.request_id]
            if seen.first is None:
                seen.first = self.now
            else:
                self.pauses.add(self.now - seen.last)
            seen.last = self.now
            if output.finished:
                assert output.queue_seconds is not None
                self.served.append(
                    Served(
                        seen.number,
                        seen.arrival.at,
                        seen.came + output.queue_seconds,
                        seen.first,
                        seen.last,
                        seen.arrival.prompt,
                        seen.arrival.output,
                        output.num_cached_tokens,
                        output.preemptions,
                    )
                )

    def _count(self, plan: StepPlan) -> None:
        self.steps += 1
        self.swapped += len(plan.swap_out) + len(plan.swap_in)

    def _hold(self, seconds: float) -> None:
        """Count the positions of running sequences' blocks."""
        size = self.scheduler.cache.block_size
        for sequence in self.scheduler.running:
            capacity = len(sequence.blocks) * size
            unfilled = capacity - sequence.computed
            later = min(unfilled, sequence.request.max_tokens - len(sequence.generated) + sequence.remaining)
            self.filled += sequence.computed * seconds
            self.reserved += later * seconds
            self.wasted += (unfilled - later) * seconds
