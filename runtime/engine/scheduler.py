"""Which sequences run in the next step, and with how many tokens. Touches no tensor."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .block_cache import BlockCache, Copy
from .policy import FirstComeFirstServed, Policy
from .sequence import Request, Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to compute: ``count`` from position ``start`` on.

    Attributes:
        is_last: whether it reaches the end of the sequence, so that its next token can be sampled.
    """

    sequence: Sequence
    start: int
    count: int
    is_last: bool


@dataclass(frozen=True)
class StepPlan:
    """The work of a step: copy blocks, then compute chunks."""

    chunks: list[Chunk]
    copies: list[Copy] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Continuous batching: every step is filled anew, decodes first, then chunked prefills.

    A policy decides which sequences run first, are preempted and start next. With the default, ``running`` and ``waiting``
    together are in first come, first served order: a running sequence takes blocks only from those after it (and from
    beams of its own request that wait for it), and no sequence is admitted past a waiting one. So the first sequence with
    work always progresses: a request that fits alone finishes. A sequence is admitted only when there is room for all its
    tokens besides the pending tokens of the running ones, so that sequences do not preempt each other in turn without
    progress.

    Args:
        cache: the block allocator.
        token_budget: the most tokens in a step.
        max_sequences: the most sequences that run at once.
        policy: first come, first served by default.
    """

    def __init__(
        self, cache: BlockCache, *, token_budget: int, max_sequences: int, policy: Policy | None = None
    ) -> None:
        self.cache = cache
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self.policy = policy or FirstComeFirstServed()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> StepPlan:
        """Fill the next step. It is empty only if nothing waits or runs."""
        plan = StepPlan([])
        budget = self._continue_running(plan, self.token_budget)
        self._admit(plan, budget)
        while not plan.chunks and self.waiting and self._give_way():
            self._admit(plan, self.token_budget)
        return plan

    def started(self, plan: StepPlan) -> None:
        """Record that a plan is running: the next step may build on its results."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            sequence.pending += chunk.is_last

    def commit(self, plan: StepPlan) -> None:
        """Record that a plan has run; its tokens are appended after this."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.pending -= chunk.is_last
            if sequence.finish is not None:
                continue  # it ended while this step was running, and has no blocks
            known = min(sequence.computed, len(sequence.tokens))
            self.cache.publish(sequence.blocks, sequence.keys, sequence.tokens, known, sequence.request.salt)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Run ``child`` alongside ``parent``, sharing its computed blocks."""
        child.blocks = self.cache.fork(parent.blocks)
        child.keys = list(parent.keys)
        child.computed = parent.computed
        if parent in self.running:
            self.running.insert(self.running.index(parent) + 1, child)
        else:  # the parent was preempted while it waited for its siblings
            self.waiting.insert(self.waiting.index(parent) + 1, child)

    def end(self, sequence: Sequence, reason: str) -> None:
        """Remove a sequence."""
        sequence.finish = sequence.finish or reason
        self.cache.release(sequence.blocks)
        sequence.candidates = None
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _continue_running(self, plan: StepPlan, budget: int) -> int:
        for sequence in list(self.policy.running_order(self.running)):
            if sequence not in self.running or sequence.remaining == 0:
                continue  # preempted for one before it, or waiting for its siblings
            count = min(sequence.remaining, budget)
            if count == 0:
                continue
            if self._make_room(sequence, sequence.computed + count, plan):
                plan.chunks.append(Chunk(sequence, sequence.computed, count, count == sequence.remaining))
                budget -= count
        return budget

    def _make_room(self, sequence: Sequence, stop: int, plan: StepPlan) -> bool:
        """Allocate blocks for a running sequence, preempting others if necessary; it may be preempted itself."""
        while True:
            copies = self.cache.grow(sequence.blocks, sequence.computed, stop)
            if copies is not None:
                plan.copies.extend(copies)
                return True
            victim = self.policy.victim(sequence, self.running)
            assert all(chunk.sequence is not victim for chunk in plan.chunks), "who is in the step must not give way"
            self._preempt(victim)
            if victim is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's blocks; it is recomputed from its tokens when there is room."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._drop(sequence)
        self.waiting.appendleft(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        sequence.keys.clear()
        sequence.computed = 0

    def _admit(self, plan: StepPlan, budget: int) -> None:
        passed: Request | None = None
        for sequence in list(self.policy.admissible(self.waiting, self.running, self.max_sequences)):
            if passed is not None and sequence.request is not passed:
                continue
            if sequence.candidates is not None or sequence.pending:
                # It has nothing to compute until its siblings or its last token are available.
                passed = sequence.request
                continue
            if budget == 0 or sum(map(_places, [*self.running, sequence])) > self.max_sequences:
                return
            self._find(sequence)
            count = min(sequence.remaining, budget)
            copies = None
            if self._missing(sequence) + sum(map(self._missing, self.running)) <= self.cache.free:
                copies = self.cache.grow(sequence.blocks, sequence.computed, sequence.computed + count)
            if copies is None:
                self._drop(sequence)
                return
            plan.copies.extend(copies)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            plan.chunks.append(Chunk(sequence, sequence.computed, count, count == sequence.remaining))
            budget -= count

    def _find(self, sequence: Sequence) -> None:
        """Hold the cached blocks of a sequence's prefix."""
        sequence.blocks, sequence.keys = self.cache.find(sequence.tokens, sequence.request.salt)
        usable = sequence.first_wanted // self.cache.block_size  # later positions are computed for their logits
        beyond, sequence.blocks = sequence.blocks[usable:], sequence.blocks[:usable]
        self.cache.release(beyond)
        del sequence.keys[usable:]
        sequence.computed = len(sequence.blocks) * self.cache.block_size

    def _missing(self, sequence: Sequence) -> int:
        """Blocks that a sequence lacks for the tokens it has."""
        return max(0, self.cache.needed(len(sequence.tokens)) - len(sequence.blocks))

    def _give_way(self) -> bool:
        """Preempt a beam that waits for its siblings, so that they can run."""
        idle = [sequence for sequence in self.running if sequence.candidates is not None]
        if idle:
            self._preempt(idle[-1])
        return bool(idle)


def _places(sequence: Sequence) -> int:
    """The number of sequences after its prompt is computed."""
    request = sequence.request
    return 1 if request.forked else max(request.params.sequences, len(request.sequences))


def live(request: Request) -> list[Sequence]:
    """A request's sequences that have not ended."""
    return [sequence for sequence in request.sequences if sequence.finish is None]
