"""How requests ask for structured output: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..http.errors import ApiError
from .grammar import Grammar, choices, expression, json_text, lark


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, protected_namespaces=())


class JsonSchema(_Form):
    """OpenAI's ``json_schema``; it is always followed strictly."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Form):
    """``response_format``."""

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
            )
            if value is not None
        ]
        if len(found) != 1:
            raise ApiError(
                400, f"structured_outputs has {len(found)} of json, regex, choice, grammar and json_object; give one.",
                param="structured_outputs",
            )  # fmt: skip
        return found[0]


def grammar_of(form: ResponseFormat | None, structured: StructuredOutputs | None) -> Grammar | None:
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
