"""Drafts that are not complete. Touches no tensor."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from collections.abc import Set
from dataclasses import dataclass, field

from ..requests.sequence import Sequence
from ..scheduling.plan import DraftPath, DraftRule
from .tree import DraftBranch, TokenTree


@dataclass(frozen=True)
class DraftChoice:
    """The next token of a draft.

    Attributes:
        token: that the drafter chose.
        odds: of the one that came second against it, from 0 to 1.
        others: those that came next, as many as the draft may have branches, with their odds.
    """

    token: int
    odds: float
    others: list[tuple[float, int]] = field(default_factory=list)


@dataclass(eq=False)
class GrowingBranch:
    """A branch of a draft.

    Attributes:
        draft: whose chain it leaves.
        after: how many of the chain's tokens are before it.
        tokens: at least one.
        likely: how likely it was right when it began, if the odds between tokens are as the drafter has them.
        spare: the block that it has.
        longest: how many tokens it may have.
        odds: of the second choice against each of its tokens but the first.
        sequence: that ends with it, once it has more than one token.
        is_complete: whether it gets no more.
    """

    draft: GrowingDraft
    after: int
    tokens: list[int]
    likely: float
    spare: int
    longest: int
    odds: list[float] = field(default_factory=list)
    sequence: Sequence | None = None
    is_complete: bool = False

    others_each = 0

    @property
    def length(self) -> int:
        """With the chain's tokens before it."""
        return self.after + len(self.tokens)

    @property
    def path(self) -> DraftPath:
        """For a rule."""
        return DraftPath(self.draft.sequence, [*self.draft.odds[: self.after + 1], *self.odds], self.after)

    @property
    def whole(self) -> list[int]:
        """It and the chain's tokens before it."""
        return self.draft.chain[: self.after] + self.tokens

    def add(self, choice: DraftChoice) -> None:
        """The next token."""
        self.tokens.append(choice.token)
        self.odds.append(choice.odds)


@dataclass(eq=False)
class GrowingDraft:
    """A draft: its chain, and the branches that have left it.

    Attributes:
        sequence: that it is of.
        longest: of its chain; of all of it, if a rule chooses.
        branched: how many tokens its branches may have together.
        spare: a block for each branch.
        longest_branch: how many tokens one may have; None for as many as stay in its block.
        block_size: positions in a block.
        behind: how many positions before a token have keys and values that depend on it, which a branch must have in its own block.
        final: tokens after which no other is of use.
        rule: chooses branches; without one the most likely ones are kept.
    """

    sequence: Sequence
    longest: int
    branched: int = 0
    spare: SequenceOf[int] = ()
    longest_branch: int | None = 1
    block_size: int = 1
    behind: int = 0
    final: Set[int] = frozenset()
    rule: DraftRule | None = None
    chain: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)
    branches: list[GrowingBranch] = field(default_factory=list)
    is_complete: bool = False

    def __post_init__(self) -> None:
        self.begin = len(self.sequence.tokens)
        self.others_each = len(self.spare) if self.rule is None else min(1, len(self.spare))
        self._reached = 1.0  # how likely the chain is right so far, as the drafter has it

    @property
    def length(self) -> int:
        """Of its chain."""
        return len(self.chain)

    @property
    def path(self) -> DraftPath:
        """For a rule."""
        return DraftPath(self.sequence, self.odds)

    def _left(self, of_chain: int) -> int:
        """How many more tokens branches may have, if the chain has so many more."""
        branched = sum(len(branch.tokens) for branch in self.branches)
        left = self.branched - branched
        return left if self.rule is None else min(left, self.longest - len(self.chain) - of_chain - branched)

    def add(self, choice: DraftChoice) -> None:
        """The chain's next token, beside which branches may begin."""
        after = len(self.chain)
        self._reached /= 1 + sum(odds for odds, _ in choice.others)
        self.chain.append(choice.token)
        self.odds.append(choice.odds)
        others = [(odds, token) for odds, token in choice.others if odds > 0]
        if others and (self.rule is None or after in self.rule.branching(self.odds)):
            for odds, token in others:
                self._branch(after, token, self._reached * odds)

    def going_on(self) -> list[GrowingDraft | GrowingBranch]:
        """The parts that may have another token: its chain, and as many branches as there is room for, the likeliest first."""
        taken = 0 if self.rule is None else sum(len(branch.tokens) for branch in self.branches)
        goes_on = not self.is_complete and len(self.chain) + taken < self.longest
        found: list[GrowingDraft | GrowingBranch] = [self] if goes_on else []
        left = self._left(of_chain=int(goes_on))
        for branch in sorted(self.branches, key=lambda each: each.likely, reverse=True):
            if left > 0 and not branch.is_complete and len(branch.tokens) < branch.longest:
                found.append(branch)
                left -= 1
        return found

    def tree(self) -> TokenTree:
        """As it is."""
        return TokenTree(self.chain, [DraftBranch(each.after, each.tokens) for each in self.branches], self.odds)

    def _branch(self, after: int, token: int, likely: float) -> None:
        place = len(self.branches)
        if place == len(self.spare):
            if self.rule is not None:
                return
            place = min(range(place), key=lambda each: self.branches[each].likely)
            if self.branches[place].likely >= likely:
                return
        elif self._left(of_chain=0) <= 0:
            return
        inside = (self.begin + after) % self.block_size
        room = min(self.block_size - inside, self.longest - after) if inside >= self.behind else 1
        longest = room if self.longest_branch is None else min(room, self.longest_branch)
        branch = GrowingBranch(self, after, [token], likely, self.spare[place], longest)
        branch.is_complete = token in self.final
        self.branches[place : place + 1] = [branch]
