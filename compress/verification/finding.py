"""What became of a claim."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["confirmed", "not confirmed", "not measurable here"]


@dataclass(frozen=True)
class Finding:
    """One claim, measured again.

    Attributes:
        claim: what is claimed.
        verdict: of the measurement.
        why: what was found, or why nothing could be.
    """

    claim: str
    verdict: Verdict
    why: str

    def sentence(self) -> str:
        """For people. Names in a record may have any characters, which must not look like other lines."""
        said = f"{self.verdict:<20}{self.claim}: {self.why}"
        return "".join(letter if letter.isprintable() else "?" for letter in said)

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)
