"""What became of drafts."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

from .tree import TokenTree


@dataclass(frozen=True)
class DraftOutcome:
    """What became of a sequence's draft.

    Attributes:
        drafted, accepted: tokens of its chain.
        branched, on_branch: tokens of its branches, and how many of them were accepted.
        caught: whether a branch was, where the chain was wrong and one began; None where none did.
        cut: whether verification ended before it came to a token that was wrong: the output was complete.
        odds: of what came second against each of the chain's tokens; empty if the drafter has none.
        at_once: how many tokens the drafter chose in each of its steps; None if it chose the chain's alone.
    """

    drafted: int
    accepted: int
    branched: int = 0
    on_branch: int = 0
    caught: bool | None = None
    cut: bool = False
    odds: SequenceOf[float] = ()
    at_once: SequenceOf[int] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, tree: TokenTree, reached: int, *, cut: bool = False) -> DraftOutcome:
        """After verification has come to a node of a tree, and no further because of what was there or, if ``cut``, of what is asked for."""
        accepted, on_branch = tree.path_length(reached)
        begins = accepted < len(tree.chain) and any(branch.after == accepted for branch in tree.branches)
        caught = on_branch > 0 if begins and (on_branch or not cut) else None
        at_once = tree.drafted_at_once() if tree.branched > len(tree.branches) else None
        return cls(
            len(tree.chain), accepted, tree.branched, on_branch, caught, cut and not on_branch, tree.odds, at_once
        )

    def ended_after(self, count: int) -> DraftOutcome:
        """What became of it if the sequence ended with that many of its tokens."""
        if count >= self.accepted + self.on_branch:
            return self
        accepted = min(count, self.accepted)
        return replace(self, accepted=accepted, on_branch=count - accepted, cut=True)

    @property
    def tried(self) -> int:
        """How many of the chain's tokens were compared with what came."""
        return self.accepted + self.is_chain_wrong

    @property
    def steps(self) -> SequenceOf[int]:
        """How many tokens the drafter chose in each of its steps."""
        return [1] * self.drafted if self.at_once is None else self.at_once

    @property
    def is_chain_wrong(self) -> bool:
        """Whether one of the chain's tokens was not accepted."""
        return self.accepted < self.drafted and not self.cut


@dataclass
class DraftCounts:
    """Counts over steps.

    Attributes:
        steps: in which some sequence had a draft.
        verified: how often a sequence's draft was verified; each time it gets one token more than are accepted.
        rejected: how often one of its tokens was not accepted, after which the others are of no use.
        drafted, accepted: draft tokens of chains, by their position in the draft.
        branched, on_branch: draft tokens of branches, and how many of them were accepted.
        beside, caught: how often a branch began where the chain was wrong, and how often it was right.
        looked_up, looked_up_right: draft tokens that were looked up, and how many of them were accepted.
    """

    steps: int = 0
    verified: int = 0
    rejected: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    branched: int = 0
    on_branch: int = 0
    beside: int = 0
    caught: int = 0
    looked_up: int = 0
    looked_up_right: int = 0

    def add(self, outcome: DraftOutcome, *, looked_up: bool = False) -> None:
        """Count a draft."""
        drafted, accepted = outcome.drafted, outcome.accepted
        if looked_up:
            self.looked_up += drafted
            self.looked_up_right += accepted
        self.branched += outcome.branched
        self.on_branch += outcome.on_branch
        self.beside += outcome.caught is not None
        self.caught += bool(outcome.caught)
        self.verified += 1
        self.rejected += outcome.is_chain_wrong
        missing = drafted - len(self.drafted)
        self.drafted.extend([0] * missing)
        self.accepted.extend([0] * missing)
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted

    @property
    def acceptance(self) -> float | None:
        """The share of draft tokens that were accepted; None if there were none."""
        return self.all_accepted / self.all_drafted if self.all_drafted else None

    @property
    def all_drafted(self) -> int:
        """Draft tokens, of chains and branches."""
        return sum(self.drafted) + self.branched

    @property
    def all_accepted(self) -> int:
        """How many of them were accepted."""
        return sum(self.accepted) + self.on_branch

    @property
    def agreement(self) -> float | None:
        """The share of chains' tokens that were accepted if those before them were; None if there were none."""
        accepted = sum(self.accepted)
        return accepted / (accepted + self.rejected) if accepted + self.rejected else None

    @property
    def tokens_per_verification(self) -> float | None:
        """How many tokens a sequence got where its draft was verified; None if none was."""
        return (self.verified + self.all_accepted) / self.verified if self.verified else None

    def by_position(self) -> list[float]:
        """The share of the first, second, … tokens of chains that were accepted."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True) if drafted]

    def sentence(self) -> str:
        """For people."""
        if self.tokens_per_verification is None:
            return "nothing was drafted"
        shares = ", ".join(f"{share:.0%}" for share in self.by_position()[:8])
        branches = f", and {self.on_branch} of {self.branched} on branches" if self.branched else ""
        if 0 < self.looked_up < self.all_drafted:  # of two drafters
            branches += f"; {self.looked_up_right} of {self.looked_up} were looked up"
        return (
            f"drafts: {self.tokens_per_verification:.2f} tokens for each that was verified; accepted"
            f" {sum(self.accepted) / sum(self.drafted):.0%} of {sum(self.drafted)} tokens, by position {shares}{branches}"
        )

    def since(self, before: DraftCounts) -> DraftCounts:
        """Those that were added to ``before``, an earlier state."""
        return self._joined(before, operator.sub)

    def with_those_of(self, others: DraftCounts) -> DraftCounts:
        """Both together."""
        return self._joined(others, operator.add)

    def _joined(self, others: DraftCounts, join: Callable[[int, int], int]) -> DraftCounts:
        def both(a: Any, b: Any) -> Any:
            return (
                list(itertools.starmap(join, itertools.zip_longest(a, b, fillvalue=0)))
                if isinstance(a, list)
                else join(a, b)
            )

        theirs = vars(others)
        return DraftCounts(**{name: both(mine, theirs[name]) for name, mine in vars(self).items()})

    def copy(self) -> DraftCounts:
        """The same, which stays as it is."""
        return replace(self, drafted=list(self.drafted), accepted=list(self.accepted))
