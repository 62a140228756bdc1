"""A conversation of the Messages API, and how a template needs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...requests.params import SamplingParams
from ..constraints.formats import JsonSchema, ResponseFormat
from ..http.errors import ApiError
from ..model.chat_prompt import (
    ChatOptions,
    ChatPrompt,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    chat_prompt,
)
from ..model.served_model import ServedModel
from .fields import (
    Block,
    ConversationRequest,
    OtherBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    VendorTool,
)

# Claude Code begins its system prompt with a line that differs in every request, which no cache would ever find.
_BILLING = "x-anthropic-billing-header"


async def prompt_of(request: ConversationRequest, model: ServedModel, params: SamplingParams) -> ChatPrompt:
    """The prompt that a request asks to answer or to continue.

    Raises:
        ApiError: something in it is not supported, or the model's template refuses it.
    """
    request.check()
    turns = turns_of(request)
    return await chat_prompt(model, turns, params, options_of(request, turns))


def turns_of(request: ConversationRequest) -> list[dict[str, Any]]:
    """The messages as chat templates expect them. Those of one role in a row are one turn.

    Raises:
        ApiError: a block is not supported, or stands where it does not belong.
    """
    system = [text for text in _texts(request.system or [], "system") if text and not text.startswith(_BILLING)]
    merged: list[tuple[str, list[tuple[str, Block]]]] = []
    for number, message in enumerate(request.messages):
        where = f"messages.{number}.content"
        if message.role == "system":
            # Many templates take a system prompt only at the beginning.
            system += _texts(message.content, where)
            continue
        if not merged or merged[-1][0] != message.role:
            merged.append((message.role, []))
        merged[-1][1].extend((f"{where}.{i}", block) for i, block in enumerate(message.content))
    turns: list[dict[str, Any]] = [{"role": "system", "content": "\n".join(system)}] if system else []
    called: dict[str, str] = {}
    for role, blocks in merged:
        if role == "user":
            turns += _user(blocks, called)
        else:
            turns.append(_assistant(blocks, called))
    # There is nothing to continue in an empty answer.
    if turns and turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    return turns


def _user(blocks: Iterable[tuple[str, Block]], called: dict[str, str]) -> list[dict[str, Any]]:
    """Results of tools come before what the user says in the same turn."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for where, block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                content = "\n".join(_texts(block.content or [], f"{where}.content"))
                if block.is_error:  # templates have no other place for it
                    content = f"Error: {content}" if content else "Error"
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                if block.tool_use_id in called:
                    result["name"] = called[block.tool_use_id]
                results.append(result)
            case _:
                raise _refused(block, where, "user")
    if results and not any(texts):
        return results
    return [*results, {"role": "user", "content": "\n".join(texts)}]


def _assistant(blocks: Iterable[tuple[str, Block]], called: dict[str, str]) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                called[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _refused(block, where, "assistant")
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(reasoning):
        turn["reasoning_content"] = "\n".join(reasoning)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _texts(blocks: Sequence[Block], where: str) -> list[str]:
    texts = []
    for number, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise _refused(block, f"{where}.{number}")
        texts.append(block.text)
    return texts


def _refused(block: Block, where: str, role: str | None = None) -> ApiError:
    if isinstance(block, OtherBlock) or role is None:
        return ApiError(400, f"{where} is a block of type {block.type!r}; this server takes text only.")
    return ApiError(
        400, f"{where} is a block of type {block.type!r}, which does not belong in a message of role {role!r}."
    )


def options_of(request: ConversationRequest, turns: Sequence[dict[str, Any]]) -> ChatOptions:
    """How it is answered.

    Args:
        request: the body.
        turns: its messages, the last of which is continued if it is the assistant's.

    Raises:
        ApiError: a tool is Anthropic's own, or a called one has no result yet.
    """
    continue_last = bool(turns) and turns[-1]["role"] == "assistant"
    if continue_last and "tool_calls" in turns[-1]:
        raise ApiError(400, "messages: the last one has tool_use blocks; send their tool_result blocks after it.")
    choice = request.tool_choice
    config = request.output_config
    asked = None if config is None else config.format
    return ChatOptions(
        tools=_tools(request),
        choice=_choice(request),
        is_parallel=choice is None or not choice.disable_parallel_tool_use,
        form=None
        if asked is None
        else ResponseFormat(type="json_schema", json_schema=JsonSchema(name="answer", schema=asked.json_schema)),
        template=_template(request),
        continue_last=continue_last,
    )


def _tools(request: ConversationRequest) -> list[Tool]:
    tools = []
    for number, tool in enumerate(request.tools or []):
        if isinstance(tool, VendorTool):
            raise ApiError(
                400, f"tools.{number} has the type {tool.type!r}; this server takes tools with an input_schema of their own only."
            )  # fmt: skip
        function = Function(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        tools.append(Tool(function=function))
    return tools


def _choice(request: ConversationRequest) -> ToolChoice | None:
    if request.tool_choice is None:
        return None
    match request.tool_choice.type:
        case "auto":
            return "auto"
        case "any":
            return "required"
        case "none":
            return "none"
        case "tool":
            return NamedTool(function=NamedFunction(name=request.tool_choice.name or ""))


def _template(request: ConversationRequest) -> dict[str, Any]:
    """The variables that templates know: most have the first one, some the second."""
    found: dict[str, Any] = {}
    if request.thinking is not None and request.thinking.type != "between_tools":
        found["enable_thinking"] = found["thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        found["reasoning_effort"] = request.output_config.effort
    return found
