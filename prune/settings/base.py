"""What the settings of all structures have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from ...quant.settings.guard import Guard
from ...system.variants import Elsewhere, Variant

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Multiple = Annotated[Count | None, Elsewhere("multiple is for widths; {variant} has none, so remove it")]


class PruneBase(Variant):
    """Take parts of the model away. A subclass says by which ``structure`` it is chosen."""

    amounts: ClassVar[tuple[str, ...]] = ()
    """The fields one of which says how much goes."""
    decides: ClassVar[str | None] = None
    """Why none of other structures' amounts is needed."""

    structure: Any

    @classmethod
    def why_not(cls, name: str, owners: Sequence[type[Variant]]) -> str | None:
        """Amounts are for structures that do not decide themselves how much goes."""
        if cls.decides is not None and any(name in each.amounts for each in owners if issubclass(each, PruneBase)):
            return f"structure {{variant}} {cls.decides}; remove {name}"
        return None

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        given = [name for name in self.amounts if getattr(self, name) is not None]
        if self.amounts and len(given) != 1:
            *others, last = self.amounts
            more = " and not both" if len(others) == 1 else ", and only one of them"
            raise ValueError(f"structure {self.structure} needs {', '.join(others)} or {last}{more}")
        return self


class GuardedPrune(PruneBase):
    """Structures whose layers' errors can be limited."""

    guard: Annotated[
        Guard | None,
        Elsewhere("guard limits what a layer's outputs change by; {variant} go as a whole, so remove it"),
    ] = Field(
        default=None,
        description="A limit on how much a layer's outputs may change on the calibration text, and whether that is"
        " reported or ends the run.",
    )

    @model_validator(mode="after")
    def _no_fallback(self) -> Self:
        if self.guard is not None and self.guard.otherwise == "fallback":
            raise ValueError("guard.otherwise: fallback stores a layer in another format; use warn or fail")
        return self
