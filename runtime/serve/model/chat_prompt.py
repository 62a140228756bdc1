"""A conversation as the engine needs it: the prompt's tokens, the constraint, and how its answer is read."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel

from ...requests.params import SamplingParams
from ..answer.parts import FirstCall, Parser
from ..constraints.formats import ResponseFormat, StructuralTag, StructuredOutputs, grammar_of
from ..constraints.grammar import calls_or_json, optional_calls, tool_calls
from ..http.errors import ApiError, beams_without_grammar
from .served_model import ServedModel

_MOST_TOOLS, _LONGEST_NAME = 1024, 256


class Function(BaseModel):
    """A tool's name and what it takes. Clients add fields of their own, which are ignored, here and in tools and messages."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool, in OpenAI's form."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(BaseModel):
    """Which."""

    name: str


class NamedTool(BaseModel):
    """A tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt.

    Attributes:
        tokens: of the conversation.
        params: with the constraint.
        parser: makes a parser for one answer.
        is_named: whether one tool must be called; such an answer ends with ``stop``.
        continued: the text of the last message, if it is continued.
    """

    tokens: list[int]
    params: SamplingParams
    parser: Callable[[], Parser]
    is_named: bool = False
    continued: str = ""


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is answered.

    Attributes:
        tools: that may be called.
        choice: which must be; None for what is usual: any, if there are any.
        is_parallel: whether several may be; otherwise all calls but the first are left out.
        form, structured: what the answer must look like.
        template: further variables of the template.
        answer: whether the template begins an answer.
        continue_last: whether the last message is continued.
    """

    tools: Sequence[Tool] = ()
    choice: ToolChoice | None = None
    is_parallel: bool = True
    form: ResponseFormat | StructuralTag | None = None
    structured: StructuredOutputs | None = None
    template: dict[str, Any] | None = None
    answer: bool = True
    continue_last: bool = False

    @property
    def offered(self) -> Sequence[Tool]:
        """The tools that the model is shown."""
        return () if self.choice == "none" else self.tools


def allowed_tools(names: Collection[str], tools: Sequence[Tool]) -> list[Tool]:
    """Those of a request's tools that its ``allowed_tools`` name.

    Raises:
        ApiError: one is not among them.
    """
    unknown = set(names) - {tool.function.name for tool in tools}
    if unknown:
        raise ApiError(400, f"tool_choice allows {min(unknown)!r}, which is not among the tools.", param="tool_choice")
    return [tool for tool in tools if tool.function.name in names]


def effort_variables(effort: str | None) -> dict[str, Any]:
    """What templates know of OpenAI's ``reasoning_effort``: some its name, most whether to think at all."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


async def chat_prompt(
    model: ServedModel, turns: Sequence[dict[str, Any]], params: SamplingParams, options: ChatOptions
) -> ChatPrompt:
    """Write a conversation with the model's template, and compile its constraint.

    Raises:
        ApiError: the template refuses it, a tool or schema is wrong, or the model has no format for tools.
    """
    tools = options.offered
    _check_tools(tools, options.choice)
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    written = {"tools": shown, "template": options.template}
    tokens = model.conversation(turns, continue_last=options.continue_last, answer=options.answer, **written)
    form = model.format

    def begun() -> list[int]:
        """What the template has written of the answer."""
        before = turns[:-1] if options.continue_last else turns
        try:
            known = model.conversation(before, answer=False, **written) if before else []
        except ApiError:  # some templates refuse a conversation without its last message
            known = []
        same = next(
            (i for i, (ours, theirs) in enumerate(zip(tokens, known, strict=False)) if ours != theirs), len(known)
        )
        return tokens[same:]

    is_open = form.leaves_reasoning_open(tokens, begun)
    if tools and form.calls is None:
        raise ApiError(
            400, f"The chat template of {model.name!r} has no format for tool calls that is known here; leave tools out, or"
            " start the server with --tool-call-parser.", param="tools",
        )  # fmt: skip
    grammar = grammar_of(options.form, options.structured)
    may_reason = False  # by the constraint
    must = options.choice == "required" or isinstance(options.choice, NamedTool)
    if must and form.calls is not None:  # a format is for answers without a call
        named = options.choice.function.name if isinstance(options.choice, NamedTool) else None
        called = {t.function.name: t.function.parameters for t in tools if named in (None, t.function.name)}
        # A tool that is named is called once, as with vLLM.
        grammar = tool_calls(form.calls, called, several=options.is_parallel and named is None)
    elif form.calls is not None and grammar is not None and grammar.kind == "json" and tools:
        # Otherwise it could answer, but never call one; an expression or a grammar may have calls of its own.
        schemas = {t.function.name: t.function.parameters for t in tools}
        grammar = calls_or_json(form.calls, schemas, json.loads(grammar.text), several=options.is_parallel)
    elif form.calls is not None and grammar is None and any(tool.function.strict for tool in tools):
        anything = {"type": "object"}
        schemas = {t.function.name: t.function.parameters if t.function.strict else anything for t in tools}
        tags = None if form.tags is None else (form.tags.opening, form.tags.closing)
        grammar = optional_calls(form.calls, schemas, several=options.is_parallel, thinking=tags)
        may_reason = True
    if grammar is not None:
        if params.is_beam_search:
            raise beams_without_grammar()
        end = form.reasoning_end if is_open else None
        constraint = await asyncio.to_thread(model.compile, grammar, end)
        params = replace(params, constraint=constraint)
        # Nobody sees the end of several tokens coming: the constraint holds from the beginning on.
        is_open = is_open and (end is not None or may_reason)
    # Tags may be special tokens.
    params = replace(params, skip_special_tokens=params.skip_special_tokens and not tools and form.tags is None)

    def parser() -> Parser:
        found = form.reader(calls=bool(tools), is_open=is_open)
        return found if options.is_parallel else FirstCall(found)

    continued = str(turns[-1]["content"]) if options.continue_last else ""
    return ChatPrompt(tokens, params, parser, isinstance(options.choice, NamedTool), continued)


def _check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    names = [tool.function.name for tool in tools]
    if len(names) > _MOST_TOOLS or max(map(len, names), default=0) > _LONGEST_NAME:
        raise ApiError(
            400, f"There are {len(names)} tools; give at most {_MOST_TOOLS}, with names of at most {_LONGEST_NAME} characters.",
            param="tools",
        )  # fmt: skip
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ApiError(400, f"Two tools are named {twice!r}.", param="tools")
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice is required, but there are no tools.", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ApiError(
            400, f"tool_choice names {choice.function.name!r}, which is not among the tools.", param="tool_choice"
        )
