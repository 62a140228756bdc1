"""A trace through the engine's scheduler on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ...system.errors import RuntimeProblem
from ..blocks.block_cache import BlockCache
from ..blocks.host_tier import HostTier
from ..requests.params import SamplingParams
from ..requests.sequence import Request, Sequence
from ..requests.trace import PREFIX_BLOCK, Arrival
from ..scheduling.admission import PeakAdmission
from ..scheduling.plan import StepPlan
from ..scheduling.policies.table import POLICIES
from ..scheduling.scheduler import Scheduler
from ..scheduling.swapping import SwapMode, Swapping, TransferCost
from .cost import StepCost, StepWork
from .results import CacheUse, Distribution, Histogram, Served, SimulationResult

_PARAMS = SamplingParams(temperature=0)


@dataclass(frozen=True)
class SimulatedEngine:
    """An engine's options, named as in :class:`EngineConfig`, and the sizes of its cache.

    Attributes:
        blocks: of the KV cache.
        host_blocks: in host memory.
        transfer: the time of copies between them; needed if there are any.
        output_known: whether admission and ``shortest`` know each request's output length, as a perfect predictor would.
        max_tokens: what requests ask for at most; None if each asks for what it generates.
    """

    blocks: int
    policy: str = "fcfs"
    admission: str = "predicted"
    swap: SwapMode = "auto"
    block_size: int = 16
    token_budget: int = 512
    max_sequences: int = 32
    host_blocks: int = 0
    transfer: TransferCost | None = None
    output_known: bool = False
    max_tokens: int | None = None

    def scheduler(self, *, share_prefixes: bool) -> Scheduler:
        """The scheduler that such an engine has."""
        host = HostTier(self.host_blocks) if self.host_blocks else None
        cache = BlockCache(self.blocks, self.block_size, share_prefixes=share_prefixes, host=host)
        swapping = None
        if host is not None and self.transfer is not None:
            swapping = Swapping(self.swap, self.block_size, self.transfer)
        return Scheduler(
            cache,
            token_budget=self.token_budget,
            max_sequences=self.max_sequences,
            policy=POLICIES[self.policy](),
            admission=PeakAdmission(cache) if self.admission == "predicted" else None,
            swapping=swapping,
        )


def simulate(arrivals: SequenceOf[Arrival], engine: SimulatedEngine, cost: StepCost) -> SimulationResult:
    """Serve a trace.

    Args:
        arrivals: in order of time. Prefixes are shared if they name any.
        engine: the options.
        cost: how long steps take.

    Raises:
        RuntimeProblem: a request does not fit into the cache alone.
    """
    return Simulation(arrivals, engine, cost).run()


class Simulation:
    """A run of :func:`simulate`, step by step.

    Attributes:
        now: the virtual time in seconds.
        scheduler: the engine's.
    """

    def __init__(self, arrivals: SequenceOf[Arrival], engine: SimulatedEngine, cost: StepCost) -> None:
        self._arrivals = arrivals
        self._engine = engine
        self._cost = cost
        self._shares = any(arrival.prefix for arrival in arrivals)
        self.scheduler = engine.scheduler(share_prefixes=self._shares)
        self.now = 0.0
        self._next = 0  # of the arrivals
        self._left: dict[Sequence, int] = {}  # tokens that a sequence still generates
        self._first: dict[Sequence, float] = {}  # when it got its first token
        self._last: dict[Sequence, float] = {}  # and its latest one
        self._served: list[Served] = []
        self._pauses = Histogram()
        self._steps = 0
        self._busy = 0.0
        self._swapped = 0
        self._filled = self._held = 0.0  # positions times seconds
        for arrival in arrivals:
            needed = self.scheduler.cache.needed(arrival.prompt + arrival.output)
            if needed > engine.blocks:
                raise RuntimeProblem(
                    f"a request of {arrival.prompt} prompt tokens and {arrival.output} to generate needs {needed} cache blocks,"
                    f" and there are {engine.blocks}; leave out longer requests or simulate a larger cache"
                )

    def run(self) -> SimulationResult:
        """All requests, to their ends."""
        while self._next < len(self._arrivals) or self.scheduler.has_work:
            self._receive()
            if not self.scheduler.has_work:
                self.now = self._arrivals[self._next].at
                continue
            self.step()
        return self._result()

    def step(self) -> StepPlan:
        """One step, and those after it that are the same but for their contexts."""
        scheduler = self.scheduler
        plan = scheduler.schedule(self.now)
        assert plan.chunks, "requests are checked to fit"
        scheduler.started(plan)
        work = StepWork.of(plan)
        seconds = self._cost.seconds(work)
        self._swapped += work.swapped
        begun = self.now
        self.now += seconds
        scheduler.commit(plan, self.now)
        self._count(plan, seconds, 1)
        self._append(plan, begun)
        if work.tokens == work.sequences == len(plan.chunks):
            self._repeat(plan, work, seconds)
        return plan

    def _receive(self) -> None:
        """Queue what has arrived."""
        while self._next < len(self._arrivals) and self._arrivals[self._next].at <= self.now:
            arrival = self._arrivals[self._next]
            most = max(arrival.output, self._engine.max_tokens or 0)
            request = Request(str(self._next), _prompt(arrival, self._next), _PARAMS, arrival.prompt + most)
            request.predicted_tokens = arrival.output if self._engine.output_known else None
            sequence = Sequence(request, 0, list(request.prompt))
            request.sequences = [sequence]
            self._left[sequence] = arrival.output
            self.scheduler.add(sequence, arrival.at)
            self._next += 1

    def _append(self, plan: StepPlan, begun: float) -> None:
        """Give each sequence that was computed to its end its next token."""
        now, last = self.now, self._last
        usual = 0
        for chunk in plan.chunks:
            if not chunk.is_last:
                continue
            sequence = chunk.sequence
            sequence.tokens.append(0)
            before = last.get(sequence)
            if before == begun:
                usual += 1
            elif before is not None:
                self._pauses.add(now - before)
            last[sequence] = now
            self._left[sequence] -= 1
            if before is None:
                self._first[sequence] = now
            if self._left[sequence] == 0:
                self._end(sequence)
        if usual:
            self._pauses.add(now - begun, usual)

    def _end(self, sequence: Sequence) -> None:
        request = sequence.request
        del self._left[sequence], self._last[sequence]
        assert request.started is not None
        self._served.append(
            Served(
                request.arrived,
                request.started,
                self._first.pop(sequence),
                self.now,
                len(request.prompt),
                len(sequence.generated),
                request.cached_tokens,
                request.preemptions,
            )
        )
        self.scheduler.end(sequence, "length")

    def _repeat(self, plan: StepPlan, work: StepWork, seconds: float) -> None:
        """Steps of the same decodes, all at once: none ends, none arrives, and nobody lacks a block."""
        sequences = [chunk.sequence for chunk in plan.chunks]
        steps = self.scheduler.repeatable(plan, min(self._left.get(sequence, 0) for sequence in sequences) - 1)
        if steps < 1:
            return
        if self._next < len(self._arrivals):
            steps = min(steps, int((self._arrivals[self._next].at - self.now) / seconds) + 1)
        # A decode's time grows with its context, evenly.
        total = 0.0
        while steps > 0:
            total = steps * (self._cost.seconds(work.later(1)) + self._cost.seconds(work.later(steps))) / 2
            begun = self.now + total * (steps - 1) / steps
            if self._next == len(self._arrivals) or begun <= self._arrivals[self._next].at:
                break
            steps -= 1
        if steps < 1:
            return
        self.now += total
        self.scheduler.repeat(plan, steps, self.now)
        for sequence in sequences:
            sequence.tokens.extend([0] * steps)
            self._left[sequence] -= steps
            self._last[sequence] = self.now
        self._pauses.add(total / steps, steps * len(sequences))
        self._count(plan, total, steps)

    def _count(self, plan: StepPlan, seconds: float, steps: int) -> None:
        cache = self.scheduler.cache
        self._steps += steps
        self._busy += seconds
        filled = sum(sequence.computed for sequence in self.scheduler.running)
        self._filled += filled * seconds
        self._held += sum(len(sequence.blocks) for sequence in self.scheduler.running) * cache.block_size * seconds

    def _result(self) -> SimulationResult:
        served, scheduler = self._served, self.scheduler
        prompts = sum(each.prompt for each in served)
        outputs = sum(each.output for each in served)
        everything = scheduler.cache.blocks * scheduler.cache.block_size * self._busy
        filled, held = self._filled / everything, self._held / everything
        return SimulationResult(
            self._engine.policy,
            len(served),
            prompts,
            outputs,
            self.now,
            self._steps,
            outputs / self.now,
            Distribution.of([each.first - each.at for each in served]),
            self._pauses.distribution(),
            Distribution.of([each.ended - each.at for each in served]),
            Distribution.of([(each.ended - each.at) / each.output for each in served]),
            Distribution.of([each.started - each.at for each in served]),
            CacheUse(filled, max(0.0, held - filled), max(0.0, 1 - max(held, filled))),
            sum(each.cached for each in served) / prompts,
            scheduler.preemptions,
            scheduler.swaps,
            self._swapped,
            self._busy / self.now,
        )


def _prompt(arrival: Arrival, number: int) -> list[int]:
    """Tokens that are equal where the trace says that prefixes are."""
    if not arrival.prefix:
        return [0] * arrival.prompt
    tokens = [mark for mark in arrival.prefix for _ in range(PREFIX_BLOCK)][: arrival.prompt]
    # What is beyond the marks is the request's own.
    return tokens + [-1 - number] * (arrival.prompt - len(tokens))
