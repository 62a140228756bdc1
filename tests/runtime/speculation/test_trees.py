"""Token trees: several continuations verified in one step, and an output that is what it is without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.decoder.parts.batch import Batch, Run
from smelt.runtime.engine.drafters import draft_model
from smelt.runtime.requests.output import RequestOutput
from smelt.runtime.scheduling.drafting import DraftSize
from smelt.runtime.scheduling.plan import DraftPath, StepPlan
from smelt.runtime.speculation.caches import OwnCache
from smelt.runtime.speculation.counts import DraftOutcome
from smelt.runtime.speculation.drafter import Drafts
from smelt.runtime.speculation.fixed_length import FixedDrafts
from smelt.runtime.speculation.growing import DraftChoice, GrowingDraft
from smelt.runtime.speculation.model_drafter import ModelDrafter
from smelt.runtime.speculation.tree import DraftBranch, TokenTree, TreeRuns
from smelt.system.errors import RuntimeProblem

from ..random_adapter import adapter_of
from .pretend import pretend
from .test_exact import CASES, ENGINE, PROMPTS, Alternating, drafters, tokens  # noqa: F401 - a fixture
from .test_length import decodes

TREE = TokenTree([1, 2, 3], [DraftBranch(1, [7, 8]), DraftBranch(0, [9])])


def test_nodes() -> None:
    assert TREE.children() == {(0, 1): 1, (1, 2): 2, (2, 3): 3, (1, 7): 4, (4, 8): 5, (0, 9): 6}
    assert [TREE.branch_at(node) for node in range(7)] == [None, None, None, None, 0, 0, 1]
    assert [TREE.path_length(node) for node in range(7)] == [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (0, 1)]
    assert TREE.branched == 3


@pytest.mark.parametrize(
    ("reached", "outcome"),
    [
        (0, DraftOutcome(3, 0, 3, 0, caught=False)),
        (1, DraftOutcome(3, 1, 3, 0, caught=False)),
        (2, DraftOutcome(3, 2, 3, 0, caught=None)),
        (3, DraftOutcome(3, 3, 3, 0, caught=None)),
        (5, DraftOutcome(3, 1, 3, 2, caught=True)),
        (6, DraftOutcome(3, 0, 3, 1, caught=True)),
    ],
    ids=str,
)
def test_what_became_of_it(reached: int, outcome: DraftOutcome) -> None:
    assert DraftOutcome.of(TREE, reached) == outcome


def test_an_output_that_is_complete_says_nothing_of_the_rest() -> None:
    cut = DraftOutcome.of(TREE, 1, cut=True)
    assert (cut.accepted, cut.caught, cut.is_chain_wrong) == (1, None, False)
    caught = DraftOutcome.of(TREE, 5, cut=True)
    assert (caught.on_branch, caught.caught, caught.is_chain_wrong) == (2, True, True)


def test_branches_stay_where_there_are_places() -> None:
    """In the block that they begin in, and before the end of the chain, which is where the sequence ends at the latest."""
    tree = TokenTree([1, 2, 3, 4], [DraftBranch(1, [7, 8, 9, 10]), DraftBranch(0, [5] * 9), DraftBranch(3, [6])])
    assert tree.within(4, 16, 2, 4).branches == [DraftBranch(1, [7, 8, 9]), DraftBranch(0, [5] * 4)]
    assert tree.within(4, 4, 3, 4).branches == [DraftBranch(1, [7, 8]), DraftBranch(0, [5] * 3), DraftBranch(3, [6])]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_each_token_attends_to_its_own_path(block_size: int) -> None:
    """Trees of all kinds, in a cache of tokens in the place of keys and values."""
    draw = random.Random(0)
    for _ in range(200):
        length = draw.randint(1, 40)
        text = [draw.randrange(1000) for _ in range(length)]
        chain = [draw.randrange(1000) for _ in range(draw.randint(1, 8))]
        branches = [
            DraftBranch(draw.randint(0, len(chain) - 1), [draw.randrange(1000) for _ in range(draw.randint(1, 6))])
            for _ in range(draw.randint(0, 4))
        ]
        count = -(-(length + len(chain)) // block_size)
        numbers = draw.sample(range(100), count + len(branches))
        blocks, spare = numbers[:count], numbers[count:]
        start = length - 1
        tree = TokenTree(chain, branches).within(start, block_size, len(spare), len(chain))
        laid_out = TreeRuns.of(Run(text[-1:], start, blocks, 99, 1), tree, spare, block_size)

        cache = [draw.randrange(1000, 2000) for _ in range(100 * block_size)]
        for position, token in enumerate(text[:-1]):
            cache[blocks[position // block_size] * block_size + position % block_size] = token
        for source, target in laid_out.copies:
            cache[target * block_size : (target + 1) * block_size] = cache[
                source * block_size : (source + 1) * block_size
            ]
        batch = Batch(laid_out.runs, block_size)
        for slot, token in zip(batch.slots.tolist(), batch.tokens.tolist(), strict=True):
            cache[slot] = token
        if batch.also is not None:
            for row, slot in zip(*(part.tolist() for part in batch.also), strict=True):
                cache[slot] = int(batch.tokens[row])

        paths = [text + chain[:i] for i in range(len(chain) + 1)]
        for branch in tree.branches:
            paths += [text + chain[: branch.after] + branch.tokens[: i + 1] for i in range(len(branch.tokens))]
        seen = []
        for run in laid_out.runs:
            for position in range(run.start, run.stop):
                seen.append(
                    [cache[run.blocks[p // block_size] * block_size + p % block_size] for p in range(position + 1)]
                )
        assert seen == paths
        assert len(batch.wanted) == len(paths)
        for branch, place in zip(tree.branches, laid_out.places, strict=True):
            first = start + 1 + branch.after
            assert place == first // block_size == (first + len(branch.tokens) - 1) // block_size


@pytest.mark.few(4)
@pytest.mark.parametrize("drafter", ["near", "shallow", "lookup", "first layers"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_without_a_drafter(drafters: dict[str, str], drafter: str, case: str) -> None:  # noqa: F811
    alone = Engine(drafters["itself"], **ENGINE).generate(PROMPTS, CASES[case])
    engine = Engine(drafters["itself"], drafter=drafters[drafter], draft_tokens=3, draft_branches=4, **ENGINE)
    for a, b in zip(alone, engine.generate(PROMPTS, CASES[case]), strict=True):
        assert [each.token_ids for each in a.outputs] == [each.token_ids for each in b.outputs]
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (y.finish_reason, y.cumulative_logprob) == (
                x.finish_reason,
                pytest.approx(x.cumulative_logprob, abs=1e-3),
            )
    engine.cache.check([])
    assert engine.drafting is not None
    if case == "sampled" and drafter != "lookup":
        assert engine.drafting.total.on_branch > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("drafter", ["near", "shallow", "lookup"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"block_size": 1},
        {"block_size": 4, "blocks": 24, "admission": "immediate"},
        {"block_size": 4, "blocks": 24, "admission": "immediate", "host_cache_bytes": 1 << 20, "swap": "swap"},
        {"policy": "mlfq", "max_num_seqs": 2},
        {"kv_cache_dtype": "int8"},
        {"draft_tokens": "auto"},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_whatever_the_cache_and_the_scheduler_do(
    drafters: dict[str, str],  # noqa: F811
    drafter: str,
    options: dict[str, Any],
) -> None:
    given = {**ENGINE, **options}
    blocks, drafted_tokens = given.pop("blocks", None), given.pop("draft_tokens", 5)

    def engine(**more: Any) -> Engine:
        if blocks is None:
            return Engine(drafters["itself"], **given, **more)
        probe = Engine(drafters["itself"], **given, **more).reservation
        return Engine(
            drafters["itself"], **(given | {"kv_cache_memory_bytes": probe.cache // probe.blocks * blocks}), **more
        )

    alone = engine()
    drafted = engine(drafter=drafters[drafter], draft_tokens=drafted_tokens, draft_branches=3)
    long = SamplingParams(max_tokens=40, seed=4, temperature=0.5, ignore_eos=True)
    for _ in range(2):  # the second time with prefixes that are cached
        assert tokens(drafted, long) == tokens(alone, long)
    drafted.cache.check([])
    assert drafted.drafting is not None
    if blocks:
        assert drafted.scheduler.preemptions > 0
    if drafter == "near" and drafted_tokens != "auto" and "max_num_batched_tokens" not in options:
        assert drafted.drafting.total.on_branch > 0


@pytest.mark.parametrize("own_cache", [False, True])
def test_a_second_choice_is_a_branch(
    own_cache: bool, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter whose first choice is never right: what it would choose second is the model's own token.

    It would not be if a cache of its own lacked what is in the blocks that the verifier has replaced.
    """
    path = tiny("llama")
    if own_cache:
        monkeypatch.setattr(draft_model, "_ALIKE", -1.0)
    engine = Engine(path, drafter=str(path), draft_tokens=3, draft_branches=1, block_size=8, **ENGINE)
    assert isinstance(engine.drafter._cache, OwnCache) == own_cache  # type: ignore[union-attr]
    assert engine.drafter is not None
    model = engine.drafter.model  # type: ignore[attr-defined]

    class _Wrong:
        """The model, whose best token gets a rival that is a little better."""

        def __call__(self, *given: Any) -> torch.Tensor:
            logits = model(*given)
            best = logits.max(-1)
            wrong = (best.indices + 1) % logits.shape[1]
            return logits.scatter(1, wrong[:, None], best.values[:, None] + 0.01)

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    engine.drafter.model = _Wrong()  # type: ignore[attr-defined]
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    assert tokens(engine, greedy) == tokens(Engine(path, **ENGINE), greedy)
    assert engine.drafting is not None
    total = engine.drafting.total
    assert sum(total.accepted) == 0
    # All but those that were cut because the output was complete.
    assert total.on_branch == total.caught == total.beside > 0


