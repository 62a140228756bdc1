"""A scheduler alone, with an executor that takes a second for each step and always gives the same token."""

from __future__ import annotations

from dataclasses import dataclass, field

from smelt.runtime import SamplingParams
from smelt.runtime.blocks.block_cache import BlockCache
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.scheduling.admission import PeakAdmission
from smelt.runtime.scheduling.plan import StepPlan
from smelt.runtime.scheduling.policies.table import POLICIES
from smelt.runtime.scheduling.scheduler import Scheduler


@dataclass
class Drive:
    """Requests through a scheduler.

    Attributes:
        plans: of all steps so far.
        first: when each request got its first token.
        ended: when each request got its last one.
        outputs: how many tokens each request generates.
    """

    policy: str = "fcfs"
    blocks: int = 1000
    block_size: int = 4
    token_budget: int = 16
    max_sequences: int = 8
    predicts: bool = False
    now: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = BlockCache(self.blocks, self.block_size, share_prefixes=False)
        self.scheduler = Scheduler(
            self.cache,
            token_budget=self.token_budget,
            max_sequences=self.max_sequences,
            policy=POLICIES[self.policy](),
            admission=PeakAdmission(self.cache) if self.predicts else None,
        )

    def add(
        self, name: str, prompt: int, output: int, *, priority: int = 0, predicted: int | None = None, most: int = 0
    ) -> Request:
        """Queue a request of a prompt's length that ends after ``output`` tokens, of at most ``most``."""
        params = SamplingParams(max_tokens=most or output)
        request = Request(name, [1] * prompt, params, prompt + (most or output), priority=priority)
        request.predicted_tokens = predicted
        request.sequences = [Sequence(request, 0, [1] * prompt, None)]
        self.outputs[name] = output
        self.scheduler.add(request.sequences[0], self.now)
        return request

    def step(self) -> StepPlan:
        """One step."""
        plan = self.scheduler.schedule(self.now)
        self.scheduler.started(plan)
        self.now += 1
        self.scheduler.commit(plan, self.now)
        self.plans.append(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if not chunk.is_last:
                continue
            sequence.tokens.append(1)
            self.first.setdefault(sequence.request.id, self.now)
            if len(sequence.generated) == self.outputs[sequence.request.id]:
                self.ended[sequence.request.id] = self.now
                self.scheduler.end(sequence, "stop")
        return plan

    def run(self, steps: int = 10_000) -> None:
        """Steps until all requests have ended."""
        while self.scheduler.has_work:
            self.step()
            steps -= 1
            assert steps > 0, "requests do not end"


def pieces(plan: StepPlan) -> dict[str, int]:
    """How many tokens of each request a step has."""
    return {chunk.sequence.request.id: chunk.count for chunk in plan.chunks}
