"""A request and the sequences it runs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..blocks.host_tier import SavedBlock
from .constraint import Matcher
from .params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from .text_stream import TextStream
    from .token_counts import TokenCounts

TokenLogprobs = dict[int, float]


class TokenScore(NamedTuple):
    """The log probability of a given token, and whether it was the most likely one."""

    logprob: float
    is_best: bool


@dataclass(frozen=True)
class BeamCandidate:
    """A candidate continuation of a beam.

    Attributes:
        token: the next token.
        score: the beam's score with it, before the length penalty.
        logprob: of the token, under the model.
        top: the most likely tokens' too, if requested.
    """

    token: int
    score: float
    logprob: float
    top: TokenLogprobs | None


class Sequence:
    """A sequence of tokens in generation.

    Attributes:
        request: its request.
        index: which of the request's samples.
        tokens: prompt and generated tokens.
        computed: how many of them have keys and values in the cache.
        pending: how many of its tokens are being sampled and not yet in ``tokens``.
        blocks, keys: cache blocks, and the keys of those published or found.
        admitted: whether it runs: it holds blocks, and no longer waits.
        refused_at: the scheduler's count of changes when it was last not admitted.
        saved: blocks in host memory that continue ``blocks``, while it waits.
        swapped: whether these are its own, saved when it was preempted; otherwise they were found for its prefix.
        finish: why it ended: ``stop``, ``length``, ``abort``, ``deadline`` or ``error``; None while it runs.
        cumulative_logprob: sum of its generated tokens' log probabilities.
        score: in beam search, the sum of its tokens' log probabilities after biases and penalties.
        candidates: in beam search, its continuations while its siblings are waited for.
        expected: the continuation to score, for scoring requests.
        scores: of the tokens of ``expected``, as far as known.
        matcher: how far it has come in its request's constraint; None without one.
        certain: how many of its tokens stay, while others are tried behind them; None if all do.
    """

    def __init__(self, request: Request, index: int, tokens: list[int], expected: list[int] | None = None) -> None:
        self.request = request
        self.index = index
        self.tokens = tokens
        self.computed = 0
        self.pending = 0
        self.blocks: list[int] = []
        self.keys: list[bytes] = []
        self.admitted = False
        self.refused_at: int | None = None
        self.saved: list[SavedBlock] = []
        self.swapped = False
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0
        self.logprobs: list[TokenLogprobs] = []
        self.score = 0.0
        self.candidates: list[BeamCandidate] | None = None
        self.text: TextStream | None = None
        constraint = request.params.constraint
        self.matcher: Matcher | None = None if constraint is None else constraint.start()
        self.certain: int | None = None
        self._counts: dict[int, TokenCounts] = {}
        self.expected = expected or []
        self.scores: list[TokenScore] = []

    @property
    def first_wanted(self) -> int:
        """The first position whose logits are still needed."""
        if self.expected:
            return len(self.request.prompt) - 1 + len(self.scores)
        if self.request.params.prompt_logprobs is not None and not self.request.forked:
            return len(self.request.prompt_logprobs)
        return len(self.tokens) - 1

    def counted(self, start: int) -> AbstractContextManager[tuple[np.ndarray, np.ndarray]]:
        """Its distinct tokens from a place on, and how often each occurs; they hold within the block that it manages."""
        from .token_counts import TokenCounts  # needs numpy, which commands do without

        if self.request.params.is_beam_search:  # beams take over others' tokens
            return TokenCounts(self.tokens, start).counted(start)
        if start not in self._counts:
            self._counts[start] = TokenCounts(self.tokens, start)
        return self._counts[start].counted(len(self.tokens) if self.certain is None else self.certain)

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed; none while it waits for siblings.

        Pending tokens count, too, except the last possible one, which is never computed.
        """
        if self.candidates is not None:
            return 0
        length = len(self.tokens) + self.pending
        return 0 if self.pending and length >= self.request.grows_to else length - self.computed


@dataclass
class Request:
    """A request: a prompt with its parameters.

    Attributes:
        id: its id.
        prompt: token ids.
        params: sampling parameters.
        grows_to: the largest possible length of its sequences.
        salt: distinguishes cached keys and values that depend on more than tokens.
        sequences: all of them, including finished ones.
        prompt_logprobs: for each token of the prompt but the first, if requested.
        forked: whether the prompt is computed and its samples are forked.
        error: the message, if it failed.
        is_invalid: whether it failed by what it asks for.
        priority: lower numbers go first, under the policy ``priority``.
        predicted_tokens: how many tokens the sender expects, for policies that predict; None if unknown.
        number: how many requests arrived before it.
        arrived, started: when it was queued, and first computed, in seconds of one clock; None if not yet.
        cached_tokens: those of its prompt that were found in the prefix cache when it started.
        preemptions: how often its sequences lost their blocks.
        draft_tokens, accepted_tokens: how many tokens a drafter proposed, and how many of them were its own.
        adapter: that it is for; None for the model itself.
        deadline: seconds from its arrival until it must have ended; None if it has as many as it takes.
        upper_bits: whether it is answered from the upper four of the weights' 8 bits.
        seed: of its noise, if its parameters name none; None for the engine's.
        bad_words: those of its parameters, as tokens.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    grows_to: int
    salt: bytes = b""
    text: str | None = None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished_beams: list[tuple[float, Sequence]] = field(default_factory=list)
    forked: bool = False
    error: str | None = None
    is_invalid: bool = False
    priority: int = 0
    predicted_tokens: int | None = None
    number: int = 0
    arrived: float = 0.0
    started: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    adapter: str | None = None
    deadline: float | None = None
    upper_bits: bool = False
    seed: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def due(self) -> float:
        """When it must have ended, by the clock of ``arrived``."""
        return math.inf if self.deadline is None else self.arrived + self.deadline

    @property
    def is_finished(self) -> bool:
        return bool(self.sequences) and all(sequence.finish for sequence in self.sequences)

    @property
    def max_tokens(self) -> int:
        """The most tokens to generate."""
        return self.grows_to - len(self.prompt)
