"""How a recipe names schemes, rounding methods and transforms."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from ...system.settings.recipe_model import Chosen, choice_schema, one_of
from .. import scheme_names as schemes
from ..rounding import METHODS
from ..transforms import TRANSFORMS

AUTO = "auto"


class Rounding(Chosen):
    """A rounding method and its options."""

    kind = "rounding method"
    table = METHODS


class TransformChoice(Chosen):
    """A transform and its options."""

    kind = "transform"
    table = TRANSFORMS


def _scheme_name(value: Any) -> Any:
    if isinstance(value, str):
        reason = schemes.why_unsupported(value)
        if reason:
            raise ValueError(f"scheme {value} cannot be used: {reason}")
        return one_of(value.upper(), list(schemes.SUPPORTED), "scheme")
    return value


RoundingField = Annotated[Rounding, WithJsonSchema(choice_schema(METHODS))]


TransformField = Annotated[TransformChoice, WithJsonSchema(choice_schema(TRANSFORMS))]


SchemeField = Annotated[str, BeforeValidator(_scheme_name)]
