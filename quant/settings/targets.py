"""Patterns that select linears, and overrides for some of them."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ...system.settings.recipe_model import RecipeModel
from .. import scheme_names as schemes
from .methods import RoundingField, SchemeField


def compiled_patterns(patterns: list[str]) -> list[str]:
    """Check names of linears: each is a name, or ``re:`` and a regular expression that compiles."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return patterns


class Override(RecipeModel):
    """Other settings for some linears than the step's."""

    targets: list[str] = Field(min_length=1, description="Linears: module names, or `re:` and a regular expression.")
    scheme: SchemeField | None = Field(
        default=None,
        description="Number format; default: the step's.",
        json_schema_extra={"enum": [*schemes.SPELLED, None]},
    )
    group_size: int | None = Field(default=None, description="Columns per scale; default: the scheme's.")
    inputs: Literal["dynamic", "static", "static_asymmetric"] | None = Field(
        default=None, description="Scales of 8-bit inputs; default: the scheme's."
    )
    rounding: RoundingField | None = Field(
        default=None, description="Rounding method; default: the scheme's own, if it has one, or the step's."
    )

    _own_rounding = model_validator(mode="before")(schemes.with_own_rounding)

    @model_validator(mode="after")
    def _fields_fit_scheme(self) -> Override:
        if self.scheme is not None:
            schemes.check(self.scheme, self.group_size, self.inputs)
            if self.rounding is not None:
                schemes.check_rounding(self.scheme, self.rounding.method)
        elif self.group_size is not None or self.inputs is not None:
            raise ValueError("group_size and inputs need a scheme; add scheme")
        return self

    _patterns = field_validator("targets")(compiled_patterns)
