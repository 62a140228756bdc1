"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ...requests.output import Completion, RequestOutput
from ..answer.parts import CallArguments, CallStart, Content, Parser, Part, Reasoning, WholeAnswer
from ..http.errors import ApiError
from ..model.chat_prompt import (
    ChatOptions,
    ChatPrompt,
    NamedTool,
    Tool,
    ToolChoice,
    allowed_tools,
    chat_prompt,
    effort_variables,
)
from ..model.deltas import Delta, Deltas
from ..model.running import Running
from ..model.served_model import ServedModel
from .fields import MOST_MESSAGES, SamplingFields, last_tokens
from .messages import ChatMessage, turns_of
from .token_text import TokenText
from .usage import backend, usage

_MOST_LOGPROBS = 20
_MOST_DOCUMENTS = 1024


class AllowedList(BaseModel):
    """The tools that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedChoice(BaseModel):
    """``tool_choice`` among some of the tools; the others stay in the prompt at OpenAI, and are left out here."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


class ChatRequest(SamplingFields):
    """The body.

    Attributes:
        reasoning_effort: given to the template.
        documents: given to the template, for models that answer from texts.
        chat_template_kwargs: further variables of the template.
        add_generation_prompt, continue_final_message, echo: as vLLM's.
    """

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | AllowedChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None

    documents: Annotated[list[dict[str, str]], Field(max_length=_MOST_DOCUMENTS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ApiError: two fields do.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ApiError(
                400, "continue_final_message needs an assistant's message at the end.", param="continue_final_message"
            )

    @property
    def most_tokens(self) -> int | None:
        """Of the answer; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatCompletions:
    """A request's answer, whole or in pieces.

    Args:
        request: the body.
        model: that answers.
        name: of the request.
        prompt: the conversation.
    """

    def __init__(self, request: ChatRequest, model: ServedModel, name: str, prompt: ChatPrompt) -> None:
        self._request = request
        self._prompt = prompt
        self._head = {"id": name, "created": int(time.time()), "model": model.name}
        self._texts = TokenText(model)
        self.running = Running(model, [prompt.tokens], prompt.params, name, request.options)

    async def whole(self) -> dict[str, Any]:
        """The response."""
        (output,) = await self.running.finished()
        choices = []
        for completion in output.outputs:
            answer = WholeAnswer.of(self._prompt.parser(), completion.text or "")
            choice = self._choice(completion, answer)
            if self._request.logprobs and completion.logprobs is not None:
                choice["logprobs"] = self._texts.chat(
                    completion.token_ids, completion.logprobs, self._request.top_logprobs or 0
                )
            choices.append(choice)
        found = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage([output])} | backend(
            output
        )
        if self._request.prompt_logprobs is not None:
            found["prompt_logprobs"] = self._texts.vllm(output.prompt_logprobs or [], self._request.prompt_logprobs)
        if self._request.return_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        return found

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        head = {**self._head, "object": "chat.completion.chunk"}
        deltas = Deltas()
        count = self._request.n or 1
        parsers = [self._prompt.parser() for _ in range(count)]
        called: set[int] = set()
        begun = False
        async for _, output in self.running.outputs():
            # Not before, for who measures the time to the first token takes what comes first for it.
            if not begun:
                for chunk in self._beginning(head, count, output):
                    yield chunk
                begun = True
            for delta in deltas.of(output):
                for choice in self._grown(delta, parsers[delta.index], called):
                    chunk: dict[str, Any] = {**head, "choices": [choice]} | backend(output)
                    options = self._request.stream_options
                    if options is not None and options.continuous_usage_stats:
                        chunk["usage"] = usage(self.running.known)
                    yield chunk
        if self._request.includes_usage:
            yield {**head, "choices": [], "usage": usage(self.running.known)}

    def _beginning(self, head: dict[str, Any], count: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The first chunks, which say who speaks."""
        first: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if self._request.return_token_ids else {}
        for index in range(count):
            yield {**head, "choices": [self._piece(index, {"role": "assistant", "content": ""})]} | first
        if self._request.echo and self._request.continue_final_message:
            for index in range(count):
                yield {**head, "choices": [self._piece(index, {"content": self._prompt.continued})]}

    def _grown(self, delta: Delta, parser: Parser, called: set[int]) -> list[dict[str, Any]]:
        """A delta's choices: its parts, of which the first has the log probabilities, and the end."""
        parts = parser.add(delta.text)
        if delta.finish_reason is not None:
            parts = [*parts, *parser.end()]
        if any(isinstance(part, CallStart) for part in parts):
            called.add(delta.index)
        choices = [self._piece(delta.index, change) for part in parts if (change := _change(part))]
        if self._request.logprobs and delta.tokens:
            if not choices:
                choices = [self._piece(delta.index, {})]
            choices[0]["logprobs"] = self._texts.chat(delta.tokens, delta.logprobs, self._request.top_logprobs or 0)
        if delta.finish_reason is not None:
            end = self._piece(delta.index, {})
            end["finish_reason"] = self._finish(delta.finish_reason, called=delta.index in called)
            if isinstance(delta.stop_reason, str) or delta.stop_reason in (self._request.stop_token_ids or ()):
                end["stop_reason"] = delta.stop_reason
            choices.append(end)
        if self._request.return_token_ids and delta.tokens:
            choices = choices or [self._piece(delta.index, {})]
            choices[0]["token_ids"] = delta.tokens
        return choices

    def _piece(self, index: int, change: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": change, "logprobs": None, "finish_reason": None}

    def _choice(self, completion: Completion, answer: WholeAnswer) -> dict[str, Any]:
        content = answer.content
        if self._request.echo and self._request.continue_final_message:
            content = self._prompt.continued + content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = message["reasoning"] = answer.reasoning
        if answer.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in answer.calls
            ]
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish(completion.finish_reason, called=bool(answer.calls)),
        }
        if isinstance(completion.stop_reason, str) or completion.stop_reason in (self._request.stop_token_ids or ()):
            choice["stop_reason"] = completion.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _finish(self, reason: str | None, *, called: bool) -> str | None:
        # A call that was cut off by max_tokens has ended by its length.
        return "tool_calls" if called and reason == "stop" and not self._prompt.is_named else reason


def _change(part: Part) -> dict[str, Any]:
    match part:
        case Content(text):
            return {"content": text} if text else {}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text} if text else {}
        case CallStart(index, id, name):
            call = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]} if text else {}


