"""What the scheduler asks about draft tokens. Touches no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..requests.sequence import Sequence
from .plan import Chunk, DraftRule, StepPlan


@dataclass(frozen=True)
class DraftSize:
    """How large a sequence's draft may be.

    Attributes:
        chain: tokens of its chain, at least one.
        branches: how many branches it may have.
        branched: how many tokens all of them together; at least as many.
        rule: ends chains before that, and chooses branches; the same for all drafts of a step. None if nothing does.
        looks_up: whether it is looked up, of a drafter that also has weights.
    """

    chain: int
    branches: int = 0
    branched: int = 0
    rule: DraftRule | None = None
    looks_up: bool = False

    @property
    def tokens(self) -> int:
        """Of all parts."""
        return self.chain + self.branched


class Drafting(Protocol):
    """Decides how many draft tokens are verified."""

    def sizes(self, plan: StepPlan, budget: int) -> dict[int, DraftSize]:
        """How large the drafts of a step's chunks may be, by their place in it.

        Args:
            plan: the step without any.
            budget: how many more tokens it may have.
        """
        ...


def takes_drafts(chunk: Chunk) -> bool:
    """Whether draft tokens of a chunk's sequence could be verified: it decodes, and by sampling."""
    request = chunk.sequence.request
    if request.upper_bits:  # what would draft answers it
        return False
    return not chunk.is_prompt and request.forked and not request.params.is_beam_search and not chunk.sequence.expected


def most_drafts(sequence: Sequence) -> int:
    """The most that can be of use: all but the last possible token, which is chosen after them."""
    return max(0, sequence.request.grows_to - len(sequence.tokens) - 1)
