"""FastServe's skip-join multi-level feedback queue."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ...requests.sequence import Request, Sequence
from ..plan import StepPlan
from .fcfs import FirstComeFirstServed

LEVELS = 10
STARVED_QUANTA = 500
# A newcomer takes no blocks from who has had them for less than so many times as long as computing it again takes. Otherwise long
# prompts preempt each other in turn.
_LEAST_RUN = 16
# A step of that many tokens or more says how long a prompt's token takes; the shortest steps say how long a decode takes.
_PROMPT_TOKENS = 64


@dataclass
class _Job:
    """A request in the queues.

    Attributes:
        request: kept, so that no other has the same id.
        level: its queue; 0 goes first.
        used: the service that it got there, in seconds.
        served: when it last got any.
        since: the service that it got since it last lost its blocks.
        preemptions: how often that was.
    """

    request: Request
    level: int
    used: float
    served: float
    since: float = 0.0
    preemptions: int = 0

    def place(self) -> tuple[int, int]:
        """Its place in the order."""
        return self.level, self.request.number


class SkipJoinFeedbackQueue(FirstComeFirstServed):
    """As in FastServe (Wu et al., arXiv:2305.05920): short outputs overtake long ones without being known in advance.

    A request joins the first queue whose quantum covers the time of its prompt, and moves to the next one when it has used the
    quantum of its own, which doubles from queue to queue. Queues are served in order; a request that has not been served
    for ``starved`` times the first quantum moves to the first, where it may use the quantum that it had, or it would be demoted as soon as
    its tokens are computed again. Those that lose their place keep their blocks until others need them: the last of
    the lowest queue gives way first, and is swapped out ahead of need if there is host memory.

    Args:
        starved: in quanta of the first queue. Fewer let requests preempt each other in turn, which costs more than it helps.
        quantum: of the first queue, in seconds; by default the time of the shortest step so far.
    """

    pauses = True
    swaps_ahead = True

    def __init__(self, starved: float = STARVED_QUANTA, quantum: float | None = None) -> None:
        self._starved = starved
        self._fixed = quantum
        self._shortest: float | None = None
        self._seconds_per_token: float | None = None
        self._now = 0.0
        self._jobs: dict[int, _Job] = {}
        self._next_promotion = 0.0

    def begin(self, now: float) -> None:
        """Note the time."""
        self._now = now

    def order(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """By queue, then in order of arrival."""
        everyone = [*running, *waiting]
        jobs = self._jobs
        if len(jobs) > 2 * len(everyone) + 100:
            jobs = self._jobs = {id(s.request): jobs[id(s.request)] for s in everyone if id(s.request) in jobs}
        for sequence in everyone:
            if id(sequence.request) not in jobs:
                jobs[id(sequence.request)] = self._joined(sequence.request)
        starved = self._starved * self._quantum(0)
        if self._now > self._next_promotion and starved > 0:
            self._next_promotion = self._now + starved / 50
            for job in jobs.values():
                if self._now - job.served > starved:
                    job.used, job.level, job.served = -self._credit(job), 0, self._now
        placed = {key: job.place() for key, job in jobs.items()}
        return sorted(everyone, key=lambda sequence: placed[id(sequence.request)])

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        """The last of the lowest queue, else a beam that waits for it, else itself."""
        last = max(running, key=self._place)
        if last is not sequence:
            return last
        siblings = (s for s in reversed(running) if s.request is sequence.request and s.candidates is not None)
        return next(siblings, sequence)

    def gives_way(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """The last of a lower queue, if it has run for long enough since it last lost its blocks."""
        last = max(running, key=self._place, default=sequence)
        if self._level(last) <= self._level(sequence):
            return None
        job = self._jobs[id(last.request)]
        # It may have lost its blocks in a step that has not run yet.
        since = job.since if job.preemptions == last.request.preemptions else 0.0
        return last if since >= _LEAST_RUN * self._lost(last.computed) else None

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """Charge a step to its requests."""
        if seconds <= 0:
            return
        self._shortest = seconds if self._shortest is None else min(seconds, self._shortest)
        if plan.tokens >= _PROMPT_TOKENS and plan.has_prompts:
            self._seconds_per_token = seconds / plan.tokens
        # Of a request's sequences the last one counts: before its token, no quantum ends, or prompts would preempt each other.
        for request, has_token in {
            id(c.sequence.request): (c.sequence.request, c.is_last) for c in plan.chunks
        }.values():
            job = self._jobs.get(id(request))
            if job is None:
                continue
            job.served = max(self._now, plan.at + seconds)
            job.used += seconds
            if request.preemptions != job.preemptions:
                job.preemptions, job.since = request.preemptions, 0.0
            job.since += seconds
            while has_token and job.used >= self._quantum(job.level) and job.level < LEVELS - 1:
                job.level, job.used = job.level + 1, job.used - self._quantum(job.level)

    def _joined(self, request: Request) -> _Job:
        prefill = len(request.prompt) * (self._seconds_per_token or 0.0)
        level = next((i for i in range(LEVELS) if self._quantum(i) >= prefill), LEVELS - 1)
        return _Job(request, level, 0.0, request.arrived)

    def _credit(self, job: _Job) -> float:
        """What a request may use in the first queue before it moves on: the time of its tokens, if it lost its blocks, and the quantum it had."""
        lost = max((len(s.tokens) for s in job.request.sequences if not s.blocks and not s.swapped), default=0)
        return self._lost(lost) + self._quantum(job.level)

    def _lost(self, tokens: int) -> float:
        """The time of computing so many tokens again."""
        return tokens * (self._seconds_per_token or 0.0)

    def _quantum(self, level: int) -> float:
        return (self._fixed or self._shortest or 0.0) * 2**level

    def _level(self, sequence: Sequence) -> int:
        return self._jobs[id(sequence.request)].level

    def _place(self, sequence: Sequence) -> tuple[int, int]:
        return self._jobs[id(sequence.request)].place()
