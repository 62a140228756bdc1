"""A step's plan: what the scheduler decides and an executor carries out. Touches no tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..requests.sequence import Sequence
from .block_cache import Copy


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to compute: ``count`` from position ``start`` on.

    Attributes:
        is_last: whether it reaches the end of the sequence, so that its next token can be sampled.
    """

    sequence: Sequence
    start: int
    count: int
    is_last: bool


@dataclass(frozen=True)
class StepPlan:
    """The work of a step: copy blocks, then compute chunks.

    Attributes:
        chunks: in the order in which they are computed.
        copies: blocks to copy before.
        at: when it was scheduled.
    """

    chunks: list[Chunk]
    copies: list[Copy] = field(default_factory=list)
    at: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)
