"""Whatever is accepted finishes, with the tokens that it gets alone: random requests in tiny caches, with budgets of a few tokens.

What computes is a stand-in that takes microseconds and sees what a wrong plan would do: it keeps in every place of the cache
which tokens were computed there, and refuses to go on from others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import Engine, RequestOutput, RuntimeProblem, SamplingParams
from smelt.runtime.blocks.block_cache import BlockCache
from smelt.runtime.blocks.host_tier import HostTier
from smelt.runtime.engine.executors.executor import CompletedStep, StepHandle, StepResult
from smelt.runtime.requests.sequence import Request, Sequence, TokenScore
from smelt.runtime.sampling.beam_candidates import continuations
from smelt.runtime.sampling.sampling import Sampled
from smelt.runtime.scheduling.admission import PeakAdmission
from smelt.runtime.scheduling.plan import StepPlan
from smelt.runtime.scheduling.policies.table import POLICIES
from smelt.runtime.scheduling.scheduler import Scheduler
from smelt.runtime.scheduling.swapping import Swapping, TransferCost
from torch import Tensor

VOCABULARY = 50
COST = TransferCost(1, 1, 0.0, 1.0)


@dataclass
class Later:
    """A step that is still being computed when the next one is made."""

    found: StepResult
    completed: bool = False

    def collect(self) -> StepResult:
        return self.found


class Checking:
    """An executor whose logits are a hash of the tokens before, and which checks that exactly those are in the cache."""

    model: Any = None

    def __init__(self, block_size: int, *, ahead: bool) -> None:
        self._size = block_size
        self._ahead = ahead
        self._held: dict[tuple[int, int], bytes] = {}  # what each place of each block was computed from
        self._saved: dict[int, list[bytes]] = {}
        self._chosen: dict[Sequence, list[int]] = {}  # tokens that the engine has not seen yet
        self.tokens = 0

    def runs_ahead(self, request: Request) -> bool:
        plain = request.params.n == 1 and not request.params.is_beam_search
        return self._ahead and plain and not any(sequence.expected for sequence in request.sequences)

    def execute(self, plan: StepPlan) -> StepHandle:
        result = self._execute(plan)
        ahead = all(self.runs_ahead(chunk.sequence.request) for chunk in plan.chunks)
        return Later(result) if ahead else CompletedStep(result)

    def _execute(self, plan: StepPlan) -> StepResult:
        for block, slot in plan.swap_out:
            self._saved[slot] = [self._held.get((block, place), b"") for place in range(self._size)]
        for slot, block in plan.swap_in:
            self._held |= {(block, place): content for place, content in enumerate(self._saved[slot])}
        before = dict(self._held)
        for source, target in plan.copies:
            for place in range(self._size):
                self._held[target, place] = before.get((source, place), b"")
        written = [block for chunk in plan.chunks for block in self._written(chunk)]
        assert len(written) == len(set(written)), "two sequences write to one block"
        result = StepResult()
        for chunk in plan.chunks:
            sequence = chunk.sequence
            tokens = self._known(sequence)
            digest = b""
            for position in range(chunk.start + chunk.count):
                digest = blake2b(digest + bytes([tokens[position]]), digest_size=8).digest()
                place = sequence.blocks[position // self._size], position % self._size
                if position < chunk.start:
                    assert self._held.get(place) == digest, "the cache does not hold what this goes on from"
                else:
                    self._held[place] = digest
                if sequence.expected and position >= sequence.first_wanted:
                    self._score(result, sequence, _logits(digest), position)
            if chunk.is_last and not sequence.expected:
                assert chunk.start + chunk.count == len(tokens)
                self._choose(result, sequence, _logits(digest))
        return result

    def _known(self, sequence: Sequence) -> list[int]:
        """Its tokens, those that the engine has not seen among them."""
        unseen = self._chosen.get(sequence, [])
        return (
            [*sequence.tokens, *unseen[len(unseen) - sequence.pending + 1 :]]
            if sequence.pending > 1
            else sequence.tokens
        )

    def _written(self, chunk: Any) -> set[int]:
        first, last = chunk.start // self._size, (chunk.start + chunk.count - 1) // self._size
        return set(chunk.sequence.blocks[first : last + 1])

    def _choose(self, result: StepResult, sequence: Sequence, logits: Tensor) -> None:
        self.tokens += 1
        if sequence.request.params.is_beam_search:
            result.continuations[sequence] = continuations(logits, sequence, frozenset())
            return
        for each in sequence.request.sequences if not sequence.request.forked else [sequence]:
            token = int((logits + each.index * logits.roll(1)).argmax())
            result.tokens[each] = [Sampled(token, 0.0, None)]
            self._chosen.setdefault(each, []).append(token)

    def _score(self, result: StepResult, sequence: Sequence, logits: Tensor, position: int) -> None:
        self.tokens += 1
        place = position - (len(sequence.request.prompt) - 1)
        for each in sequence.request.sequences if not sequence.request.forked else [sequence]:
            token = each.expected[place]
            result.scores.setdefault(each, []).append(TokenScore(logits[token].item(), False))


def _logits(digest: bytes) -> Tensor:
    return torch.tensor(list(blake2b(digest, digest_size=VOCABULARY).digest()), dtype=torch.float32) / 50


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    from ...tiny import make_model, save_model

    model = make_model("llama", vocab_size=VOCABULARY, num_hidden_layers=1)
    path: Path = save_model(model, tmp_path_factory.mktemp("model"))
    for file in path.glob("tokenizer*"):
        file.unlink()
    return Engine(path, dtype="float32", max_num_seqs=8, quiet=True)


def renewed(
    built: Engine,
    *,
    blocks: int,
    size: int,
    budget: int,
    most: int,
    share: bool,
    ahead: bool,
    policy: str = "fcfs",
    slots: int = 0,
) -> Checking:
    """Give the engine another cache, scheduler and executor."""
    host = HostTier(slots) if slots else None
    cache = BlockCache(blocks, size, enable_prefix_caching=share, host=host)
    built.core.scheduler = Scheduler(
        cache,
        max_num_batched_tokens=budget,
        max_num_seqs=most,
        policy=POLICIES[policy](),
        admission=PeakAdmission(cache),
        swapping=Swapping("swap", size, COST) if slots else None,
    )
    executor = Checking(size, ahead=ahead)
    built.core.executor = executor
    return executor


Asked = tuple[list[int], SamplingParams]


def _requests(draw: random.Random, most: int) -> list[Asked]:
    common = [draw.randrange(VOCABULARY) for _ in range(30)]
    found: list[Asked] = []
    for _ in range(draw.randint(1, 6)):
        shared = common[: draw.choice([0, 0, 8, 20, 30])]
        prompt = shared + [draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 2, 7, 20]))]
        length: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 9, 25]), "ignore_eos": True}
        kind = draw.choice(["one", "one", "several", "beams", "beams"])
        if kind == "several" and most > 1:
            length["n"] = draw.randint(2, most)
        if kind == "beams" and most > 1:
            length["beam_width"] = draw.randint(2, min(most, 4))
        found.append((prompt, SamplingParams(temperature=0, **length)))
    return found


def _tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def _alone(built: Engine, request: Asked) -> list[list[int]]:
    renewed(built, blocks=200, size=4, budget=500, most=8, share=False, ahead=False)
    return _tokens(built.generate([request[0]], request[1])[0])


@pytest.mark.few(40)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_accepted_finishes(built: Engine, seed: int, policy: str) -> None:
    draw = random.Random(f"{policy} {seed}")
    most = draw.randint(1, 6)
    requests = _requests(draw, most)
    wanted = {str(i): _alone(built, request) for i, request in enumerate(requests)}
    size = draw.choice([1, 2, 4, 8])
    longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in requests)
    executor = renewed(
        built,
        blocks=max(1, -(-longest // size) + draw.choice([-3, -1, 0, 0, 1, 2, 5])),
        size=size,
        budget=draw.choice([1, 2, 3, 5, 16]),
        most=most,
        share=draw.random() < 0.6,
        policy=policy,
        slots=draw.choice([0, 2, 5, 50]),
        ahead=draw.random() < 0.4,
    )
    waiting = list(wanted.items())
    found: dict[str, list[list[int]]] = {}
    refused = 0
    # Since the last token that anybody got: how often each sequence lost its blocks.
    lost: dict[Sequence, int] = {}
    seen, scheduler = 0, built.scheduler
    preempt = scheduler._preempt

    def counted(sequence: Sequence, plan: StepPlan) -> None:
        lost[sequence] = lost.get(sequence, 0) + 1
        assert lost[sequence] <= 2, "blocks are taken again and again, and nobody gets a token"
        preempt(sequence, plan)

    scheduler._preempt = counted  # type: ignore[method-assign]
    steps, work = 0, 0
    while waiting or built.has_work:
        if waiting and (not built.has_work or draw.random() < 0.3):
            name, _ = waiting.pop(0)
            prompt, params = requests[int(name)]
            try:
                built.add_request(
                    prompt, params, id=name, priority=draw.randrange(3), predicted_tokens=draw.choice([None, 1, 20])
                )
                work += (len(prompt) + (params.max_tokens or 0)) * (params.max_tokens or 0) * params.sequences + len(
                    prompt
                )
            except RuntimeProblem:
                refused += 1
        if built.has_work:
            found |= {output.request_id: _tokens(output) for output in built.step() if output.finished}
            steps += 1
            assert steps <= work, "more steps than if every token were computed from the prompt on"
        if executor.tokens > seen:
            seen = executor.tokens
            lost.clear()
        everybody = [*scheduler.running, *scheduler.waiting]
        built.cache.check([sequence.blocks for sequence in everybody])
        if built.cache.host is not None:
            built.cache.host.check([sequence.saved for sequence in everybody])
    assert len(found) + refused == len(requests)
    for name, tokens in found.items():
        assert tokens == wanted[name]


def test_a_beam_that_is_computed_again_takes_the_room_of_those_that_wait_for_it(built: Engine) -> None:
    """Three beams of up to 49 tokens where 56 have room, five tokens a step, and somebody who waits behind them."""
    renewed(built, blocks=7, size=8, budget=5, most=4, share=True, ahead=False)
    built.add_request([1] + [32] * 38, SamplingParams(beam_width=3, max_tokens=10, ignore_eos=True), id="beams")
    built.add_request([1, 40, 41], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), id="one")
    ended: list[str] = []
    for _ in range(1000):
        ended += [output.request_id for output in built.step() if output.finished]
        if not built.has_work:
            break
    assert sorted(ended) == ["beams", "one"]


@pytest.mark.parametrize(("blocks", "width"), [(7, 3), (8, 4), (9, 4)])
def test_a_prediction_keeps_no_beam_from_the_room_of_its_siblings(blocks: int, width: int, built: Engine) -> None:
    """One request in a cache that its beams fill: what earlier outputs say of it changes nothing."""

    def steps(*, learned: bool) -> tuple[int, int]:
        renewed(built, blocks=blocks, size=8, budget=64, most=8, share=True, ahead=False)
        admission = built.scheduler._admission
        assert admission is not None
        if learned:
            earlier = Request("earlier", [1], SamplingParams(), 1000)
            for _ in range(20):
                admission.ended(Sequence(earlier, 0, [1] * 25))
        built.add_request([1] + [32] * 30, SamplingParams(beam_width=width, max_tokens=20, ignore_eos=True))
        count = 0
        while built.has_work:
            built.step()
            count += 1
        return count, built.scheduler.preemptions

    assert steps(learned=True) == steps(learned=False)


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_found_in_tiny_caches(built: Engine, seed: int) -> None:
    draw = random.Random(seed)
    pairs = [
        (
            [draw.randrange(VOCABULARY) for _ in range(draw.choice([3, 9]))],
            [draw.randrange(VOCABULARY) for _ in range(n)],
        )
        for n in (1, 2, 8, 5)
    ]
    pairs.append((pairs[0][0], [7, 7, 7]))

    def scores(**options: Any) -> list[list[TokenScore]]:
        renewed(
            built,
            **({"blocks": 100, "size": 4, "budget": 500, "most": 8, "share": False} | options),
            ahead=False,
        )
        return built.score(pairs)

    assert (
        scores(blocks=16 // 2 + draw.randint(0, 3), size=2, budget=draw.choice([1, 3]), most=4, share=True) == scores()
    )