async def answered(request: ChatRequest, model: ServedModel, name: str) -> ChatCompletions:
    """A request whose constraint is compiled, and that runs.

    Raises:
        ApiError: it cannot be served.
    """
    request.check()
    wants = (request.top_logprobs or 0) if request.logprobs else None
    params = request.sampling(
        defaults=model.defaults,
        max_tokens=request.most_tokens,
        logprobs=wants,
        prompt_logprobs=request.prompt_logprobs,
    )
    template = {**effort_variables(request.reasoning_effort), **(request.chat_template_kwargs or {})}
    if request.documents is not None:
        template["documents"] = request.documents
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, AllowedChoice):
        tools = allowed_tools({tool.function.name for tool in choice.allowed_tools.tools}, tools)
        choice = choice.allowed_tools.mode
    options = ChatOptions(
        tools=tools,
        choice=choice,
        is_parallel=request.parallel_tool_calls,
        form=request.response_format,
        structured=request.structured_outputs,
        template=template,
        answer=request.add_generation_prompt,
        continue_last=request.continue_final_message,
    )
    prompt = await chat_prompt(model, turns_of(request.messages), params, options)
    room = model.longest - (request.most_tokens or 1)
    prompt = replace(prompt, tokens=last_tokens(prompt.tokens, request.truncate_prompt_tokens, room))
    request.check_prompt_logprobs([prompt.tokens], request.prompt_logprobs)
    return ChatCompletions(request, model, name, prompt)
