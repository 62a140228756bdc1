"""Which sequences run in the next step, and with how many tokens. Touches no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from ..blocks.block_cache import BlockCache, Copy
from ..requests.sequence import Request, Sequence
from .admission import PeakAdmission
from .drafting import Drafting
from .plan import Chunk, StepPlan
from .policy import Policy
from .swapping import Swapping

# The share of the cache's blocks that swapping ahead keeps free: one of so many.
_RESERVED = 16


class Scheduler:
    """Continuous batching: every step is filled anew.

    A policy decides which sequences run first, are preempted and start next, and how much of a prompt a step takes. With first come, first
    served, ``running`` and ``waiting``
    together are in first come, first served order: a running sequence takes blocks only from those after it (and from
    beams of its own request that wait for it), and no sequence is admitted past a waiting one. So the first sequence with
    work always progresses: a request that fits alone finishes. A sequence is admitted only when there is room for all its
    tokens besides the pending tokens of the running ones, so that sequences do not preempt each other in turn without
    progress.

    Args:
        cache: the block allocator.
        max_num_batched_tokens: the most tokens in a step.
        max_num_seqs: the most sequences that run at once.
        policy: in which order.
        admission: whether a sequence may start beside those that run; None to start all that have room for the tokens that they
            have.
        swapping: whether a preempted sequence's blocks are saved in host memory or computed again; None to compute them.

    Attributes:
        preemptions: how often a sequence lost its blocks.
        swaps: how often they were saved in host memory.
        drafting: how many draft tokens a step's sequences get; None for none.
        most_verified: the most tokens of a step with drafts; None for any number.
        same_rows: more tokens in a step would be computed otherwise, to the last bit: drafts never make it so long. None if nothing depends on it.
    """

    def __init__(
        self,
        cache: BlockCache,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        policy: Policy,
        admission: PeakAdmission | None = None,
        swapping: Swapping | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.policy = policy
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.swaps = 0
        self._admission = admission
        self._swapping = swapping
        self.drafting: Drafting | None = None
        self.most_verified: int | None = None
        self.same_rows: int | None = None
        self._changes = 0  # of what admission depends on: who runs, and what the cache holds
        self._arrivals = 0
        self._committed = 0.0
        self._is_step = True  # the last plan: an empty one is not executed
        self._spare: list[int] = []  # blocks of the step's drafts' branches

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        """Queue a request's first sequence.

        Args:
            sequence: its prompt.
            now: the time of its arrival in seconds, from any origin.
        """
        request = sequence.request
        request.arrived, request.number = now, self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Fill the next step. It is empty only if nothing waits or runs.

        Args:
            now: the time in seconds, from the same origin as in :meth:`add`.
        """
        if self._is_step:  # otherwise blocks that the last plan saved are still to be copied
            self.cache.begin_step()
        self.cache.release(self._spare)  # of a step that failed
        self.policy.begin(now)
        plan = StepPlan([], at=now)
        self._fill(plan)
        while not plan.chunks and self.waiting and self._give_way():
            self._fill(plan)
        if self.policy.swaps_ahead and plan.chunks and self._swapping is not None:
            self._swap_ahead(plan)
        if self.drafting is not None:
            self._add_drafts(plan, self.drafting)
        self._is_step = bool(plan.chunks)
        if self._is_step:
            plan.swap_out.extend(self.cache.swap_out)
            plan.swap_in.extend(self.cache.swap_in)
        return plan

    def started(self, plan: StepPlan) -> None:
        """Record that a plan is running: the next step may build on its results."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            sequence.pending += chunk.is_last

    def commit(self, plan: StepPlan, now: float = 0.0, replaced: Mapping[Sequence, Copy] | None = None) -> None:
        """Record that a plan has run; its tokens are appended after this.

        Args:
            plan: what :meth:`schedule` returned.
            now: the time in seconds.
            replaced: for sequences that go on with a branch of their draft, which of their blocks gives way to which spare one,
                ``(index, block)``.
        """
        for sequence, (place, block) in (replaced or {}).items():
            if sequence.finish is None and sequence.admitted:
                self._spare[self._spare.index(block)], sequence.blocks[place] = sequence.blocks[place], block
        self.cache.release(self._spare)
        self._changes += any(chunk.count > 1 for chunk in plan.chunks)  # of prompts, whose blocks others may find
        seconds = now - max(plan.at, self._committed)
        self.policy.ran(plan, seconds)
        if self._swapping is not None:
            self._swapping.ran(plan, seconds)
        self._committed = now
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.pending -= chunk.is_last
            if sequence.finish is not None or sequence.swapped:
                continue  # it ended or was preempted while this step was running, and has no blocks
            known = min(sequence.computed, len(sequence.tokens))
            self.cache.publish(sequence.blocks, sequence.keys, sequence.tokens, known, sequence.request.salt)

    def accepted(self, sequence: Sequence, count: int) -> None:
        """Record that draft tokens of a committed step are the sequence's own: their keys and values are computed.

        Args:
            sequence: to which they were appended.
            count: how many.
        """
        if sequence.admitted:
            sequence.computed += count

    def repeatable(self, plan: StepPlan, most: int) -> int:
        """How many more steps would be ``plan`` again, each sequence a token further, if none ends or arrives.

        Only decodes are repeated, and only where no order could make a difference: all that run are in the step, and who waits
        waits for a place.

        Args:
            plan: which has been committed, and its tokens appended.
            most: the answer at most.
        """
        if len(plan.chunks) != len(self.running) or any(not chunk.sequence.admitted for chunk in plan.chunks):
            return 0
        if self.waiting and (self.policy.pauses or sum(map(_places, self.running)) < self.max_num_seqs):
            return 0
        while most > 0 and self._blocks_for(plan, most) > self.cache.free:
            most //= 2
        return max(0, most)

    def repeat(self, plan: StepPlan, steps: int, now: float) -> None:
        """Record that a plan of decodes was repeated; its tokens are appended after this.

        Args:
            plan: the first of the steps.
            steps: at most as many as :meth:`repeatable` allows.
            now: the time after the last one.
        """
        for chunk in plan.chunks:
            sequence = chunk.sequence
            copies = self.cache.grow(sequence.blocks, sequence.computed, sequence.computed + steps)
            assert copies is not None, "repeatable has counted the blocks"
            sequence.computed += steps
        self.policy.ran(plan, now - self._committed)
        self._committed = now

    def _blocks_for(self, plan: StepPlan, steps: int) -> int:
        return sum(
            max(0, self.cache.needed(chunk.sequence.computed + steps) - len(chunk.sequence.blocks))
            for chunk in plan.chunks
        )

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Run ``child`` alongside ``parent``, sharing its computed blocks."""
        self._changes += 1
        child.blocks = self.cache.fork(parent.blocks)
        child.keys = list(parent.keys)
        child.computed = parent.computed
        if parent.swapped:
            assert self.cache.host is not None
            child.saved, child.swapped = [self.cache.host.hold(saved) for saved in parent.saved], True
        if parent in self.running:
            self.running.insert(self.running.index(parent) + 1, child)
            child.admitted = True
        else:  # the parent was preempted while it waited for its siblings
            self.waiting.insert(self.waiting.index(parent) + 1, child)

    def end(self, sequence: Sequence, reason: str) -> None:
        """Remove a sequence."""
        if self._admission is not None and sequence.finish is None and reason in ("stop", "length"):
            self._admission.ended(sequence)
        sequence.finish = sequence.finish or reason
        self._changes += 1
        self._drop(sequence)
        sequence.candidates = None
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _fill(self, plan: StepPlan) -> None:
        """Go through the sequences in the policy's order: continue those that run, and start those that wait, up to the first that cannot."""
        budget = self.max_num_batched_tokens - plan.tokens
        places = 0 if self.policy.pauses else sum(map(_places, self.running))
        passed: Request | None = None
        blocked = False
        left = len(self.running)  # that have not been seen yet
        for sequence in list(self.policy.order(self.waiting, self.running, self.max_num_seqs)):
            if budget == 0 or (blocked and left == 0):
                return
            count = 0
            if sequence.admitted:
                left -= 1
                places += _places(sequence) if self.policy.pauses else 0
                if places > self.max_num_seqs:
                    places -= _places(sequence)
                elif sequence.remaining > 0:
                    count = self._continue(sequence, budget, plan)
                    blocked = blocked or not sequence.admitted  # it gave up its own blocks: nobody starts past it
            elif blocked or (passed is not None and sequence.request is not passed):
                continue
            elif sequence.candidates is not None or sequence.pending:
                # It has nothing to compute until its siblings or its last token are available.
                passed = sequence.request
            elif places + _places(sequence) > self.max_num_seqs:
                blocked = True
            else:
                count = self._admit(sequence, budget, plan)
                blocked = count == 0
                places += 0 if blocked else _places(sequence)
            budget -= count

    def _add_drafts(self, plan: StepPlan, drafting: Drafting) -> None:
        """Give the step's decodes places for draft tokens, as far as tokens and blocks are left that nobody else needs."""
        most = (
            self.max_num_batched_tokens
            if self.most_verified is None
            else min(self.max_num_batched_tokens, self.most_verified)
        )
        budget = most - plan.tokens
        if self.same_rows is not None:
            # Beside a long prompt only the rows that have logits are few.
            rows = plan.tokens if plan.tokens <= self.same_rows else len(plan.chunks)
            budget = min(budget, self.same_rows - rows) if rows <= self.same_rows else budget
        sizes = drafting.sizes(plan, budget)
        for i, size in sizes.items():
            chunk = plan.chunks[i]
            sequence, computed = chunk.sequence, chunk.start + chunk.count
            # The last possible token is never computed.
            count = min(size.chain, budget, sequence.request.grows_to - 1 - computed)
            room = len(sequence.blocks) * self.cache.block_size - computed
            if count > room and self.cache.needed(computed + count) - len(sequence.blocks) > self.cache.free:
                count = room
            if count <= 0:
                continue
            copies = self.cache.grow(sequence.blocks, computed, computed + count)
            assert copies == [], "what is after a sequence's last token is shared with no other"
            plan.chunks[i] = replace(chunk, drafts=count, rule=size.rule, looks_up=size.looks_up)
            budget -= count
        for i, size in sizes.items():  # what the chains have left
            branches = min(size.branches, budget, self.cache.free)
            if not plan.chunks[i].drafts or branches <= 0:
                continue
            spare: list[int] = []
            self.cache.grow(spare, 0, branches * self.cache.block_size)
            self._spare += spare
            branched = min(size.branched, budget)
            plan.chunks[i] = replace(plan.chunks[i], branched=branched, spare=tuple(spare))
            budget -= branched

    def _continue(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Compute more of a running sequence; returns how many tokens."""
        count = self.policy.count(sequence, budget, plan, self.max_num_batched_tokens)
        if count == 0:
            return 0
        copies = self.cache.grow(sequence.blocks, sequence.computed, sequence.computed + count)
        if copies:
            plan.copies.extend(copies)
        elif copies is None and not self._make_room(sequence, sequence.computed + count, plan):
            return 0
        plan.chunks.append(Chunk(sequence, sequence.computed, count, count == sequence.remaining))
        return count

    def _make_room(self, sequence: Sequence, stop: int, plan: StepPlan) -> bool:
        """Allocate blocks for a running sequence, preempting others if necessary; it may be preempted itself."""
        while True:
            copies = self.cache.grow(sequence.blocks, sequence.computed, stop)
            if copies is not None:
                plan.copies.extend(copies)
                return True
            victim = self.policy.victim(sequence, self._not_in(plan))
            self._preempt(victim, plan)
            if victim is sequence:
                return False

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Free a sequence's blocks, which are saved in host memory or computed again from its tokens when there is room."""
        assert all(chunk.sequence is not sequence for chunk in plan.chunks), "who is in the step must not give way"
        self._changes += 1
        self.preemptions += 1
        sequence.request.preemptions += 1
        sequence.admitted = False
        self.running.remove(sequence)
        saved = None
        if self._swapping is not None and self._swapping.pays(sequence.computed):
            saved = self.cache.save(sequence.blocks, sequence.keys, sequence.computed)
        if saved is None:
            self._drop(sequence)
        else:
            self.swaps += 1
            sequence.blocks, sequence.saved, sequence.swapped = [], saved, True
        self.waiting.appendleft(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        self.cache.discard(sequence.saved)
        sequence.swapped = False
        sequence.keys.clear()
        sequence.computed = 0

    def _put_back(self, sequence: Sequence) -> None:
        """Release what was found for a sequence that does not start after all."""
        if not sequence.swapped:
            self._drop(sequence)

    def _admit(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Start a waiting sequence; returns how many of its tokens the step computes, 0 if it has to wait."""
        if sequence.refused_at == self._changes and not self.policy.pauses:
            return 0  # as before, without looking a long prompt's prefix up at each step
        allowed = self._is_allowed(sequence, plan)
        self._find(sequence)
        if not allowed and not (sequence.blocks and self._is_allowed(sequence, plan)):  # with a prefix that others hold
            self._put_back(sequence)
            sequence.refused_at = self._changes
            return 0  # one of those that run will end, and free its blocks
        count = self.policy.count(sequence, budget, plan, self.max_num_batched_tokens)
        while count > 0 and not self._has_room(sequence):
            victim = self.policy.gives_way(sequence, self._not_in(plan))
            if victim is None:
                count = 0
            else:
                self._preempt(victim, plan)
        if count == 0:
            self._put_back(sequence)
            return 0
        self.cache.restore(sequence.blocks, sequence.saved)
        sequence.swapped = False
        copies = self.cache.grow(sequence.blocks, sequence.computed, sequence.computed + count)
        assert copies is not None, "there was room"
        request = sequence.request
        if request.started is None:
            request.started, request.cached_tokens = plan.at, sequence.computed
        plan.copies.extend(copies)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._changes += 1
        sequence.admitted = True
        plan.chunks.append(Chunk(sequence, sequence.computed, count, count == sequence.remaining))
        return count

    def _is_allowed(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether the cache is predicted to hold a waiting sequence besides those that run, except for those that would give way to it."""
        # With a policy that pauses others, who comes first does not wait for them.
        if self._admission is None or (self.policy.pauses and not plan.chunks):
            return True
        if all(each.request is sequence.request for each in self.running):
            return True  # a request that fits alone is not kept from its own places
        stay = list(self.running)
        while stay and not self._admission.allows(stay, sequence):
            yields = self.policy.gives_way(sequence, _without(stay, plan))
            if yields is None:
                return False
            stay.remove(yields)
        return True

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether the cache has room for all tokens of a sequence and of those that run."""
        return self._missing(sequence) + sum(map(self._missing, self.running)) <= self.cache.free

    def _swap_ahead(self, plan: StepPlan) -> None:
        """Keep some blocks free for the next steps, by swapping out sequences that are not in this one."""
        while self.cache.free < self.cache.blocks // _RESERVED:
            paused = [sequence for sequence in self._not_in(plan) if sequence.remaining > 0 and not sequence.pending]
            ordered = self.policy.order(self.waiting, self.running, self.max_num_seqs)
            last = [sequence for sequence in ordered if sequence in paused][-1:]
            if not last or self._swapping is None or not self._swapping.pays(last[0].computed):
                return
            before = self.swaps
            self._preempt(last[0], plan)
            if self.swaps == before:
                return  # host memory is full

    def _not_in(self, plan: StepPlan) -> list[Sequence]:
        """The running sequences that are not in the step."""
        return _without(self.running, plan)

    def _find(self, sequence: Sequence) -> None:
        """Hold the cached blocks of a sequence's prefix."""
        if sequence.swapped:
            return
        tokens, salt = sequence.tokens, sequence.request.salt
        usable = sequence.first_wanted // self.cache.block_size  # later positions are computed for their logits
        sequence.blocks, sequence.keys = self.cache.find(tokens, salt)
        sequence.saved = self.cache.find_saved(sequence.keys, tokens, salt)
        here = len(sequence.blocks)
        beyond, sequence.blocks = sequence.blocks[usable:], sequence.blocks[:usable]
        self.cache.release(beyond)
        most = max(0, usable - here)
        saved_beyond, sequence.saved = sequence.saved[most:], sequence.saved[:most]
        self.cache.discard(saved_beyond)
        del sequence.keys[usable:]
        sequence.computed = len(sequence.keys) * self.cache.block_size

    def _missing(self, sequence: Sequence) -> int:
        """Blocks that a sequence lacks for the tokens it has."""
        return max(0, self.cache.needed(len(sequence.tokens)) - len(sequence.blocks))

    def _give_way(self) -> bool:
        """Preempt a beam that waits for its siblings, so that they can run."""
        idle = [sequence for sequence in self.running if sequence.candidates is not None]
        if idle:
            self._preempt(idle[-1], StepPlan([]))
        return bool(idle)


def _places(sequence: Sequence) -> int:
    """The number of sequences after its prompt is computed."""
    request = sequence.request
    return 1 if request.forked else max(request.params.sequences, len(request.sequences))


def _without(sequences: list[Sequence], plan: StepPlan) -> list[Sequence]:
    """Those that are not in the step."""
    taken = {id(chunk.sequence) for chunk in plan.chunks}
    return [sequence for sequence in sequences if id(sequence) not in taken]


def live(request: Request) -> list[Sequence]:
    """A request's sequences that have not ended."""
    return [sequence for sequence in request.sequences if sequence.finish is None]
