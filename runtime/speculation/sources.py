"""What may draft for a sequence, and what a step's drafts then are. Touches no tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftBranches:
    """Of one sequence: how many, their tokens, and how many of these are expected to be accepted."""

    count: int
    tokens: int
    gained: float


NO_BRANCHES = DraftBranches(0, 0, 0.0)


@dataclass(frozen=True)
class DraftSource:
    """What may draft for one sequence: how often its tokens are right, how many it may have, and whether they are looked up."""

    share: float
    most: int
    looks_up: bool = False

    def speed(self, cost: float) -> float:
        """How many tokens it brings at best in the time of a step, of which each that is drafted takes ``cost``."""
        best = tokens = reached = 1.0
        for count in range(1, self.most + 1):
            reached *= self.share
            tokens += reached
            speed = tokens / (1 + cost * count)
            if speed < best:  # each token brings less than the one before it and takes as much
                break
            best = speed
        return best


@dataclass(frozen=True)
class DraftLengths:
    """A step's drafts: the tokens per second that are expected, and each sequence's length and branches."""

    speed: float
    lengths: list[int]
    branches: list[DraftBranches]
