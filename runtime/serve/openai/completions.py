"""``/v1/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from ...requests.constraint import Constraint
from ...requests.output import RequestOutput
from ...requests.sequence import TokenLogprobs
from ..constraints.formats import grammar_of
from ..http.errors import ApiError
from ..model.deltas import Delta, Deltas
from ..model.running import Running
from ..model.served_model import ServedModel
from .fields import MOST_SEQUENCES, SamplingFields, TextsOrTokens, last_tokens
from .token_text import TextPlaces, TokenText
from .usage import backend, usage

_MAX_TOKENS = 16
_MOST_LOGPROBS = 20


class CompletionRequest(SamplingFields):
    """The body.

    Attributes:
        suffix, best_of: refused unless they change nothing.
    """

    model: str | None = None
    prompt: TextsOrTokens
    max_tokens: Annotated[int, Field(ge=0)] | None = _MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool = True

    def prompts(self, model: ServedModel) -> list[list[int]]:
        """Each prompt's tokens.

        Raises:
            ApiError: there is none, or there are too many.
        """
        given = self.prompt
        if isinstance(given, str):
            given = [given]
        elif given and isinstance(given[0], int):
            given = [given]  # type: ignore[list-item]
        if not given or len(given) * (self.n or 1) > MOST_SEQUENCES:
            raise ApiError(
                400, f"There are {len(given)} prompts with n={self.n or 1}; give from 1 to {MOST_SEQUENCES} of both together.",
                param="prompt",
            )  # fmt: skip
        found = [
            model.encode(each, add_special_tokens=self.add_special_tokens) if isinstance(each, str) else list(each)  # type: ignore[arg-type]
            for each in given
        ]
        room = model.longest - (self.max_tokens or 1)
        return [last_tokens(each, self.truncate_prompt_tokens, room) for each in found]

    def check(self) -> None:
        """Refuse what is not supported.

        Raises:
            ApiError: a field asks for it.
        """
        if self.suffix:
            raise ApiError(400, "suffix is not supported; leave it out.", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of is not supported; leave it out, or use n.", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0; it must be at least 1, unless echo is set.", param="max_tokens")


class Completions:
    """A request's answer, whole or in pieces.

    Args:
        request: the body.
        model: that answers.
        name: of the request.
        constraint: of the text that follows each prompt.
    """

    def __init__(
        self, request: CompletionRequest, model: ServedModel, name: str, constraint: Constraint | None = None
    ) -> None:
        self._request = request
        self._model = model
        self._head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model.name}
        wants = request.logprobs
        prompt_wants = wants if request.echo and wants is not None else request.prompt_logprobs
        params = request.sampling(
            defaults=model.defaults,
            max_tokens=max(1, request.max_tokens) if request.max_tokens is not None else None,
            logprobs=wants,
            prompt_logprobs=prompt_wants,
            constraint=constraint,
        )
        self._texts = TokenText(model)
        prompts = request.prompts(model)
        request.check_prompt_logprobs(prompts, prompt_wants)
        self.running = Running(model, prompts, params, name, request.options)

    async def whole(self) -> dict[str, Any]:
        """The response."""
        outputs = await self.running.finished()
        choices = []
        for number, output in enumerate(outputs):
            for delta in Deltas().of(output):
                choice = self._choice(number, output, delta, self._places())
                if self._request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = self._texts.vllm(
                        output.prompt_logprobs or [], self._request.prompt_logprobs
                    )
                choices.append(choice)
        found = {**self._head, "choices": choices, "usage": self._usage()}
        for output in outputs:
            found |= backend(output)
        return found

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        deltas = [Deltas() for _ in self.running.latest]
        places: dict[tuple[int, int], TextPlaces] = {}
        options = self._request.stream_options
        async for number, output in self.running.outputs():
            for delta in deltas[number].of(output):
                key = number, delta.index
                begins = key not in places
                choice = self._choice(number, output, delta, places.setdefault(key, self._places()), begins=begins)
                chunk: dict[str, Any] = {**self._head, "choices": [choice]} | backend(output)
                if options is not None and options.continuous_usage_stats:
                    chunk["usage"] = self._usage()
                yield chunk
        if self._request.includes_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, object]:
        known = self.running.known
        found = usage(known)
        return {**found, "completion_tokens": 0, "total_tokens": found["prompt_tokens"]} if self._only_echo else found

    @property
    def _only_echo(self) -> bool:
        return self._request.max_tokens == 0

    def _places(self) -> TextPlaces:
        return TextPlaces(self._texts, skip_special_tokens=self._request.skip_special_tokens)

    def _choice(
        self, number: int, output: RequestOutput, delta: Delta, places: TextPlaces, *, begins: bool = True
    ) -> dict[str, Any]:
        echoes = begins and self._request.echo
        tokens, logprobs, text = delta.tokens, delta.logprobs, delta.text
        first: Sequence[TokenLogprobs | None] = logprobs
        if self._only_echo:
            tokens, first, text = [], [], ""
        prompt, prompt_text = list[int](), ""
        if echoes:
            prompt, prompt_text = output.prompt_token_ids, self._prompt_text(number, output)
            first = [None, *(output.prompt_logprobs or []), *first]
        finish = "length" if self._only_echo and delta.finish_reason else delta.finish_reason
        choice: dict[str, Any] = {
            "index": number * (self._request.n or 1) + delta.index, "text": prompt_text + text, "logprobs": None, "finish_reason": finish,
        }  # fmt: skip
        if self._request.logprobs is not None:
            begun = [*places.of_prompt(prompt, prompt_text), *places.of_output(tokens)]
            choice["logprobs"] = self._texts.completion([*prompt, *tokens], first, begun)
        if isinstance(delta.stop_reason, str) or (delta.stop_reason in (self._request.stop_token_ids or ())):
            choice["stop_reason"] = delta.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = [] if self._only_echo else delta.tokens
            if begins:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _prompt_text(self, number: int, output: RequestOutput) -> str:
        """What the client sent; of tokens, and of a text that may be cut, their text."""
        given = self._request.prompt
        text = given if isinstance(given, str) else given[number]
        if isinstance(text, str) and self._request.truncate_prompt_tokens is None:
            return text
        return self._model.decode(output.prompt_token_ids, skip_special_tokens=self._request.skip_special_tokens)


async def completed(request: CompletionRequest, model: ServedModel, name: str) -> Completions:
    """A request whose constraint is compiled, and that runs.

    Raises:
        ApiError: it cannot be served.
    """
    request.check()
    grammar = grammar_of(request.response_format, request.structured_outputs)
    constraint = None if grammar is None else await asyncio.to_thread(model.compile, grammar, None)
    return Completions(request, model, name, constraint)
