"""Which linears are meant, and what some are given instead of a step's own choices."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ...system.settings import RecipeModel
from .. import scheme_names as schemes
from .methods import RoundingField, SchemeField


def compiled_patterns(patterns: list[str]) -> list[str]:
    """Names of linears, or ``re:`` and a regular expression, all of which compile."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return patterns


class Override(RecipeModel):
    """What some linears are given instead of the step's own choices."""

    targets: list[str] = Field(
        min_length=1, description="Which linears: module names, or `re:` and a regular expression."
    )
    scheme: SchemeField | None = Field(
        default=None,
        description="Their number format; absent for the step's.",
        json_schema_extra={"enum": [*schemes.SUPPORTED, None]},
    )
    group_size: int | None = Field(default=None, description="Columns that share a scale; absent for the scheme's own.")
    inputs: Literal["dynamic", "static", "static_asymmetric"] | None = Field(
        default=None, description="Where 8-bit inputs get their scales from; absent for the scheme's own."
    )
    rounding: RoundingField | None = Field(
        default=None, description="How their codes are picked; absent for the step's."
    )

    @model_validator(mode="after")
    def _group_size_fits_scheme(self) -> Override:
        if self.scheme is not None:
            schemes.check(self.scheme, self.group_size, self.inputs)
        elif self.group_size is not None or self.inputs is not None:
            raise ValueError("group_size and inputs belong to a scheme; name it, too")
        return self

    _patterns = field_validator("targets")(compiled_patterns)
