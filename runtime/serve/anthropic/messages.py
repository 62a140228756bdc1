"""``/v1/messages``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from ....system.errors import SmeltError
from ...requests.output import RequestOutput
from ...requests.params import SamplingParams
from ..http.errors import ApiError, refused
from ..model.chat_prompt import ChatPrompt
from ..model.choosing import chosen
from ..model.deltas import Deltas
from ..model.running import Running
from ..model.scheduling import LONGEST_STOP, MOST_STOPS, SchedulingFields
from ..model.served_model import ServedModel
from .blocks import ContentBlocks
from .conversation import prompt_of
from .fields import ConversationRequest

_Stops = Annotated[list[Annotated[str, Field(max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)]


class MessagesRequest(ConversationRequest, SchedulingFields):
    """The body.

    Attributes:
        max_tokens: of the answer; 0 only fills the prefix cache. The model's length is a limit besides.
    """

    max_tokens: Annotated[int, Field(ge=0)]
    stop_sequences: _Stops | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None

    def check(self) -> None:
        """Refuse what is not supported, or contradicts itself.

        Raises:
            ApiError: a field does.
        """
        super().check()
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise ApiError(400, "max_tokens must be greater than thinking.budget_tokens.")

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """The engine's parameters.

        Raises:
            ApiError: the engine refuses a value.
        """
        try:
            return SamplingParams(
                max_tokens=max(1, self.max_tokens),
                **chosen(self, defaults),
                stop=tuple(self.stop_sequences or ()),
            )
        except SmeltError as problem:
            raise refused(problem) from None


class Messages:
    """A request's answer, whole or in pieces.

    Args:
        request: the body.
        model: that answers.
        name: of the request.
        prompt: the conversation.

    Raises:
        ApiError: the prompt is too long, or cannot be served.
    """

    def __init__(self, request: MessagesRequest, model: ServedModel, name: str, prompt: ChatPrompt) -> None:
        longest = model.longest - 1
        if len(prompt.tokens) > longest:
            # Clients look for these words, and shorten the conversation.
            raise ApiError(400, f"prompt is too long: {len(prompt.tokens)} tokens > {longest} maximum")
        self._most = request.max_tokens
        self._parser = prompt.parser()
        self._blocks = ContentBlocks(shows_thinking=request.thinking is None or request.thinking.display != "omitted")
        self._head = {"id": name, "type": "message", "role": "assistant", "model": model.name}
        wanted = prompt.params.max_tokens or 1
        self._room = model.longest - len(prompt.tokens)
        params = replace(prompt.params, max_tokens=min(wanted, self._room))
        self.running = Running(model, [prompt.tokens], params, name, request.options)

    async def whole(self) -> dict[str, Any]:
        """The response."""
        (output,) = await self.running.finished()
        if self._most:
            self._blocks.add([*self._parser.add(output.outputs[0].text or ""), *self._parser.end()])
            self._blocks.end()
        return {**self._head, "content": self._blocks.content, **self._stop(output), "usage": self._usage(output)}

    async def pieces(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """The events of a stream, with their names."""
        deltas = Deltas()
        has_begun = False
        async for _, output in self.running.outputs():
            if not has_begun:
                yield "message_start", {"type": "message_start", "message": self._start(output)}
                has_begun = True
            for delta in deltas.of(output):
                events = []
                if self._most:
                    events += self._blocks.add(self._parser.add(delta.text))
                    if delta.finish_reason is not None:
                        events += self._blocks.add(self._parser.end())
                if delta.finish_reason is not None:
                    events += self._blocks.end()
                    events += [
                        {"type": "message_delta", "delta": self._stop(output), "usage": self._usage(output)},
                        {"type": "message_stop"},
                    ]
                for event in events:
                    yield event["type"], event

    def _start(self, output: RequestOutput) -> dict[str, Any]:
        stop = {"stop_reason": None, "stop_sequence": None}
        return {**self._head, "content": [], **stop, "usage": self._usage(output)}

    def _stop(self, output: RequestOutput) -> dict[str, Any]:
        (completion,) = output.outputs
        if completion.finish_reason == "length" or not self._most:
            reason = "max_tokens" if self._most <= self._room else "model_context_window_exceeded"
        elif isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        else:
            reason = "tool_use" if self._blocks.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, output: RequestOutput) -> dict[str, int | bool]:
        return {
            # Not those that were cached.
            "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": output.num_cached_tokens,
            "output_tokens": len(output.outputs[0].token_ids) if self._most else 0,
            **({"upper_bits": True} if output.upper_bits else {}),
        }


async def answered_message(request: MessagesRequest, model: ServedModel, name: str) -> Messages:
    """A request whose constraint is compiled, and that runs.

    Raises:
        ApiError: it cannot be served.
    """
    return Messages(request, model, name, await prompt_of(request, model, request.sampling(model.defaults)))
