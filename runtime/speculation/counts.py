"""What became of drafts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass
class DraftCounts:
    """Counts over steps.

    Attributes:
        steps: in which some sequence had a draft.
        verified: how often a sequence's draft was verified; each time it gets one token more than are accepted.
        rejected: how often one of its tokens was not accepted, after which the others are of no use.
        drafted, accepted: draft tokens, by their position in the draft.
    """

    steps: int = 0
    verified: int = 0
    rejected: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft."""
        self.verified += 1
        self.rejected += accepted < drafted
        missing = drafted - len(self.drafted)
        self.drafted.extend([0] * missing)
        self.accepted.extend([0] * missing)
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted

    @property
    def acceptance(self) -> float | None:
        """The share of draft tokens that were accepted; None if there were none."""
        drafted = sum(self.drafted)
        return sum(self.accepted) / drafted if drafted else None

    @property
    def agreement(self) -> float | None:
        """The share of draft tokens that were accepted if those before them were; None if there were none."""
        accepted = sum(self.accepted)
        return accepted / (accepted + self.rejected) if accepted + self.rejected else None

    @property
    def tokens_per_verification(self) -> float | None:
        """How many tokens a sequence got where its draft was verified; None if none was."""
        return (self.verified + sum(self.accepted)) / self.verified if self.verified else None

    def by_position(self) -> list[float]:
        """The share of the first, second, … draft tokens that were accepted."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True) if drafted]

    def sentence(self) -> str:
        """For people."""
        if self.tokens_per_verification is None:
            return "nothing was drafted"
        shares = ", ".join(f"{share:.0%}" for share in self.by_position()[:8])
        return (
            f"drafts: {self.tokens_per_verification:.2f} tokens for each that was verified; accepted {self.acceptance:.0%}"
            f" of {sum(self.drafted)} tokens, by position {shares}"
        )

    def since(self, before: DraftCounts) -> DraftCounts:
        """Those that were added to ``before``, an earlier state."""

        def less(now: list[int], then: list[int]) -> list[int]:
            return [each - (then[i] if i < len(then) else 0) for i, each in enumerate(now)]

        return DraftCounts(
            self.steps - before.steps,
            self.verified - before.verified,
            self.rejected - before.rejected,
            less(self.drafted, before.drafted),
            less(self.accepted, before.accepted),
        )

    def with_those_of(self, others: DraftCounts) -> DraftCounts:
        """Both together."""

        def both(a: list[int], b: list[int]) -> list[int]:
            return [x + y for x, y in itertools.zip_longest(a, b, fillvalue=0)]

        return DraftCounts(
            self.steps + others.steps,
            self.verified + others.verified,
            self.rejected + others.rejected,
            both(self.drafted, others.drafted),
            both(self.accepted, others.accepted),
        )

    def copy(self) -> DraftCounts:
        """The same, which stays as it is."""
        return DraftCounts(self.steps, self.verified, self.rejected, list(self.drafted), list(self.accepted))