def misled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first token of each chain be the one that would have come second, and that the first of a branch."""
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    choose = drafter._next

    def chosen(parts: dict[Any, Any]) -> dict[Any, Any]:
        found = choose(parts)
        for sequence, part in parts.items():
            if part.length == 0:
                first, second = found[sequence].token, found[sequence].others[0][1]
                found[sequence] = DraftChoice(second, 0.9, [(0.9, first)])
        return found

    monkeypatch.setattr(drafter, "_next", chosen)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("own_cache", [False, True])
def test_a_branch_goes_on_beside_its_chain(
    own_cache: bool, block_size: int, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a drafter that is right but for the first token of each chain all of each branch is right.

    It would not be if it were computed from other keys and values than its own, or if those of branches that were right were lost.
    """
    path = tiny("llama")
    if own_cache:
        monkeypatch.setattr(draft_model, "_ALIKE", -1.0)
    engine = Engine(path, drafter=str(path), draft_tokens=4, draft_branches=1, block_size=block_size, **ENGINE)
    misled(engine, monkeypatch)
    assert isinstance(engine.drafter, ModelDrafter)
    assert isinstance(engine.drafter._cache, OwnCache) == own_cache
    propose, prepared = engine.drafter.propose, []

    def proposed(*given: Any) -> Drafts:
        found = propose(*given)
        prepared.append(found.prepared)
        return found

    monkeypatch.setattr(engine.drafter, "propose", proposed)
    alone = Engine(path, **ENGINE)
    assert engine.drafting is not None
    for params in (
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=40, seed=1, frequency_penalty=0.5, ignore_eos=True),
    ):
        before = engine.drafting.total.copy()
        assert tokens(engine, params) == tokens(alone, params)
        total = engine.drafting.total.since(before)
        assert sum(total.accepted) == 0
        assert total.branched > 2 * total.verified  # but where a block ends, or the output
        assert total.on_branch >= total.branched - 4 * len(PROMPTS)  # but what is behind the end of an output
        # Of a branch all but its last token are known, too.
        assert sum(prepared) <= sum(map(len, PROMPTS)) + total.verified
        prepared.clear()
    engine.cache.check([])


