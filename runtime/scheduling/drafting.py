"""What the scheduler asks about draft tokens. Touches no tensor."""

from __future__ import annotations

from typing import Protocol

from ..requests.sequence import Sequence
from .plan import Chunk, StepPlan


class Drafting(Protocol):
    """Decides how many draft tokens are verified."""

    def counts(self, plan: StepPlan, budget: int) -> dict[int, int]:
        """How many draft tokens a step's chunks get at most, by their place in it.

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
