"""Answers of ``/v1/responses``."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from ...http.errors import ApiError
from ...http.sse import StreamForm, event
from ...model.chat_prompt import ChatPrompt, chat_prompt
from ...model.choosing import chosen
from ...model.deltas import Delta, Deltas
from ...model.running import Running
from ...model.served_model import ServedModel
from ..token_text import TokenText
from .conversation import options_of, turns_of
from .events import Event, OutputItems
from .fields import ResponsesRequest
from .items import Status
from .truncation import newest_turns

# A stream ends with the response; it has no mark of its end.
RESPONSES = StreamForm(lambda problem: event(problem.openai()))
# What other parts of the server call this API's fields.
_NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format"}


class Responses:
    """A request's answer, whole or in events.

    Args:
        request: the body.
        model: that answers.
        name: of the response.
        prompt: the conversation.
    """

    def __init__(self, request: ResponsesRequest, model: ServedModel, name: str, prompt: ChatPrompt) -> None:
        self._request = request
        self._model = model
        self._name = name
        self._created = int(time.time())
        self._parser = prompt.parser()
        self._texts = TokenText(model)
        self._output = OutputItems()
        self._finish: str | None = None
        self.running = Running(model, [prompt.tokens], prompt.params, name, request.options)

    async def whole(self) -> dict[str, Any]:
        """The response."""
        async for _ in self._grown():
            pass
        return self._ended()

    async def pieces(self) -> AsyncIterator[tuple[str, Event]]:
        """The events of a stream, each with its type."""
        numbers = itertools.count()
        async for each in self._events():
            yield each["type"], {**each, "sequence_number": next(numbers)}

    async def _events(self) -> AsyncIterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response("in_progress")}
        try:
            async for each in self._grown():
                yield each
            ended = self._ended()
        except ApiError as problem:
            ended = self._response("failed", error={"code": "server_error", "message": problem.message})
        yield {"type": f"response.{ended['status']}", "response": ended}

    async def _grown(self) -> AsyncIterator[Event]:
        """The events of the items.

        Raises:
            ApiError: the engine failed.
        """
        deltas = Deltas()
        async for _, output in self.running.outputs():
            for delta in deltas.of(output):
                for each in self._added(delta):
                    yield each
        for each in self._output.end(self._last):
            yield each

    def _added(self, delta: Delta) -> Iterator[Event]:
        parts = self._parser.add(delta.text)
        if delta.finish_reason is not None:
            parts = [*parts, *self._parser.end()]
            self._finish = delta.finish_reason
        logprobs = text_logprobs(delta, self._texts, self._request.top_logprobs or 0) if delta.logprobs else []
        return self._output.grow(parts, logprobs)

    @property
    def _last(self) -> Status:
        return "incomplete" if self._finish == "length" else "completed"

    def _ended(self) -> dict[str, Any]:
        if self._finish not in ("stop", "length"):
            raise ApiError(500, "The request was aborted.", "server_error")
        return self._response(self._last)

    def _response(self, status: str, *, error: dict[str, str] | None = None) -> dict[str, Any]:
        request = self._request
        form = None if request.text is None else request.text.format
        choice = request.tool_choice
        last: Status = "incomplete" if self._output.is_open else self._last
        used = chosen(request, self._model.defaults)
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "model": self._model.name,
            "output": self._output.forms(last),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": used["temperature"],
            "text": {
                "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True),
                "verbosity": (request.text and request.text.verbosity) or "medium",
            },
            "tool_choice": (choice or "auto") if isinstance(choice, str | None) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": used["top_p"] if request.top_p is None else request.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": request.user,
            "metadata": request.metadata or {},
        }

    def _usage(self) -> dict[str, Any] | None:
        output = self.running.latest[0]
        if output is None:
            return None
        prompt, answer = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
        # Outputs do not say which tokens the reasoning came from, so its text is counted.
        thought = len(self._model.encode(self._output.reasoning, add_special_tokens=False))
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": min(thought, answer)},
            "total_tokens": prompt + answer,
            **({"upper_bits": True} if output.upper_bits else {}),
        }


def text_logprobs(delta: Delta, texts: TokenText, count: int) -> list[dict[str, Any]]:
    """The log probabilities of a delta's tokens, with so many of the most likely ones."""
    # The token that ended the answer has no text in it.
    end = len(delta.tokens) - isinstance(delta.stop_reason, int)
    return texts.chat(delta.tokens[:end], delta.logprobs[:end], count)["content"]


async def responded(request: ResponsesRequest, model: ServedModel, name: str) -> Responses:
    """A request whose constraint is compiled, and that runs.

    Raises:
        ApiError: it cannot be served.
    """
    request.check()
    options, turns = options_of(request), turns_of(request)
    try:
        if request.truncation == "auto":
            turns = newest_turns(turns, model, options, request.max_output_tokens)
        prompt = await chat_prompt(model, turns, request.sampling(model.defaults), options)
        return Responses(request, model, name, prompt)
    except ApiError as problem:
        raise _renamed(problem) from None


def _renamed(problem: ApiError) -> ApiError:
    """A problem in the words of this API."""
    message = problem.message
    for name, here in _NAMES.items():
        message = message.replace(name, here)
    is_input = problem.param == "messages" or problem.code == "context_length_exceeded"
    return replace(problem, message=message, param="input" if is_input else problem.param)
