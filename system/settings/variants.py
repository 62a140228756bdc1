"""Sections of a recipe with variants, one model each, selected by one field (pydantic's tagged unions).

Pydantic reports a field of another variant as unknown. Here such a field gets a specific message, and only a field that
no variant has is reported as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

from .recipe_model import RecipeModel


@dataclass(frozen=True)
class Elsewhere:
    """In a field's ``Annotated``: the message if a recipe sets this field for a variant without it.

    Attributes:
        field: the message, with the placeholders ``{name}``, ``{value}`` and ``{variant}``.
        value: beginning of the message if the variant has the field, but does not accept this value.
    """

    field: str | None = None
    value: str = "{name} {value} is not for {variant}"


@dataclass(frozen=True)
class Needed:
    """In a required field's ``Annotated``: the message if it is missing."""

    sentence: str


class Variant(RecipeModel):
    """Base of models that are variants of one section."""

    @classmethod
    def why_not(cls, name: str, owners: Sequence[type[Variant]]) -> str | None:
        """This variant's message about a field that only other variants have; None to use theirs."""
        return None


class _Field(NamedTuple):
    """A field of some variant."""

    info: FieldInfo
    owner: type[Variant]


@dataclass(frozen=True, eq=False)
class Variants:
    """In an ``Annotated``: the variants of a section.

    Attributes:
        field: the field that selects the variant.
        models: the variants by name.
        named: maps the field's value to a name in ``models``; raises ValueError for an unknown value.
        spelled: normalizes the field's value as written in a file.
    """

    field: str
    models: Mapping[str, type[Variant]]
    named: Callable[[Any], str]
    spelled: Callable[[Any], Any] = lambda value: value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A tagged union of the models."""

        def checked(name: str, model: type[Variant]) -> CoreSchema:
            def check(value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Any:
                return self._checked(model, value, validate)

            return core_schema.no_info_wrap_validator_function(check, handler.generate_schema(model))

        choices = {name: checked(name, model) for name, model in self.models.items()}
        union = core_schema.tagged_union_schema(choices, discriminator=self._tag)
        return core_schema.no_info_before_validator_function(self._respelled, union)

    def _respelled(self, value: Any) -> Any:
        if isinstance(value, Mapping) and self.field in value:
            return {**value, self.field: self.spelled(value[self.field])}
        return value

    def _tag(self, value: Any) -> str:
        """The selected variant; if the field is missing or wrong, the variant with most of the given fields."""
        for name, model in self.models.items():
            if isinstance(value, model):
                return name
        if not isinstance(value, Mapping):
            return next(iter(self.models))
        if self.field in value and self._why_unknown(value) is None:
            return self.named(value[self.field])
        return max(self.models, key=lambda name: sum(key in self.models[name].model_fields for key in value))

    def _why_unknown(self, value: Mapping[str, Any]) -> str | None:
        try:
            self.named(value[self.field])
        except ValueError as error:
            return str(error)
        return None

    def _checked(self, model: type[Variant], value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Variant:
        if not isinstance(value, Mapping):
            return validate(value)
        wrong, own = list[InitErrorDetails](), dict[str, Any]()
        unknown = self._why_unknown(value) if self.field in value else None
        if unknown is not None:
            wrong.append(_mistake((self.field,), value[self.field], unknown))
        for key, given in value.items():
            sentence = self._why_foreign(model, key, given, value.get(self.field))
            if sentence is not None and unknown is None:
                wrong.append(_mistake((key,), given, sentence))
            elif sentence is None and (key in model.model_fields or not any(self._fields(key))):
                own[key] = given
        try:
            found = validate(_without_nothing(model, own))
        except ValidationError as error:
            for each in error.errors(include_url=False):
                # Required fields are unknown if the variant is.
                needs = each["loc"] in ((), (self.field,)) or (each["type"] == "missing" and len(each["loc"]) == 1)
                if unknown is None or not needs:
                    wrong.append(_again(model, each))
        else:
            if not wrong:
                return found
        raise ValidationError.from_exception_data(model.__name__, wrong)

    def _fields(self, key: str) -> Iterator[_Field]:
        """This field in each variant that has it."""
        for model in dict.fromkeys(self.models.values()):
            if key in model.model_fields:
                yield _Field(model.model_fields[key], model)

    def _why_foreign(self, model: type[Variant], key: str, given: Any, variant: Any) -> str | None:
        """The message about a field, or a value, that only other variants accept; None if nothing is wrong."""
        if key == self.field:
            return None
        owners = list(self._fields(key))
        said = {"name": key, "value": given, "variant": variant}
        if key in model.model_fields:
            mine = _choices(model.model_fields[key].annotation)
            homes = [each for each in owners if _is_in(given, _choices(each.info.annotation))]
            if not mine or _is_in(given, mine) or not homes:
                return None
            return f"{_elsewhere(homes).value.format(**said)}; expected {', '.join(mine)}"
        if not owners or given is None or any(given == each.info.get_default() for each in owners):
            return None  # the default, as if absent
        sentence = model.why_not(key, [each.owner for each in owners]) or _elsewhere(owners).field
        if sentence is not None:
            return sentence.format(**said)
        choice = any(_is_in(given, _choices(each.info.annotation)) for each in owners)
        return f"{key} {given if choice else ''}".rstrip() + f" is not for {variant}; remove it"


def _mistake(loc: tuple[int | str, ...], given: Any, sentence: str) -> InitErrorDetails:
    return InitErrorDetails(
        type=PydanticCustomError("value_error", "{sentence}", {"sentence": sentence}), loc=loc, input=given
    )


def _again(model: type[Variant], error: ErrorDetails) -> InitErrorDetails:
    """An error found by pydantic, to be raised with others; some missing fields get their own message."""
    loc, kind = error["loc"], error["type"]
    info = model.model_fields.get(str(loc[0])) if len(loc) == 1 else None
    needed = _needed(info) if info is not None and kind == "missing" else None
    if needed is not None:
        return _mistake((), error["input"], needed)
    again = PydanticCustomError(kind, "{said}", {"said": error["msg"]})  # type: ignore[arg-type]
    return InitErrorDetails(type=again, loc=loc, input=error["input"])


def _elsewhere(fields: list[_Field]) -> Elsewhere:
    said = (each for field in fields for each in field.info.metadata if isinstance(each, Elsewhere))
    return next(said, Elsewhere())


def _without_nothing(model: type[Variant], given: dict[str, Any]) -> dict[str, Any]:
    """The section without required fields that are null, which count as absent."""
    return {
        key: value
        for key, value in given.items()
        if value is not None or key not in model.model_fields or _needed(model.model_fields[key]) is None
    }


def _needed(info: FieldInfo) -> str | None:
    return next((each.sentence for each in info.metadata if isinstance(each, Needed)), None)


def _choices(annotation: Any) -> list[str]:
    """The values of all Literals in an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [each for inner in get_args(annotation) for each in _choices(inner)]


def _is_in(value: Any, choices: list[str]) -> bool:
    return isinstance(value, str) and value in choices
