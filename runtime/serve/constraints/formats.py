"""How requests ask for structured output: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from ..http.errors import ApiError
from .grammar import Grammar, choices, expression, json_text, lark, structural_tags

_MOST_TAGS = 1024


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, protected_namespaces=())


class JsonSchema(_Form):
    """OpenAI's ``json_schema``; it is always followed strictly."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TagStructure(_Form):
    """One of a structural tag's: JSON between two texts."""

    begin: str
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    end: str


class StructuralTag(_Form):
    """vLLM's ``structural_tag``: any text, in which a trigger begins one of the structures."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=_MOST_TAGS)]
    triggers: Annotated[list[str], Field(min_length=1, max_length=_MOST_TAGS)]

    def grammar(self) -> Grammar:
        """What it asks for.

        Raises:
            ApiError: a structure does not begin with one trigger.
        """
        tags = [
            (each.begin, True if each.json_schema is None else each.json_schema, each.end) for each in self.structures
        ]
        return structural_tags(tags, self.triggers)


class ResponseFormat(_Form):
    """``response_format``, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        """What it asks for; None for any text.

        Raises:
            ApiError: the schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_text({"type": "object"})
        if self.json_schema is None:
            raise ApiError(400, "response_format of type json_schema needs json_schema.", param="response_format")
        schema = self.json_schema.json_schema
        return json_text({"type": "object"} if schema is None else schema)


class StructuredOutputs(_Form):
    """vLLM's ``structured_outputs``: one of its fields."""

    json_: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | StructuralTag | None = None

    def asked(self) -> Grammar:
        """What it asks for.

        Raises:
            ApiError: nothing, or several things.
        """
        found = [
            make()
            for value, make in (
                (self.json_, lambda: json_text(self.json_)),
                (self.regex, lambda: expression(self.regex or "")),
                (self.choice, lambda: choices(self.choice or [])),
                (self.grammar, lambda: lark(self.grammar or "")),
                (self.json_object or None, lambda: json_text({"type": "object"})),
                (self.structural_tag, lambda: _tag(self.structural_tag or "").grammar()),
            )
            if value is not None
        ]
        if len(found) != 1:
            raise ApiError(
                400, f"structured_outputs has {len(found)} of json, regex, choice, grammar, json_object and structural_tag; give one.",
                param="structured_outputs",
            )  # fmt: skip
        return found[0]


def _kind(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "StructuralTag" if kind == "structural_tag" else "ResponseFormat"


Form = Annotated[
    Annotated[ResponseFormat, Tag("ResponseFormat")] | Annotated[StructuralTag, Tag("StructuralTag")],
    Discriminator(_kind),
]


def _tag(given: str | StructuralTag) -> StructuralTag:
    if isinstance(given, StructuralTag):
        return given
    try:
        return StructuralTag.model_validate_json(given)
    except ValidationError as error:
        where, what = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise ApiError(
            400,
            f"The structural tag is wrong at {'.'.join(map(str, where)) or 'its beginning'}: {what}.",
            param="structured_outputs",
        ) from None


def grammar_of(form: ResponseFormat | StructuralTag | None, structured: StructuredOutputs | None) -> Grammar | None:
    """What a request asks for by either field.

    Raises:
        ApiError: by both.
    """
    asked = None if form is None else form.grammar()
    if structured is None:
        return asked
    if asked is not None:
        raise ApiError(400, "Give response_format or structured_outputs, not both.", param="structured_outputs")
    return structured.asked()
