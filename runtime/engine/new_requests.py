"""Requests, checked against what an engine can serve."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, Protocol

from ...system.errors import RuntimeProblem
from ..blocks.block_cache import BlockCache
from ..decoder.model import Model
from ..requests.options import RequestOptions
from ..requests.params import SamplingParams
from ..requests.sequence import Request, Sequence
from ..requests.text_stream import TextStream
from ..sampling.bad_words import TokenWords, bad_words_tokens
from ..scheduling.scheduler import Scheduler

Prompt = str | SequenceOf[int]


class Serving(Protocol):
    """The parts of an engine that say what it can serve."""

    tokenizer: Any
    max_model_len: int
    model: Model

    @property
    def cache(self) -> BlockCache: ...

    @property
    def scheduler(self) -> Scheduler: ...


class NewRequests:
    """Makes an engine's requests.

    Args:
        engine: that will serve them.
        seed: from which those without a seed get theirs, in the order in which they come.
    """

    def __init__(self, engine: Serving, seed: int) -> None:
        # No part of an engine keeps it, so that its memory is free when nobody else does.
        self._engine: Serving = weakref.proxy(engine)
        self._names = itertools.count()
        self._seeds = random.Random(seed)
        # Prompts that come together have the same ones, whose tokenizing all others wait for.
        self._bad_words: tuple[tuple[str, ...], TokenWords] = (), ()

    def of_prompt(
        self, prompt: Prompt, params: SamplingParams, id: str | None, options: RequestOptions, *, salt: bytes
    ) -> Request:
        """A request to continue a prompt.

        Args:
            prompt: a text, or token ids.
            params: the sampling parameters.
            id: its id; None for a new one.
            options: how it is scheduled.
            salt: what its keys and values depend on besides its tokens.

        Raises:
            RuntimeProblem: it cannot be served.
        """
        deadline = options.get("deadline")
        if deadline is not None and not deadline > 0:
            raise RuntimeProblem(f"deadline is {deadline}; it must be above 0 seconds")
        text = prompt if isinstance(prompt, str) else None
        if text is not None and self._engine.tokenizer is None:
            raise RuntimeProblem("the checkpoint has no tokenizer; give the prompt as token ids")
        tokens = list(self._engine.tokenizer(text).input_ids) if text is not None else [int(t) for t in prompt]  # type: ignore[misc]
        problem = self._problem(tokens, params)
        if problem:
            raise RuntimeProblem(problem)
        most = self._engine.max_model_len - len(tokens)
        if params.max_tokens is None:
            # A sequence that may grow longer would have other frequencies from its first token on.
            unscaled = self._engine.model.spec.unscaled_length
            if len(tokens) + max(params.min_tokens, unscaled // 4) <= unscaled:  # what is left is an answer's length
                most = min(most, unscaled - len(tokens))
        grows_to = len(tokens) + min(most, params.max_tokens or most)
        # No more than there are: a device has 32 bits for them.
        vocabulary = self._engine.model.spec.vocabulary
        if params.top_k > vocabulary or params.min_tokens > grows_to:
            least = min(params.min_tokens, grows_to)
            params = replace(params, top_k=min(params.top_k, vocabulary), min_tokens=least)
        self._check_room(grows_to, "lower max_tokens or raise kv_cache_memory_bytes")
        name = id if id is not None else f"request-{next(self._names)}"
        request = Request(name, tokens, params, grows_to, self._variant(grows_to) + salt, text, deadline=deadline)
        request.priority, request.predicted_tokens = options.get("priority", 0), options.get("predicted_tokens")
        request.adapter = options.get("adapter")
        if params.bad_words:
            if self._bad_words[0] != params.bad_words:
                self._bad_words = params.bad_words, bad_words_tokens(self._engine.tokenizer, params.bad_words)
            request.bad_words = self._bad_words[1]
        if params.seed is None:
            request.seed = self._seeds.getrandbits(63)
        request.sequences = [
            Sequence(request, i, list(tokens)) for i in range(1 if params.is_beam_search else params.n)
        ]
        for sequence in request.sequences:
            if self._engine.tokenizer is not None:
                sequence.text = TextStream.of(self._engine.tokenizer, tokens, params)
        return request

    def of_scoring(self, context: list[int], continuations: list[list[int]]) -> Request:
        """A request to score continuations of a context.

        Raises:
            RuntimeProblem: it cannot be served.
        """
        longest = max(map(len, continuations))
        # The last token of a continuation is only scored, never computed.
        grows_to = len(context) + longest - 1
        problem = self.token_problem(context, "context")
        for continuation in continuations:
            problem = problem or self.token_problem(continuation, "continuation")
        if problem is None and grows_to > self._engine.max_model_len:
            problem = f"context and continuation have {grows_to + 1} tokens, more than the engine's max_model_len of {self._engine.max_model_len} plus one"
        if problem:
            raise RuntimeProblem(problem)
        self._check_room(grows_to, "raise kv_cache_memory_bytes or lower max_model_len")
        request = Request(f"request-{next(self._names)}", context, SamplingParams(), grows_to, self._variant(grows_to))
        request.sequences = [Sequence(request, i, list(context), expected) for i, expected in enumerate(continuations)]
        return request

    def _check_room(self, grows_to: int, advice: str) -> None:
        needed = self._engine.cache.needed(grows_to)
        if needed > self._engine.cache.blocks:
            raise RuntimeProblem(
                f"the request may grow to {grows_to} tokens, which need {needed} cache blocks, but there are {self._engine.cache.blocks};"
                f" {advice}"
            )

    def token_problem(self, tokens: SequenceOf[int], what: str) -> str | None:
        """Why tokens cannot be computed, or None."""
        vocabulary = self._engine.model.spec.vocabulary
        if not tokens:
            return f"the {what} is empty; give at least one token"
        wrong = next((t for t in tokens if not 0 <= t < vocabulary), None)
        return None if wrong is None else f"the {what} has token {wrong}, outside the vocabulary of {vocabulary}"

    def _problem(self, tokens: list[int], params: SamplingParams) -> str | None:
        vocabulary = self._engine.model.spec.vocabulary
        problem = self.token_problem(tokens, "prompt")
        if problem:
            return problem
        if len(tokens) >= self._engine.max_model_len:
            return f"the prompt has {len(tokens)} tokens, and the engine's max_model_len of {self._engine.max_model_len} leaves no room to continue it"
        named = (*params.logit_bias, *params.stop_token_ids, *(params.allowed_token_ids or ()))
        outside = [t for t in named if not 0 <= t < vocabulary]
        if outside:
            return f"logit_bias, stop_token_ids or allowed_token_ids name token {outside[0]}, outside the vocabulary of {vocabulary}"
        if params.stop and self._engine.tokenizer is None:
            return "stop strings need a tokenizer, and the checkpoint has none; use stop_token_ids"
        if params.bad_words and self._engine.tokenizer is None:
            return "bad_words need a tokenizer, and the checkpoint has none"
        if params.sequences > self._engine.scheduler.max_num_seqs:
            return (
                f"the request asks for {params.sequences} sequences at once, and the engine runs at most"
                f" {self._engine.scheduler.max_num_seqs}; raise max_num_seqs"
            )
        for field in ("logprobs", "prompt_logprobs"):
            if (getattr(params, field) or 0) > vocabulary:
                return f"{field} asks for more tokens than the vocabulary of {vocabulary} has"
        return None

    def _variant(self, length: int) -> bytes:
        """What cached keys depend on besides tokens, for a sequence that may grow to a length."""
        model = self._engine.model
        return repr(model.variant(length)).encode() if model.cache_variants else b""
