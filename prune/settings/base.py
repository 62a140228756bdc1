"""Settings common to all structures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from ...models.steps.settings import StepSettings
from ...quant.settings.guard import Guard
from ...system.settings.variants import Elsewhere, Variant

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Multiple = Annotated[Count | None, Elsewhere("multiple is for widths; {variant} has none, so remove it")]


class PruneBase(Variant, StepSettings):
    """Remove parts of the model. Each subclass is selected by its ``structure``."""

    amounts: ClassVar[tuple[str, ...]] = ()
    """Fields that say how much to remove; exactly one must be given."""
    decides: ClassVar[str | None] = None
    """For structures without such fields: what decides instead, for messages."""

    structure: Any

    @classmethod
    def why_not(cls, name: str, owners: Sequence[type[Variant]]) -> str | None:
        """Refuse fields for the amount if the structure decides it by itself."""
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
    """Structures that accept a `guard` on layers' errors."""

    guard: Annotated[
        Guard | None,
        Elsewhere("guard limits the change of a layer's outputs, which does not apply to {variant}; remove it"),
    ] = Field(
        default=None,
        description="Limit on how much a layer's outputs may change on the calibration text, and whether exceeding it is"
        " reported or ends the run.",
    )

    @model_validator(mode="after")
    def _no_fallback(self) -> Self:
        if self.guard is not None and self.guard.otherwise == "fallback":
            raise ValueError("guard.otherwise: fallback stores a layer in another format; use warn or fail")
        return self
