"""A step's plan: what the scheduler decides and an executor carries out. Touches no tensor."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Protocol

from ..blocks.block_cache import Copy
from ..requests.sequence import Sequence


@dataclass(frozen=True)
class DraftPath:
    """A draft's chain, or one of its branches with what the chain has before it.

    Attributes:
        sequence: that it is of.
        odds: of the drafter's second choice against each of its tokens so far, from 0 to 1; where a branch leaves the chain, against the chain's.
        leaves: after how many tokens a branch leaves the chain; None for the chain.
    """

    sequence: Sequence
    odds: SequenceOf[float]
    leaves: int | None = None


class DraftRule(Protocol):
    """Decides by how sure a drafter is where chains end and where branches leave them."""

    def going_on(self, paths: SequenceOf[DraftPath]) -> Set[int]:
        """The places of the paths that get another token, of those that may."""
        ...

    def branching(self, odds: SequenceOf[float]) -> list[int]:
        """After how many of a chain's tokens the second choice is worth being verified, too; the best places first.

        Args:
            odds: of the second choice against each token.
        """
        ...


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to compute: ``count`` from position ``start`` on.

    Attributes:
        is_last: whether it reaches the end of the sequence, so that its next token can be sampled.
        drafts: places in the cache after them, for a chain of draft tokens that are verified in the same step; there may be fewer.
        branched: how many more draft tokens there may be on branches off that chain.
        spare: a block for each branch.
        rule: ends that chain before, and chooses branches; the same for all chunks. None: the chain is as long as it may be, and its likeliest
            branches are verified.
        looks_up: whether these drafts are looked up, of a drafter that also has weights.
    """

    sequence: Sequence
    start: int
    count: int
    is_last: bool
    drafts: int = 0
    branched: int = 0
    spare: tuple[int, ...] = ()
    rule: DraftRule | None = None
    looks_up: bool = False

    @property
    def is_prompt(self) -> bool:
        """Whether it is more than a decode's token: a piece of a prompt, or of what is computed again."""
        return self.count > 1 or not self.is_last


@dataclass(frozen=True)
class StepPlan:
    """The work of a step: swap blocks out, then in, copy blocks, then compute chunks.

    Attributes:
        chunks: in the order in which they are computed.
        copies: blocks to copy before.
        at: when it was scheduled.
        swap_out: blocks to copy to host memory, ``(block, slot)``.
        swap_in: blocks to copy from there, ``(slot, block)``.
    """

    chunks: list[Chunk]
    copies: list[Copy] = field(default_factory=list)
    at: float = 0.0
    swap_out: list[Copy] = field(default_factory=list)
    swap_in: list[Copy] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(chunk.count + chunk.drafts + chunk.branched for chunk in self.chunks)

    @property
    def has_prompts(self) -> bool:
        """Whether it computes more of some sequence than its next token."""
        return any(chunk.is_prompt for chunk in self.chunks)