def test_a_branch_goes_on_where_its_chain_does_not(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as there are places for the chain."""

    class _Branches:
        def going_on(self, paths: SequenceOf[DraftPath]) -> set[int]:
            return {place for place, path in enumerate(paths) if path.leaves is not None}

        def branching(self, odds: SequenceOf[float]) -> list[int]:
            return [0]

    class _Drafts(FixedDrafts):
        def sizes(self, plan: StepPlan, budget: int) -> dict[int, DraftSize]:
            return dict.fromkeys(super().sizes(plan, budget), DraftSize(5, 1, 4, _Branches()))

    path = tiny("llama")
    engine = Engine(path, drafter=str(path), draft_tokens=4, draft_branches=1, block_size=64, **ENGINE)
    misled(engine, monkeypatch)
    engine.core.drafting = engine.scheduler.drafting = drafting = _Drafts(5, 1)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    assert tokens(engine, params) == tokens(Engine(path, **ENGINE), params)
    assert sum(drafting.total.drafted) == drafting.total.verified  # chains of one token
    assert drafting.total.on_branch > 3 * drafting.total.verified


def test_the_likeliest_branches_are_kept() -> None:
    """Of a fixed number of tokens; those that were less likely give their block away."""
    (sequence,) = [chunk.sequence for chunk in decodes(1).chunks]  # of four tokens
    draft = GrowingDraft(sequence, 3, 6, [70, 71], None, 16)
    draft.add(DraftChoice(1, 0.5, [(0.5, 11), (0.1, 12)]))
    assert draft.tree().branches == [DraftBranch(0, [11]), DraftBranch(0, [12])]
    assert [part.length for part in draft.going_on()] == [1, 1, 1]
    draft.branches[1].add(DraftChoice(13, 0.0))
    draft.add(DraftChoice(2, 0.9, [(0.9, 21), (0.0, 22)]))
    assert draft.tree() == TokenTree([1, 2], [DraftBranch(0, [11]), DraftBranch(1, [21])], [0.5, 0.9])
    assert [branch.spare for branch in draft.branches] == [70, 71]


def test_branches_take_what_the_chain_leaves() -> None:
    """Where a rule chooses; and stay in their block."""
    (sequence,) = [chunk.sequence for chunk in decodes(1).chunks]
    draft = GrowingDraft(sequence, 5, 4, [70, 71], None, 4, final=frozenset({12}), rule=_Everywhere())
    draft.add(DraftChoice(1, 0.5, [(0.5, 11)]))
    (branch,) = draft.branches
    assert branch.longest == 4  # it begins at the fifth position
    draft.add(DraftChoice(2, 0.5, [(0.5, 12)]))
    assert draft.branches[1].is_complete  # nothing is of use after it
    assert draft.going_on() == [draft]  # one place is left
    draft.is_complete = True
    assert draft.going_on() == [branch]
    branch.add(DraftChoice(3, 0.5))
    assert draft.going_on() == []


class _Everywhere:
    """A rule by which everything goes on, and branches leave at each token."""

    def going_on(self, paths: SequenceOf[DraftPath]) -> set[int]:
        return set(range(len(paths)))

    def branching(self, odds: SequenceOf[float]) -> list[int]:
        return list(range(len(odds)))


@pytest.mark.parametrize(("block_size", "behind", "longest"), [(4, 0, 4), (4, 1, 1), (8, 0, 4), (8, 1, 4), (3, 1, 2)])
def test_a_branch_has_what_depends_on_its_tokens_in_its_own_block(block_size: int, behind: int, longest: int) -> None:
    """Of a draft head the keys and values before a token depend on it: where a block begins a branch cannot go on."""
    (sequence,) = [chunk.sequence for chunk in decodes(1).chunks]
    assert len(sequence.tokens) == 4
    draft = GrowingDraft(sequence, 9, 9, [70], None, block_size, behind)
    draft.add(DraftChoice(1, 0.5, [(0.5, 11)]))
    assert [branch.longest for branch in draft.branches] == [longest]


def test_steps_of_a_drafter() -> None:
    """Second choices come with the first ones; each further token of a branch with one of the chain, or alone."""
    assert TokenTree([1, 2, 3]).drafted_at_once() == [1, 1, 1]
    assert TokenTree([1, 2, 3], [DraftBranch(0, [7]), DraftBranch(2, [8])]).drafted_at_once() == [1, 1, 1]
    assert TokenTree([1, 2, 3], [DraftBranch(0, [7, 8]), DraftBranch(1, [7, 8, 9])]).drafted_at_once() == [1, 2, 2, 1]


def test_branches_of_requests_with_adapters_have_these(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Beside others without, in the same steps."""
    path = tiny("llama")
    adapter_of(path, tmp_path / "mine", target_modules=["q_proj", "v_proj", "down_proj"])
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)

    def answers(engine: Engine) -> list[RequestOutput]:
        engine.load_adapter("mine", tmp_path / "mine")
        names = [engine.add_request(p, params, adapter=(None, "mine")[i % 2]) for i, p in enumerate(PROMPTS)]
        done = {}
        while engine.has_work:
            done |= {output.request_id: output for output in engine.step()}
        return [done[name] for name in names]

    expected, plain = answers(Engine(path, **ENGINE)), tokens(Engine(path, **ENGINE), params)
    engine = Engine(path, drafter="lookup", draft_tokens=4, draft_branches=3, block_size=4, **ENGINE)
    pretend(engine, expected)
    found = [output.outputs[0].token_ids for output in answers(engine)]
    assert found == [output.outputs[0].token_ids for output in expected]
    assert [[each] != of for each, of in zip(found, plain, strict=True)] == [False, True, False, True, False]
    assert engine.drafting is not None
    assert engine.drafting.total.on_branch > 0


