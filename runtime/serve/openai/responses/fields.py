"""The body of ``/v1/responses``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from ....requests.params import SamplingParams
from ...constraints.formats import StructuredOutputs
from ...http.errors import ApiError
from ..fields import MOST_MESSAGES, ChoosingFields, Fields

_LOGPROBS = "message.output_text.logprobs"
_MOST_LOGPROBS = 20
# Tags of union members are in the paths of pydantic's errors; what is not an identifier is left out there.
_TEXT, _LIST, _OTHER = "a text", "a list", "other type"


def _text_or_list(value: object) -> str:
    return _TEXT if isinstance(value, str) else _LIST


def _by_type(*known: str) -> Callable[[object], str]:
    def tag(value: object) -> str:
        if isinstance(value, str):
            return _TEXT
        kind = value.get("type") if isinstance(value, dict) else None
        if kind is None and isinstance(value, dict) and "role" in value:
            kind = "message"
        return f"type {kind}" if kind in known else _OTHER

    return tag


class InputPart(BaseModel):
    """A part of a text. Fields that are not here are ignored, so that output items can be sent back as they are."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[list[InputPart], Tag(_LIST)],
    Discriminator(_text_or_list),
]


class MessageItem(BaseModel):
    """What someone has said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(BaseModel):
    """A call that the model has made; its arguments are JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(BaseModel):
    """What a call has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(BaseModel):
    """What the model has thought."""

    type: Literal["reasoning"]
    content: list[InputPart] | None = None


class OtherItem(BaseModel):
    """An item that is refused; without a type it refers to a stored one."""

    type: str | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("type message")]
    | Annotated[CallItem, Tag("type function_call")]
    | Annotated[CallOutputItem, Tag("type function_call_output")]
    | Annotated[ReasoningItem, Tag("type reasoning")]
    | Annotated[OtherItem, Tag(_OTHER)],
    Discriminator(_by_type("message", "function_call", "function_call_output", "reasoning")),
]


class FunctionTool(BaseModel):
    """A tool and what it takes."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class BuiltInTool(BaseModel):
    """A tool that is refused."""

    type: str


ToolField = Annotated[
    Annotated[FunctionTool, Tag("type function")] | Annotated[BuiltInTool, Tag(_OTHER)],
    Discriminator(_by_type("function")),
]


class FunctionChoice(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class AllowedTools(Fields):
    """The tools that may be called, or of which one must be.

    Attributes:
        tools: like ``NamedFunction``.
    """

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class OtherChoice(BaseModel):
    """A choice that is refused."""

    type: str


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(_TEXT)]
    | Annotated[FunctionChoice, Tag("type function")]
    | Annotated[AllowedTools, Tag("type allowed_tools")]
    | Annotated[OtherChoice, Tag(_OTHER)],
    Discriminator(_by_type("function", "allowed_tools")),
]


class TextFormat(Fields):
    """What the answer must look like; a schema is always followed strictly."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Fields):
    """``text``.

    Attributes:
        verbosity: accepted, and not used.
    """

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(BaseModel):
    """``reasoning``.

    Attributes:
        effort: given to the template.
    """

    effort: str | None = None


class ResponsesRequest(ChoosingFields):
    """The body. The last fields are vLLM's.

    Attributes:
        truncation: ``auto`` leaves out the oldest turns of an input that is too long.
        previous_response_id, conversation, prompt, background: refused, for nothing is stored.
        store, include_obfuscation and those after them: accepted, and not used.
    """

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag(_TEXT)] | Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES), Tag(_LIST)],
        Discriminator(_text_or_list),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    include: list[str] | None = None
    tools: list[ToolField] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None

    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None

    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
    context_management: Any = None
    moderation: Any = None

    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, body: Any) -> Any:
        # JSON can have halves of characters, which responses could not give back. pydantic reports the error.
        if isinstance(body, dict):  # otherwise it was not sent as JSON
            json.dumps(body, ensure_ascii=False).encode()
        return body

    def check(self) -> None:
        """Refuse what is not supported, and what contradicts itself.

        Raises:
            ApiError: a field asks for it.
        """
        if self.previous_response_id is not None:
            raise ApiError(
                400, f"Previous response with id {self.previous_response_id!r} not found: this server stores none; send the"
                " whole conversation as input.", code="previous_response_not_found", param="previous_response_id",
            )  # fmt: skip
        for name, instead in (
            ("conversation", "the whole conversation as input"),
            ("prompt", "instructions and input"),
        ):
            if getattr(self, name) is not None:
                raise ApiError(
                    400, f"{name} is not supported: this server stores none; send {instead}.",
                    code="unsupported_parameter", param=name,
                )  # fmt: skip
        if self.background:
            raise ApiError(
                400, "background is true, but this server stores no responses; leave it out.",
                code="unsupported_value", param="background",
            )  # fmt: skip
        if self.top_logprobs and not self.includes_logprobs:
            raise ApiError(400, f"top_logprobs needs include: [{_LOGPROBS!r}].", param="top_logprobs")
        form = None if self.text is None else self.text.format
        if form is not None and form.type == "json_schema":
            for name, value in (("name", form.name), ("schema", form.json_schema)):
                if value is None:
                    param = f"text.format.{name}"
                    raise ApiError(
                        400, f"Missing required field {param!r}.", code="missing_required_parameter", param=param
                    )

    @property
    def includes_logprobs(self) -> bool:
        """Whether the answer's text comes with log probabilities."""
        return _LOGPROBS in (self.include or ())

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """The engine's parameters.

        Raises:
            ApiError: the engine refuses a value.
        """
        logprobs = (self.top_logprobs or 0) if self.includes_logprobs else None
        return self.params(defaults, max_tokens=self.max_output_tokens, logprobs=logprobs)
