"""What requests of the Messages API consist of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from ..http.errors import ApiError

_LEAST_BUDGET = 1024


class _Form(BaseModel):
    """Unknown fields are errors, as at Anthropic."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, protected_namespaces=())


class _Block(BaseModel):
    """Blocks and tools carry marks for Anthropic's own services, such as ``cache_control``, which are not needed here."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_Block):
    """The model's reasoning in an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(_Block):
    """Reasoning that only Anthropic can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Block):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OtherBlock(_Block):
    """A block that is refused: an image, a document, or a call of Anthropic's own tools."""

    type: str


def _kind(value: Any, known: tuple[str, ...]) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in known else "other"


def _text_kind(value: Any) -> str:
    return _kind(value, ("text",))


def _block_kind(value: Any) -> str:
    return _kind(value, ("text", "thinking", "redacted_thinking", "tool_use", "tool_result"))


def _tool_kind(value: Any) -> str:
    named = isinstance(value, dict) and value.get("type") is not None
    return _kind(value, ("custom",)) if named else "custom"


def _as_blocks(content: Any) -> Any:
    """A string is short for one block of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextContent = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")],
            Discriminator(_text_kind),
        ]
    ],
    BeforeValidator(_as_blocks),
]


class ToolResultBlock(_Block):
    """What a called tool returned, or why it failed."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextContent | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock
Content = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("text")]
            | Annotated[ThinkingBlock, Tag("thinking")]
            | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
            | Annotated[ToolUseBlock, Tag("tool_use")]
            | Annotated[ToolResultBlock, Tag("tool_result")]
            | Annotated[OtherBlock, Tag("other")],
            Discriminator(_block_kind),
        ]
    ],
    BeforeValidator(_as_blocks),
]


class AnthropicMessage(_Block):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content


class CustomTool(_Block):
    """A tool of the client's."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class VendorTool(_Block):
    """A tool of Anthropic's own; it is refused."""

    type: str


class ToolChoice(_Form):
    """Which tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Form):
    """Whether the model reasons before its answer, if its template leaves that open.

    Attributes:
        budget_tokens: checked, and not used.
        display: whether the response shows it.
    """

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=_LEAST_BUDGET)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(_Form):
    """What the answer's text must look like."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Form):
    """``output_config``.

    Attributes:
        effort: given to the template as ``reasoning_effort``.
        format: JSON of a schema.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ConversationRequest(_Form):
    """What the prompt consists of.

    Attributes:
        cache_control, container, context_management, diagnostics, inference_geo, metadata, service_tier, speed: accepted,
            and not used.
        mcp_servers: refused unless it is empty.
    """

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=8192)]
    system: TextContent | None = None
    tools: (
        list[
            Annotated[
                Annotated[CustomTool, Tag("custom")] | Annotated[VendorTool, Tag("other")],
                Discriminator(_tool_kind),
            ]
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: list[Any] | None = None

    cache_control: Any = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None

    def check(self) -> None:
        """Refuse what is not supported, or contradicts itself.

        Raises:
            ApiError: a field does.
        """
        if self.mcp_servers:
            raise ApiError(400, "mcp_servers is not supported; call the servers' tools yourself, and leave it out.")
        if self.tool_choice is not None and (self.tool_choice.type == "tool") != (self.tool_choice.name is not None):
            raise ApiError(400, "tool_choice: name belongs to the type 'tool', which needs it.")
        if self.thinking is not None and (self.thinking.type == "enabled") != (self.thinking.budget_tokens is not None):
            raise ApiError(400, "thinking: budget_tokens belongs to the type 'enabled', which needs it.")
