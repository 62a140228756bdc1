"""Drafts that are right as often as another pair's, after all the work of a drafter: random weights say nothing of acceptance."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from smelt.runtime import Engine
from smelt.runtime.requests.sequence import Sequence
from smelt.runtime.scheduling.plan import Chunk, StepPlan
from smelt.runtime.speculation.drafter import Chains, Drafter, Drafts
from smelt.runtime.speculation.length import Drafted, FixedDrafts
from smelt.runtime.speculation.lookup import LookupDrafter, parts_of
from smelt.runtime.speculation.stepwise import DraftChoice, GrowingDraft, StepwiseDrafter
from smelt.runtime.speculation.tree import DraftBranch, TokenTree


@dataclass(frozen=True)
class Acceptance:
    """How often drafts are right.

    Attributes:
        share: of a chain's tokens, if those before them are.
        caught: of one of the branches that begin where the chain is wrong.
        tokens: chains' tokens one after another: the odds of the drafter's second choice against each, and whether it was right; empty
            of drafters that have no odds.
    """

    share: float
    caught: float = 0.0
    tokens: list[tuple[float, bool]] = field(default_factory=list, repr=False)

    def always_wrong(self) -> Acceptance:
        """The same odds, and nothing right."""
        return Acceptance(0.0, 0.0, [(odds, False) for odds, _ in self.tokens])


class RecordedDrafts(FixedDrafts):
    """A fixed number of draft tokens, of which it is recorded what became of each."""

    def __init__(self, count: int, branches: int = 0, longest_branch: int | None = 1) -> None:
        super().__init__(count, branches, longest_branch)
        self._tokens: list[tuple[float, bool]] = []

    def ran(self, plan: StepPlan, drafted: Drafted, now: float) -> None:
        """Record a step's drafts."""
        super().ran(plan, drafted, now)
        for each in drafted.of.values():
            self._tokens += [(odds, i < each.accepted) for i, odds in enumerate(each.odds[: each.tried])]

    def acceptance(self) -> Acceptance:
        """What was recorded."""
        total = self.total
        return Acceptance(total.agreement or 0.0, total.caught / total.beside if total.beside else 0.0, self._tokens)


class _Answers:
    """Right and wrong tokens, by what a sequence says without drafts."""

    def __init__(self, outputs: dict[tuple[int, ...], list[int]], acceptance: Acceptance) -> None:
        self._outputs, self._acceptance = outputs, acceptance
        self._draw = random.Random(0)
        self._places: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # where each one's draft began

    def after(self, sequence: Sequence, count: int) -> list[int]:
        """The right tokens that come next."""
        known = self._outputs[tuple(sequence.request.prompt)][len(sequence.generated) :]
        return (known + [0] * count)[:count]

    def choice(self, sequence: Sequence, draft: GrowingDraft) -> DraftChoice:
        """What the other pair's drafter chose somewhere, and from there on in the order in which it did."""
        tokens, (right,) = self._acceptance.tokens, self.after(sequence, 1)
        if not draft.chain:
            self._places[sequence] = self._draw.randrange(len(tokens))
        odds, is_right = tokens[(self._places[sequence] + len(draft.chain)) % len(tokens)]
        caught = not is_right and self._draw.random() < self._acceptance.caught
        tokens_of_others = [right if caught and i == 0 else _wrong(right, 2 + i) for i in range(draft.others_each)]
        return DraftChoice(right if is_right else _wrong(right, 1), odds, [(odds, token) for token in tokens_of_others])

    def fill(self, tree: TokenTree, right: SequenceOf[int]) -> None:
        """The tokens of a tree that has none; each is right with the same probability."""
        share = self._acceptance.share
        for i in range(len(tree.chain)):
            tree.chain[i] = right[i] if self._draw.random() < share else _wrong(right[i], 1)
        agreeing = next((i for i, token in enumerate(tree.chain) if token != right[i]), None)
        # Whether any of the branches at that place is right; which one makes no difference.
        caught = self._draw.random() < self._acceptance.caught
        for number, branch in enumerate(tree.branches):
            catches = caught and branch.after == agreeing
            caught = caught and not catches
            for i in range(len(branch.tokens)):
                token = right[branch.after + i]
                is_right = catches and (i == 0 or self._draw.random() < share)
                branch.tokens[i] = token if is_right else _wrong(token, 2 + number)


class _ForcedLookup:
    """As many tokens as there may be, as if it always found some."""

    def __init__(self, drafter: LookupDrafter, answers: _Answers) -> None:
        self._drafter, self._answers = drafter, answers
        self.longest_branch = drafter.longest_branch

    def unprepared(self, sequence: Sequence) -> int:
        return self._drafter.unprepared(sequence)

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        self._drafter.replaced(sequence, block, by)

    def propose(self, plan: StepPlan, chains: Chains | None = None) -> Drafts:
        drafts = self._drafter.propose(plan, chains)
        drafts.of.update({chunk.sequence: _found(chunk) for chunk in plan.chunks if chunk.drafts})
        for sequence, tree in drafts.of.items():
            self._answers.fill(tree, self._answers.after(sequence, 2 * len(tree.chain)))
        return drafts


def force(engine: Engine, prompts: SequenceOf[list[int]], outputs: list[list[int]], acceptance: Acceptance) -> None:
    """Let an engine's drafter be right so often.

    It does all its work. The tokens of each draft, and how sure the drafter was of them, are then those of the other pair from some place on.

    Args:
        engine: with a drafter.
        prompts: that it will get.
        outputs: what it says without drafts.
        acceptance: how often.
    """
    drafter: Drafter | None = engine.drafter
    known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, outputs, strict=True)}
    answers = _Answers(known, acceptance)
    if isinstance(drafter, LookupDrafter):
        engine.executor.drafter = _ForcedLookup(drafter, answers)
        return
    assert isinstance(drafter, StepwiseDrafter)
    chosen = type(drafter)._next

    def forced(drafts: dict[Sequence, GrowingDraft]) -> dict[Sequence, DraftChoice | None]:
        chosen(drafter, drafts)
        return {sequence: answers.choice(sequence, draft) for sequence, draft in drafts.items()}

    drafter._next = forced  # type: ignore[method-assign]


def _found(chunk: Chunk) -> TokenTree:
    parts = parts_of(chunk.branched, len(chunk.spare)) if chunk.spare else []
    return TokenTree([0] * chunk.drafts, [DraftBranch(0, [0] * part) for part in parts if part])


def _wrong(token: int, by: int) -> int:
    return (token + by) % 1000
