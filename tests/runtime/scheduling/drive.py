"""A scheduler alone, with an executor that takes a second for each step and whose next token is a hash of all before it.

The executor keeps what each position of each block was computed from, moves it as plans say, and refuses to go on from anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from smelt.runtime import SamplingParams
from smelt.runtime.blocks.block_cache import BlockCache
from smelt.runtime.blocks.host_tier import HostTier
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.scheduling.admission import PeakAdmission
from smelt.runtime.scheduling.plan import StepPlan
from smelt.runtime.scheduling.policies.table import POLICIES
from smelt.runtime.scheduling.scheduler import Scheduler, live
from smelt.runtime.scheduling.swapping import SwapMode, Swapping, TransferCost

VOCABULARY = 50
# Eight blocks take as long as one, so that with `auto` only long sequences are swapped.
COST = TransferCost(1, 8, 0.2, 1e9)


class Contents:
    """What each position of the blocks, and of the slots in host memory, was computed from: a hash of all tokens up to it."""

    def __init__(self, blocks: int, block_size: int, slots: int) -> None:
        self._size = block_size
        self._blocks = [[0] * block_size for _ in range(blocks)]
        self._slots = [[0] * block_size for _ in range(slots)]

    def move(self, plan: StepPlan) -> None:
        """Swap out, swap in and copy."""
        for pairs in (plan.swap_out, plan.swap_in, plan.copies):
            sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
            assert len(set(targets)) == len(targets), "two copies to one place"
            # Some executors copy in this order, others all at once.
            assert pairs is not plan.copies or not any(t in sources[i + 1 :] for i, t in enumerate(targets))
        for block, slot in plan.swap_out:
            self._slots[slot] = list(self._blocks[block])
        for slot, block in plan.swap_in:
            self._blocks[block] = list(self._slots[slot])
        for source, target in plan.copies:
            self._blocks[target] = list(self._blocks[source])

    def read(self, blocks: list[int], stop: int) -> list[int]:
        """The first positions of a sequence."""
        return [each for block in blocks[: -(-stop // self._size)] for each in self._blocks[block]][:stop]

    def write(self, blocks: list[int], start: int, found: list[int]) -> None:
        """Positions of a sequence from ``start`` on."""
        for position, each in enumerate(found, start):
            self._blocks[blocks[position // self._size]][position % self._size] = each

    def spoil(self, plan: StepPlan) -> None:
        """Leave nothing where a step would have written."""
        for _, slot in plan.swap_out:
            self._slots[slot] = [0] * self._size
        written = [block for chunk in plan.chunks for block in chunk.sequence.blocks[chunk.start // self._size :]]
        for block in (*(block for _, block in [*plan.swap_in, *plan.copies]), *written):
            self._blocks[block] = [0] * self._size


@dataclass
class Drive:
    """Requests through a scheduler.

    Attributes:
        share: whether blocks of common prefixes are shared.
        slots: host memory, in blocks.
        swap: whether preempted sequences go there.
        ahead: whether steps start before the ones before them have given their tokens, as on a GPU.
        token_seconds: what a token adds to a step's second.
        breaks: which steps break while they are computed.
        broken: how many did.
        plans: of all steps so far.
        first: when each request got its first token.
        ended: when each request got its last one.
        outputs: how many tokens each request generates; each further sample one less.
        answers: the tokens of each request's samples that have ended.
    """

    policy: str = "fcfs"
    blocks: int = 1000
    block_size: int = 4
    max_num_batched_tokens: int = 16
    max_num_seqs: int = 8
    predicts: bool = False
    share: bool = False
    slots: int = 0
    swap: SwapMode = "auto"
    ahead: bool = False
    token_seconds: float = 0.0
    breaks: Callable[[StepPlan], bool] = lambda _: False
    broken: int = 0
    now: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    answers: dict[str, dict[int, list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        host = HostTier(self.slots) if self.slots else None
        self.cache = BlockCache(self.blocks, self.block_size, enable_prefix_caching=self.share, host=host)
        self.scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            policy=POLICIES[self.policy](),
            admission=PeakAdmission(self.cache) if self.predicts else None,
            swapping=Swapping(self.swap, self.block_size, COST) if self.slots else None,
        )
        self.contents = Contents(self.blocks, self.block_size, self.slots)
        self.requests: dict[str, Request] = {}  # that have not ended
        self._started: tuple[StepPlan, dict[Sequence, int]] | None = None
        self._seen: dict[
            Sequence, tuple[list[int], list[int]]
        ] = {}  # each one's tokens, also those of a started step, and their hashes

    def add(
        self,
        name: str,
        prompt: int | list[int],
        output: int,
        *,
        priority: int = 0,
        deadline: float | None = None,
        predicted: int | None = None,
        most: int = 0,
        n: int = 1,
        salt: bytes = b"",
    ) -> Request:
        """Queue a request of a prompt, or a prompt's length, that ends after ``output`` tokens, of at most ``most``."""
        tokens = [1] * prompt if isinstance(prompt, int) else prompt
        params = SamplingParams(max_tokens=most or output, n=n)
        request = Request(
            name, tokens, params, len(tokens) + (most or output), salt, priority=priority, deadline=deadline
        )
        request.predicted_tokens = predicted
        request.sequences = [Sequence(request, i, list(tokens)) for i in range(n)]
        for sequence in request.sequences:
            self._seen[sequence] = list(tokens), hashes(tokens, salt)
        self.outputs[name] = output
        self.requests[name] = request
        request.arrived = self.now
        self.scheduler.add(request.sequences[0], self.now)
        return request

    def step(self) -> StepPlan:
        """One step."""
        self._catch_up()
        plan = self.scheduler.schedule(self.now)
        self.plans.append(plan)
        started = None
        if plan.chunks:
            self.scheduler.started(plan)
            if self.breaks(plan):
                self._break(plan)
                return plan
            started = plan, self._computed(plan)
        else:
            assert self._started is not None or not self.scheduler.has_work, "nothing runs, but somebody waits"
        self.now += 1 + self.token_seconds * plan.tokens
        self._collect()
        self._started = started
        self._catch_up()
        return plan

    def end(self, name: str, reason: str = "abort") -> None:
        """End a request by force."""
        request = self.requests.pop(name)
        for sequence in live(request):
            self.scheduler.end(sequence, reason)
        for sequence in request.sequences:
            del self._seen[sequence]

    def run(self, steps: int = 10_000) -> None:
        """Steps until all requests have ended."""
        while self.scheduler.has_work:
            self.step()
            steps -= 1
            assert steps > 0, "requests do not end"

    def is_started(self, sequence: Sequence) -> bool:
        """Whether a step with it has started and not given its tokens."""
        return self._started is not None and any(chunk.sequence is sequence for chunk in self._started[0].chunks)

    def _catch_up(self) -> None:
        """Wait for the started step where the next one needs its tokens; samples are forked only once they are known."""
        if not self.ahead or any(len(request.sequences) > 1 for request in self.requests.values()):
            self._collect()

    def _break(self, plan: StepPlan) -> None:
        """As in the engine, all requests end, and nothing that the step was to fill is found again."""
        self.broken += 1
        self.contents.spoil(plan)
        self._started = None
        for name in list(self.requests):
            self.end(name, "error")
        self.cache.forget()

    def _computed(self, plan: StepPlan) -> dict[Sequence, int]:
        """Compute a step; returns its tokens."""
        self.contents.move(plan)
        written = [self._written(chunk.sequence, chunk.start, chunk.start + chunk.count) for chunk in plan.chunks]
        assert len({block for each in written for block in each}) == sum(map(len, written)), "two write to one block"
        found: dict[Sequence, int] = {}
        for chunk in plan.chunks:
            sequence, request = chunk.sequence, chunk.sequence.request
            assert sequence in self._seen, "who has ended is in a step"
            tokens, known = self._seen[sequence]
            stop = chunk.start + chunk.count
            assert chunk.is_last == (stop == len(tokens))
            before = self.contents.read(sequence.blocks, chunk.start)
            assert before == known[: chunk.start], "the cache does not hold what this goes on from"
            new = hashes(tokens[chunk.start : stop], request.salt, before)
            self.contents.write(sequence.blocks, chunk.start, new)
            if chunk.is_last:
                for each in [sequence] if request.forked else request.sequences:
                    found[each] = token = next_token(new[-1], each.index)
                    mine, its = self._seen[each]
                    mine.append(token)
                    its += hashes([token], request.salt, new)
        return found

    def _written(self, sequence: Sequence, start: int, stop: int) -> set[int]:
        return set(sequence.blocks[start // self.block_size : (stop - 1) // self.block_size + 1])

    def _collect(self) -> None:
        """Record the results of the started step."""
        if self._started is None:
            return
        (plan, tokens), self._started = self._started, None
        self.scheduler.commit(plan, self.now)
        for chunk in plan.chunks:
            request = chunk.sequence.request
            if chunk.is_last and not request.forked:
                request.forked = True
                for child in request.sequences[1:]:
                    self.scheduler.fork(chunk.sequence, child)
        for sequence, token in tokens.items():
            if sequence.finish is None:
                self._append(sequence, token)

    def _append(self, sequence: Sequence, token: int) -> None:
        request = sequence.request
        sequence.tokens.append(token)
        self.first.setdefault(request.id, self.now)
        if len(sequence.generated) < max(1, self.outputs[request.id] - sequence.index):
            return
        self.scheduler.end(sequence, "length" if len(sequence.generated) == request.max_tokens else "stop")
        self.answers.setdefault(request.id, {})[sequence.index] = sequence.generated
        if request.is_finished:
            self.ended[request.id] = self.now
            del self.requests[request.id]
            for each in request.sequences:
                del self._seen[each]


def hashes(tokens: Iterable[int], salt: bytes, before: list[int] | None = None) -> list[int]:
    """For each token, a hash of all tokens up to it, which follow those of ``before``."""
    last = before[-1] if before else 1 + int.from_bytes(salt)
    found: list[int] = []
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


def next_token(last: int, index: int) -> int:
    """What sample ``index`` has after tokens with that hash."""
    return hash((last, index)) % VOCABULARY


def alone(prompt: list[int], salt: bytes, index: int, count: int) -> list[int]:
    """The tokens of a sample whose request is the only one, without a scheduler."""
    tokens: list[int] = []
    known = hashes(prompt, salt)
    for _ in range(count):
        tokens.append(next_token(known[-1], index))
        known += hashes(tokens[-1:], salt, known)
    return tokens


def pieces(plan: StepPlan) -> dict[str, int]:
    """How many tokens of each request a step has."""
    return {chunk.sequence.request.id: chunk.count for chunk in plan.chunks}
