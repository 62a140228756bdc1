"""Drafts that are right as often as another pair's, after all the work of a drafter: random weights say nothing of acceptance."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from smelt.runtime import Engine
from smelt.runtime.requests.sequence import Sequence
from smelt.runtime.scheduling.drafting import DraftSize
from smelt.runtime.scheduling.plan import DraftPath, StepPlan
from smelt.runtime.speculation.drafter import Chains, Drafts, Lookup
from smelt.runtime.speculation.fixed_length import Drafted, FixedDrafts
from smelt.runtime.speculation.growing import DraftChoice, GrowingBranch, GrowingDraft
from smelt.runtime.speculation.length import AdaptiveDrafts
from smelt.runtime.speculation.lookup import LookupDrafter
from smelt.runtime.speculation.lookup_first import LookupFirst, lookup_of, weights_of
from smelt.runtime.speculation.tree import DraftBranch, TokenTree


@dataclass(frozen=True)
class Acceptance:
    """How often drafts are right.

    Attributes:
        share: of a chain's tokens, if those before them are.
        caught: of one of the branches that begin where the chain is wrong.
        tokens: chains' tokens one after another: the odds of the drafter's second choice against each, and whether it was right; empty
            of drafters that have no odds.
        texts: prompts and outputs, in which drafts are looked up.
    """

    share: float
    caught: float = 0.0
    tokens: list[tuple[float, bool]] = field(default_factory=list, repr=False)
    texts: list[tuple[list[int], list[int]]] = field(default_factory=list, repr=False)

    def always_wrong(self) -> Acceptance:
        """The same odds, and nothing right."""
        return Acceptance(0.0, 0.0, [(odds, False) for odds, _ in self.tokens])


@dataclass(frozen=True)
class _AllSeconds:
    """Chains of a length, with the second choice of each of their tokens: the branches that adaptive drafts choose among."""

    length: int

    def going_on(self, paths: SequenceOf[DraftPath]) -> set[int]:
        return {place for place, path in enumerate(paths) if path.leaves is None and len(path.odds) < self.length}

    def branching(self, odds: SequenceOf[float]) -> list[int]:
        return [*range(len(odds))]


class RecordedDrafts(FixedDrafts):
    """A fixed number of draft tokens, of which it is recorded what became of each.

    Args:
        count, branches, longest_branch, lookup: as for all.
        seconds: whether branches are the second choices of weights.

    Attributes:
        texts: prompts and outputs, as whoever runs it records them.
    """

    def __init__(
        self,
        count: int,
        branches: int = 0,
        longest_branch: int | None = 1,
        lookup: Lookup | None = None,
        *,
        seconds: bool = False,
    ) -> None:
        super().__init__(count, branches, longest_branch, lookup)
        self._seconds = seconds and branches > 0
        self._tokens: list[tuple[float, bool]] = []
        self.texts: list[tuple[list[int], list[int]]] = []

    def sizes(self, plan: StepPlan, budget: int) -> dict[int, DraftSize]:
        """The same for all."""
        found, length = super().sizes(plan, budget), self._count
        if not self._seconds:
            return found
        # Branches take what a chain leaves of the longest one.
        return dict.fromkeys(found, DraftSize(2 * length, length, length, _AllSeconds(length)))

    def ran(self, plan: StepPlan, drafted: Drafted, now: float) -> None:
        """Record a step's drafts."""
        super().ran(plan, drafted, now)
        for each in drafted.of.values():  # those that were looked up have none
            self._tokens += [(odds, i < each.accepted) for i, odds in enumerate(each.odds[: each.tried])]

    def acceptance(self) -> Acceptance:
        """What was recorded."""
        total = self.total
        caught = total.caught / total.beside if total.beside else 0.0
        return Acceptance(total.agreement or 0.0, caught, self._tokens, self.texts)


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

    def choice(self, sequence: Sequence, part: GrowingDraft | GrowingBranch) -> DraftChoice:
        """What the other pair's drafter chose somewhere, and from there on in the order in which it did."""
        tokens, (right,) = self._acceptance.tokens, self.after(sequence, 1)
        if not part.length:
            self._places[sequence] = self._draw.randrange(len(tokens))
        begun = self._places[part.draft.sequence if isinstance(part, GrowingBranch) else sequence]
        odds, is_right = tokens[(begun + part.length) % len(tokens)]
        caught = not is_right and self._draw.random() < self._acceptance.caught
        tokens_of_others = [right if caught and i == 0 else _wrong(right, 2 + i) for i in range(part.others_each)]
        return DraftChoice(right if is_right else _wrong(right, 1), odds, [(odds, token) for token in tokens_of_others])


