"""A pipeline of stages, each with a share of the layers; several batches are under way at once."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...costs.work import StepCost, StepWork
from ...requests.trace import Arrival
from ..options import SimulatedEngine
from ..replica import Replica
from ..results import SimulationResult
from ..simulation import shares_prefixes


@dataclass
class Lane:
    """Batches of one model that pass through the stages one after another: an engine with its own sequences and blocks.

    Attributes:
        engine: schedules the batches.
        stages: the cost of each stage.
        model: of which model requests are; several may share the stages.
        ready: when its last batch has left the last stage.
    """

    engine: Replica
    stages: Sequence[StepCost]
    model: int = 0
    ready: float = 0.0


@dataclass
class Pipeline:
    """Stages that lanes share, first come, first served.

    Args:
        lanes: at least one for each stage of a model, or stages wait for work.
        send: seconds to send a batch's hidden states to the next stage, for each token.

    Attributes:
        busy: of each stage, in seconds.
        bubbles: the share of a stage's time, while any batch is under way, in which it had none.
    """

    lanes: list[Lane]
    send: float = 0.0
    busy: list[float] = field(default_factory=list)
    _free: list[float] = field(default_factory=list)
    _active: float = 0.0
    _until: float = 0.0

    def __post_init__(self) -> None:
        count = max(len(lane.stages) for lane in self.lanes)
        self.busy, self._free = [0.0] * count, [0.0] * count

    @property
    def bubbles(self) -> float:
        """The idle share of the stages while there was work."""
        return 1 - sum(self.busy) / (len(self.busy) * self._active) if self._active else 0.0

    def serve(self, arrivals: Sequence[tuple[int, Arrival]]) -> None:
        """Serve requests, in order of time, each of a model."""
        by_model: dict[int, list[Lane]] = {}
        for lane in self.lanes:
            by_model.setdefault(lane.model, []).append(lane)
        for number, (model, arrival) in enumerate(arrivals):
            self._run(arrival.at)
            lane = min(by_model[model], key=lambda lane: lane.engine.load)
            lane.engine.check(arrival)
            lane.engine.submit(number, arrival)
        self._run(math.inf)

    def _run(self, time: float) -> None:
        """Start batches that begin before ``time``."""
        queue = [(self._starts(lane), i) for i, lane in enumerate(self.lanes) if lane.engine.has_work]
        heapq.heapify(queue)
        while queue:
            starts, i = heapq.heappop(queue)
            lane = self.lanes[i]
            now = max(starts, self._free[0])
            if now >= time:
                continue
            self._pass(lane, now)
            if lane.engine.has_work:
                heapq.heappush(queue, (self._starts(lane), i))

    def _starts(self, lane: Lane) -> float:
        return max(lane.ready, lane.engine.now)

    def _pass(self, lane: Lane, now: float) -> None:
        plan, work = lane.engine.begin(now)
        end = now
        busy = 0.0
        for stage, cost in enumerate(lane.stages):
            begun = max(end, self._free[stage])
            seconds = cost.seconds(work)
            end = begun + seconds
            self._free[stage] = end
            self.busy[stage] += seconds
            busy += seconds
            if stage + 1 < len(lane.stages):
                end += self.send * work.tokens
        lane.engine.finish(plan, work, now, end, busy / len(lane.stages))
        lane.ready = end
        self._active += max(0.0, end - max(now, self._until))
        self._until = max(self._until, end)


@dataclass(frozen=True)
class StepInPieces:
    """A step's cost in an engine whose stages compute pieces of each step one after another, and wait for its end.

    Args:
        stages: the cost of each.
        pieces: how many a step of so many tokens has; they have equally many.
        send: seconds for each token to the next stage.
    """

    stages: Sequence[StepCost]
    pieces: Callable[[int], int]
    send: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """The time of a step."""
        return self.passed(equal_parts(work, self.pieces(work.tokens)))[0]

    def passed(self, pieces: Sequence[StepWork]) -> tuple[float, float]:
        """The time of a step in given pieces, and the share of the stages' time in which they have none."""
        free, busy = [0.0] * len(self.stages), 0.0
        for piece in pieces:
            arrived = 0.0
            for stage, cost in enumerate(self.stages):
                seconds = cost.seconds(piece)
                free[stage] = max(free[stage], arrived) + seconds
                arrived = free[stage] + self.send * piece.tokens
                busy += seconds
        return free[-1], 1 - busy / (len(free) * free[-1])


def equal_parts(work: StepWork, count: int) -> list[StepWork]:
    """A step's work in so many pieces of equally many tokens."""

    def part(total: int, which: int) -> int:
        return total * (which + 1) // count - total * which // count

    return [
        replace(
            work,
            tokens=part(work.tokens, i),
            sequences=part(work.sequences, i),
            cached=part(work.cached, i),
            pairs=part(work.pairs, i),
            chunks=-(-work.chunks // count),
            prompts=-(-work.prompts // count),
            prompt_pairs=part(work.prompt_pairs, i),
        )
        for i in range(count)
    ]


def simulate_pipeline(
    arrivals: Sequence[Arrival], engine: SimulatedEngine, stages: Sequence[StepCost], *, send: float = 0.0
) -> tuple[SimulationResult, float]:
    """Serve a trace with a pipeline; each of as many batches as there are stages has its part of the sequences.

    Args:
        arrivals: in order of time.
        engine: of one batch.
        stages: the cost of each.
        send: seconds for each token to the next stage.

    Returns:
        The result, and the share of bubbles.
    """
    share = shares_prefixes(arrivals)
    pipeline = Pipeline([Lane(Replica(engine, enable_prefix_caching=share), stages) for _ in stages], send)
    pipeline.serve([(0, arrival) for arrival in arrivals])
    return SimulationResult.of(engine.policy, [lane.engine for lane in pipeline.lanes]), pipeline.bubbles
