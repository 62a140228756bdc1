"""Base classes of a recipe's sections, and of methods with options in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from ..errors import nearest_name
from ..storage.paths import path_problem


class RecipeModel(BaseModel):
    """Base of all recipe sections: unknown keys and silently converted types are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _possible(name: str) -> str:
    problem = path_problem(name)
    if problem is not None:
        raise ValueError(problem)
    return name


# The path of a file or directory, or a name that may be one.
PathText = Annotated[str, AfterValidator(_possible)]
# torch's CPU generator uses 32 bits of a seed and silently ignores higher bits.
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]


class Chosen(RecipeModel):
    """A method by name, with its options; a subclass's table lists the methods."""

    kind: ClassVar[str]
    table: ClassVar[Mapping[str, Any]]

    method: str
    options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"method": value}
        if isinstance(value, Mapping) and "method" in value and not isinstance(value.get("options"), Mapping):
            return {"method": value["method"], "options": {k: v for k, v in value.items() if k != "method"}}
        return value

    @field_validator("method")
    @classmethod
    def _known(cls, name: str) -> str:
        return one_of(name, list(cls.table), cls.kind)

    @model_validator(mode="after")
    def _options_are_right(self) -> Self:
        known = list(self.table[self.method].options.model_fields)
        for key in self.options:
            if key not in known:
                expected = f"expected {', '.join(known)}" if known else f"{self.method} has none"
                raise ValueError(f"unknown option {key!r}; {expected}{nearest_name(key, known)}")
        self.table[self.method].options.model_validate(self.options)
        return self

    def settled(self) -> Any:
        """The method's options, validated, with defaults."""
        return self.table[self.method].options.model_validate(self.options)


def choice_schema(table: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a :class:`Chosen`: a method's name, or a mapping of the method and its options."""
    return {
        "anyOf": [
            {"enum": list(table)},
            *(
                {
                    "type": "object",
                    "properties": {
                        "method": {"const": name},
                        **choice.options.model_json_schema().get("properties", {}),
                    },
                    "required": ["method"],
                    "additionalProperties": False,
                }
                for name, choice in table.items()
            ),
        ]
    }


def one_of(value: str, known: list[str], kind: str) -> str:
    """Return ``value`` if it is known; otherwise raise a ValueError that suggests the nearest known value."""
    if value in known:
        return value
    raise ValueError(f"unknown {kind} {value!r}; expected one of {', '.join(known)}{nearest_name(value, known)}")
