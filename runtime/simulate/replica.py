"""One engine on a virtual clock: its scheduler, its requests, and what it counts."""

from __future__ import annotations

import math
from dataclasses import replace

from ...system.errors import RuntimeProblem
from ..costs.work import PAUSE_SECONDS, StepCost, StepWork
from ..requests.params import SamplingParams
from ..requests.sequence import Request, Sequence
from ..requests.trace import PREFIX_BLOCK, Arrival
from ..scheduling.plan import StepPlan
from .options import SimulatedEngine
from .results import Histogram, Served

_PARAMS = SamplingParams(temperature=0)


class Replica:
    """An engine that serves arrivals, step by step.

    Args:
        engine: its options.
        enable_prefix_caching: whether prompts with a common prefix share its blocks.

    Attributes:
        now: the virtual time in seconds: the end of the last step.
        scheduler: the engine's.
        served: the requests that ended.
        pauses: between a request's tokens.
        steps, busy: how many steps, and their time.
        swapped: blocks copied to or from host memory.
        filled, reserved, wasted: positions of running sequences' blocks times seconds: with keys and values, to be filled later, and
            never to be filled.
    """

    def __init__(self, engine: SimulatedEngine, *, enable_prefix_caching: bool = False) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler(enable_prefix_caching=enable_prefix_caching)
        self.now = 0.0
        self.served: list[Served] = []
        self.pauses = Histogram()
        self.steps = 0
        self.busy = 0.0
        self.swapped = 0
        self.filled = self.reserved = self.wasted = 0.0
        self._after_pause = True
        self._left: dict[Sequence, int] = {}  # tokens that a sequence still generates
        self._first: dict[Sequence, float] = {}  # when it got its first token
        self._last: dict[Sequence, float] = {}  # and its latest one
        self._arrivals: dict[Sequence, tuple[int, Arrival]] = {}

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._left)

    @property
    def load(self) -> int:
        """Requests that have not ended."""
        return len(self._left)

    def check(self, arrival: Arrival) -> None:
        """Check that a request fits into the cache alone.

        Raises:
            RuntimeProblem: it does not.
        """
        needed = self.scheduler.cache.needed(arrival.prompt + arrival.output)
        if needed > self.engine.blocks:
            raise RuntimeProblem(
                f"a request of {arrival.prompt} prompt tokens and {arrival.output} to generate needs {needed} cache blocks,"
                f" and there are {self.engine.blocks}; leave out longer requests or simulate a larger cache"
            )

    def submit(self, number: int, arrival: Arrival, *, prefilled: Served | None = None) -> None:
        """Queue a request.

        Args:
            number: in the trace.
            arrival: the request; its time is when it comes to this engine.
            prefilled: what another engine did with its prompt, whose keys and values, and first token, come with it.
        """
        if not self.has_work:
            self._after_pause = self._after_pause or arrival.at - self.now > PAUSE_SECONDS
            self.now = max(self.now, arrival.at)
        most = max(arrival.output, self.engine.max_tokens or 0)
        request = Request(str(number), _prompt(arrival, number), _PARAMS, arrival.prompt + most)
        request.predicted_tokens = arrival.output if self.engine.output_known else None
        sequence = Sequence(request, 0, list(request.prompt))
        request.sequences = [sequence]
        self._left[sequence] = arrival.output
        self._arrivals[sequence] = number, arrival
        self.scheduler.add(sequence, arrival.at)
        if prefilled is None:
            return
        # It starts as a sequence does that was swapped out, with its blocks elsewhere.
        sequence.tokens.append(0)
        sequence.computed, sequence.swapped = arrival.prompt, True
        self._left[sequence] -= 1
        self._first[sequence] = self._last[sequence] = prefilled.first
        request.arrived, request.started, request.cached_tokens = prefilled.at, prefilled.started, prefilled.cached

    def run_until(self, time: float, cost: StepCost) -> None:
        """Run steps that begin before ``time``."""
        while self._left and self.now < time:
            self.step(cost, time)

    def step(self, cost: StepCost, until: float = math.inf) -> StepPlan:
        """One step, and those after it that are the same but for their contexts and begin before ``until``."""
        begun = self.now
        plan, work = self.begin(begun)
        seconds = cost.seconds(work)
        self.finish(plan, work, begun, begun + seconds, seconds)
        if work.tokens == work.sequences == len(plan.chunks):
            self._repeat(plan, work, seconds, cost, until)
        return plan

    def begin(self, now: float) -> tuple[StepPlan, StepWork]:
        """Schedule a step."""
        plan = self.scheduler.schedule(now)
        assert plan.chunks, "requests are checked to fit"
        self.scheduler.started(plan)
        work = StepWork.of(plan)
        if self._after_pause:
            work, self._after_pause = replace(work, after_pause=True), False
        return plan, work

    def finish(self, plan: StepPlan, work: StepWork, begun: float, ended: float, seconds: float) -> None:
        """Record a step's results.

        Args:
            plan, work: what :meth:`begin` returned.
            begun, ended: when.
            seconds: how long it kept this engine busy.
        """
        self.now = ended
        self.swapped += work.swapped
        self.scheduler.commit(plan, ended)
        self._count(seconds, 1)
        self._append(plan, begun)

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
                self.pauses.add(now - before)
            last[sequence] = now
            self._left[sequence] -= 1
            if before is None:
                self._first[sequence] = now
            if self._left[sequence] == 0:
                self._end(sequence)
        if usual:
            self.pauses.add(now - begun, usual)

    def _end(self, sequence: Sequence) -> None:
        request = sequence.request
        number, _ = self._arrivals.pop(sequence)
        del self._left[sequence], self._last[sequence]
        assert request.started is not None
        self.served.append(
            Served(
                number,
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

    def _repeat(self, plan: StepPlan, work: StepWork, seconds: float, cost: StepCost, until: float) -> None:
        """Steps of the same decodes, all at once: none ends, none arrives, and nobody lacks a block."""
        sequences = [chunk.sequence for chunk in plan.chunks]
        steps = self.scheduler.repeatable(plan, min(self._left.get(sequence, 0) for sequence in sequences) - 1)
        if steps >= 1 and until < math.inf:
            steps = min(steps, int((until - self.now) / seconds) + 1)
        # A decode's time grows with its context, evenly.
        total = 0.0
        while steps > 0:
            total = steps * (cost.seconds(work.later(1)) + cost.seconds(work.later(steps))) / 2
            if self.now + total * (steps - 1) / steps < until:
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
        self.pauses.add(total / steps, steps * len(sequences))
        self._count(total, steps)

    def _count(self, seconds: float, steps: int) -> None:
        size = self.scheduler.cache.block_size
        self.steps += steps
        self.busy += seconds
        filled = held = later = 0.0
        for sequence in self.scheduler.running:
            # Of several steps at once, the mean of the first and the last.
            for behind in (steps - 1, 0):
                computed = sequence.computed - behind
                capacity = len(sequence.blocks) * size if not behind else self.scheduler.cache.needed(computed) * size
                filled += computed / 2
                held += capacity / 2
                later += min(capacity - computed, self._left.get(sequence, 0) + behind + sequence.remaining) / 2
        self.filled += filled * seconds
        self.reserved += later * seconds
        self.wasted += max(0, held - filled - later) * seconds


def _prompt(arrival: Arrival, number: int) -> list[int]:
    """Tokens that are equal where the trace says that prefixes are."""
    if not arrival.prefix:
        return [0] * arrival.prompt
    tokens = [mark for mark in arrival.prefix for _ in range(PREFIX_BLOCK)][: arrival.prompt]
    # What is beyond the marks is the request's own.
    return tokens + [-1 - number] * (arrival.prompt - len(tokens))