class _ForcedLookup(LookupDrafter):
    """Looks up what the other pair's lookup finds in one of the texts of its model, as far as the sequence has come.

    Attributes:
        place: which of the texts the next sequence gets.
    """

    def __init__(self, answers: _Answers, texts: SequenceOf[tuple[list[int], list[int]]]) -> None:
        super().__init__()
        texts = [*texts]
        random.Random(0).shuffle(texts)
        self._answers, self._other_texts = answers, texts
        self.place = 0
        self._other: WeakKeyDictionary[Sequence, tuple[Sequence, list[int], list[int]]] = WeakKeyDictionary()

    def matched(self, sequence: Sequence) -> int:
        return super().matched(self._followed(sequence))

    def share(self, sequence: Sequence) -> float:
        return super().share(self._followed(sequence))

    def propose(self, plan: StepPlan, chains: Chains | None = None) -> Drafts:
        of = {self._followed(chunk.sequence): chunk.sequence for chunk in plan.chunks}
        theirs = replace(plan, chunks=[replace(c, sequence=self._followed(c.sequence)) for c in plan.chunks])
        drafts = super().propose(theirs, chains)
        return replace(drafts, of={of[other]: self._as_right(of[other], tree) for other, tree in drafts.of.items()})

    def _followed(self, sequence: Sequence) -> Sequence:
        """The other text, as long as its answer is."""
        if sequence not in self._other:
            prompt, output = self._other_texts[self.place % len(self._other_texts)]
            self.place += 1
            self._other[sequence] = Sequence(sequence.request, 0, list(prompt)), prompt, output
        other, prompt, output = self._other[sequence]
        come = len(other.tokens) - len(prompt)
        other.tokens += output[come : len(sequence.generated)]
        return other

    def _as_right(self, sequence: Sequence, tree: TokenTree) -> TokenTree:
        """With the right tokens where the other text's are, and wrong ones elsewhere."""
        output = self._other[sequence][2][len(sequence.generated) :]
        right = self._answers.after(sequence, len(tree.chain))

        def forced(tokens: SequenceOf[int], after: int, by: int) -> list[int]:
            there = [*output[after : after + len(tokens)], *[-1] * len(tokens)]
            known = right[after : after + len(tokens)]
            return [
                token if ours == theirs else _wrong(token, by)
                for token, ours, theirs in zip(known, tokens, there, strict=False)
            ]

        branches = [
            DraftBranch(each.after, forced(each.tokens, each.after, 2 + i)) for i, each in enumerate(tree.branches)
        ]
        return TokenTree(forced(tree.chain, 0, 1), branches)


def force(
    engine: Engine,
    prompts: SequenceOf[list[int]],
    outputs: list[list[int]],
    acceptance: Acceptance,
    drafting: SequenceOf[AdaptiveDrafts],
) -> None:
    """Let an engine's drafter be right so often.

    It does all its work. The tokens of each draft, and how sure the drafter was of them, are then those of the other pair from some place on; what
    is looked up is looked up in texts of the other pair, and right where it is right there.

    Args:
        engine: with a drafter.
        prompts: that it will get.
        outputs: what it says without drafts.
        acceptance: how often.
        drafting: what decides how much is drafted.
    """
    known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, outputs, strict=True)}
    answers = _Answers(known, acceptance)
    weights = weights_of(engine.drafter)
    if lookup_of(engine.drafter) is not None:
        forced_lookup = _ForcedLookup(answers, acceptance.texts)
        engine.executor.drafter = forced_lookup if weights is None else LookupFirst(forced_lookup, weights)
        for each in drafting:
            each._lookup = forced_lookup
    if weights is None:
        return
    chosen = type(weights)._next

    def forced(parts: Mapping[Sequence, GrowingDraft | GrowingBranch]) -> dict[Sequence, DraftChoice | None]:
        chosen(weights, parts)
        return {sequence: answers.choice(sequence, part) for sequence, part in parts.items()}

    weights._next = forced  # type: ignore[method-assign]


def begin_texts(engine: Engine, place: int) -> None:
    """Let the sequences that come next get the texts from this one on, if their drafts are looked up in texts."""
    lookup = lookup_of(engine.executor.drafter)
    if isinstance(lookup, _ForcedLookup):
        lookup.place = place


def _wrong(token: int, by: int) -> int:
    return (token + by) % 1000
