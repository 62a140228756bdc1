"""A request's input as the turns of a conversation, and how that is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...constraints.formats import JsonSchema, ResponseFormat
from ...http.errors import ApiError
from ...model.chat_prompt import ChatOptions, Function, NamedTool, Tool, ToolChoice, allowed_tools, effort_variables
from ...model.chat_prompt import NamedFunction as NamedToolFunction
from ...model.turns import called
from .fields import (
    AllowedTools,
    BuiltInTool,
    CallItem,
    CallOutputItem,
    FunctionChoice,
    FunctionTool,
    InputPart,
    Item,
    MessageItem,
    OtherChoice,
    OtherItem,
    ReasoningItem,
    ResponsesRequest,
)

_TEXTS = ("input_text", "output_text", "reasoning_text", "text")


def turns_of(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The instructions and the input as chat templates expect them.

    Raises:
        ApiError: an item or a part of one is not supported, or does not fit the others.
    """
    turns: list[dict[str, Any]] = []
    if request.instructions is not None:
        turns.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        turns.append({"role": "user", "content": request.input})
        return turns
    names: dict[str, str] = {}
    for number, item in enumerate(request.input):
        _add(item, f"input[{number}]", turns, names)
    return turns


def _add(item: Item, where: str, turns: list[dict[str, Any]], names: dict[str, str]) -> None:
    last = turns[-1] if turns else None
    match item:
        case MessageItem(role="assistant"):
            text = _text(item.content, f"{where}.content")
            if last is not None and _has_only_reasoning(last):
                last["content"] = text
            else:
                turns.append({"role": "assistant", "content": text})
        case MessageItem():
            # Templates know no developer.
            role = "user" if item.role == "user" else "system"
            turns.append({"role": role, "content": _text(item.content, f"{where}.content")})
        case CallItem():
            names[item.call_id] = item.name
            if last is None or last["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            turns[-1].setdefault("tool_calls", []).append(called(item.call_id, item.name, item.arguments))
        case CallOutputItem():
            if item.call_id not in names:
                raise ApiError(
                    400, f"No tool call found for function call output with call_id {item.call_id}; put its function_call"
                    " before it.", param=f"{where}.call_id",
                )  # fmt: skip
            text = _text(item.output, f"{where}.output")
            turns.append({"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id], "content": text})
        case ReasoningItem():
            # Other servers' is encrypted, and of no use here.
            text = _text(item.content or [], f"{where}.content")
            if text:
                turns.append({"role": "assistant", "content": "", "reasoning_content": text})
        case OtherItem(type=None) | OtherItem(type="item_reference"):
            raise ApiError(
                400, f"{where} refers to a stored item, but this server stores none; send the item itself.",
                code="unsupported_value", param=where,
            )  # fmt: skip
        case OtherItem():
            raise ApiError(
                400, f"{where} has type {item.type!r}; this server takes message, function_call, function_call_output and"
                " reasoning.", code="unsupported_value", param=where,
            )  # fmt: skip


def _has_only_reasoning(turn: dict[str, Any]) -> bool:
    return "reasoning_content" in turn and not turn["content"] and "tool_calls" not in turn


def _text(content: str | Sequence[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type not in _TEXTS:
            raise ApiError(
                400, f"{where}[{number}] has type {part.type!r}; this server takes text only.",
                code="unsupported_value", param=f"{where}[{number}]",
            )  # fmt: skip
        elif part.text is None:
            raise ApiError(
                400, f"{where}[{number}] has no text.",
                code="missing_required_parameter", param=f"{where}[{number}].text",
            )  # fmt: skip
        else:
            texts.append(part.text)
    return "\n".join(texts)


def options_of(request: ResponsesRequest) -> ChatOptions:
    """How the conversation is answered.

    Raises:
        ApiError: a tool, or the choice among them, is not supported.
    """
    tools = _tools(request)
    choice: ToolChoice | None = None
    match request.tool_choice:
        case FunctionChoice(name=name):
            choice = NamedTool(function=NamedToolFunction(name=name))
        case AllowedTools() as allowed:
            choice = allowed.mode
            tools = allowed_tools({tool.name for tool in allowed.tools}, tools)
        case OtherChoice(type=kind):
            raise ApiError(
                400, f"tool_choice has type {kind!r}; this server takes function and allowed_tools.",
                code="unsupported_value", param="tool_choice",
            )  # fmt: skip
        case given:
            choice = given
    effort = None if request.reasoning is None else request.reasoning.effort
    template = {**effort_variables(effort), **(request.chat_template_kwargs or {})}
    return ChatOptions(
        tools=tools,
        choice=choice,
        is_parallel=request.parallel_tool_calls is not False,
        form=_form(request),
        structured=request.structured_outputs,
        template=template,
    )


def _tools(request: ResponsesRequest) -> list[Tool]:
    tools = []
    for number, tool in enumerate(request.tools or ()):
        if isinstance(tool, BuiltInTool):
            raise ApiError(
                400, f"tools[{number}] has type {tool.type!r}; this server takes function only.",
                code="unsupported_value", param=f"tools[{number}]",
            )  # fmt: skip
        tools.append(Tool(function=_function(tool)))
    return tools


def _function(tool: FunctionTool) -> Function:
    return Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def _form(request: ResponsesRequest) -> ResponseFormat | None:
    form = None if request.text is None else request.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    schema = JsonSchema(name=form.name or "", schema=form.json_schema, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=schema)
