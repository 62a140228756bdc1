"""A request's outputs so far."""

from __future__ import annotations

from dataclasses import dataclass

from .sequence import Request, Sequence, TokenLogprobs, TokenScore


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt.

    Attributes:
        index: which of the request's samples.
        text: the text so far; None if the checkpoint has no tokenizer.
        token_ids: its token ids, including an end token.
        finish_reason: ``stop``, ``length``, ``abort``, ``deadline`` or ``error``; None while it grows.
        stop_reason: the stop string or token.
        cumulative_logprob: sum of the tokens' log probabilities.
        logprobs: for each token, its log probability and those of the most likely ones, if requested.
    """

    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True)
class RequestOutput:
    """A request's completions, finished or not.

    Attributes:
        request_id: the request's id.
        prompt: its text; None if it was given as tokens.
        prompt_token_ids: its token ids.
        outputs: one per sample, or the best beams, best first.
        finished: whether the request is complete.
        error: what went wrong, if something did.
        prompt_logprobs: for each prompt token but the first, if requested.
        scores: for scoring requests, by continuation and token; there are no outputs then.
        num_cached_tokens: how many tokens of the prompt were found in the prefix cache.
        queue_seconds: from its arrival until it was first computed; None if it was not yet.
        preemptions: how often its sequences lost their cache blocks and were computed again.
        is_invalid: whether it failed by what it asks for, such as a grammar that cannot be followed to its end.
        draft_tokens, accepted_tokens: how many tokens a drafter proposed, and how many of them became part of the outputs' tokens.
        upper_bits: whether it was answered from the upper four of the weights' 8 bits, because many were waiting.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    finished: bool
    error: str | None
    prompt_logprobs: list[TokenLogprobs] | None
    scores: list[list[TokenScore]] | None = None
    num_cached_tokens: int = 0
    queue_seconds: float | None = None
    preemptions: int = 0
    is_invalid: bool = False
    draft_tokens: int = 0
    accepted_tokens: int = 0
    upper_bits: bool = False

    @classmethod
    def of(cls, request: Request) -> RequestOutput:
        """The current state of a request."""
        asked = request.params.prompt_logprobs is not None
        is_scoring = any(sequence.expected for sequence in request.sequences)
        return cls(
            request.id,
            request.text,
            request.prompt,
            [] if is_scoring else [_completion(sequence) for sequence in request.sequences],
            request.is_finished,
            request.error,
            list(request.prompt_logprobs) if asked else None,
            [list(sequence.scores) for sequence in request.sequences] if is_scoring else None,
            request.cached_tokens,
            None if request.started is None else request.started - request.arrived,
            request.preemptions,
            request.is_invalid,
            request.draft_tokens,
            request.accepted_tokens,
            request.upper_bits,
        )


def _completion(sequence: Sequence) -> Completion:
    return Completion(
        sequence.index,
        None if sequence.text is None else sequence.text.text,
        sequence.generated,
        sequence.finish,
        sequence.stop_reason,
        sequence.cumulative_logprob,
        None if sequence.request.params.logprobs is None else list(sequence.logprobs),
    )