@pytest.mark.parametrize("drafter", ["near", "lookup"])
def test_constraints_are_followed(drafters: dict[str, str], drafter: str) -> None:  # noqa: F811
    params = SamplingParams(max_tokens=24, seed=5, constraint=Alternating())
    engine = Engine(drafters["itself"], drafter=drafters[drafter], draft_tokens=4, draft_branches=4, **ENGINE)
    assert tokens(engine, params) == tokens(Engine(drafters["itself"], **ENGINE), params)


def test_blocks_of_a_step_that_failed_are_given_back(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("llama")
    engine = Engine(path, drafter="lookup", draft_tokens=2, draft_branches=2, **ENGINE)
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    engine.step()
    assert engine.drafter is not None

    def fail(_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.drafter, "propose", fail)
        with pytest.raises(MemoryError):
            engine.step()
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    assert tokens(engine, greedy) == tokens(Engine(path, **ENGINE), greedy)
    engine.cache.check([])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"draft_branches": 2}, "drafter is not"),
        ({"drafter": "lookup", "draft_branches": -1}, "from 0 to"),
        ({"drafter": "lookup", "draft_branches": 99}, "from 0 to"),
        ({"drafter": "lookup", "draft_branches": 1, "cp": 2}, "which divides sequences"),
    ],
    ids=str,
)
def test_bad_numbers_are_refused(tiny: Callable[..., Path], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RuntimeProblem, match=sentence):
        Engine(tiny("llama"), quiet=True, **options)
