"""A request and the sequences it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .params import SamplingParams

if TYPE_CHECKING:
    import torch

    from .text_stream import TextStream

TokenLogprobs = dict[int, float]


class TokenScore(NamedTuple):
    """How likely the model held a token that was given, and whether it was its first choice."""

    logprob: float
    is_best: bool


@dataclass(frozen=True)
class BeamCandidate:
    """How a beam may go on.

    Attributes:
        token: with this one.
        score: what the beam is ranked by then, before its length is considered.
        logprob: of the token, under the model.
        top: the most likely tokens' too, if they were asked for.
    """

    token: int
    score: float
    logprob: float
    top: TokenLogprobs | None


class Sequence:
    """Tokens that are being continued.

    Attributes:
        request: whose sequence it is.
        index: which of the request's samples.
        tokens: the prompt and what was generated.
        computed: how many of them have keys and values in the cache.
        pending: how many tokens of it are being chosen, and not yet among ``tokens``.
        blocks, keys: cache blocks, and the keys of those published or found.
        finish: why it ended: ``stop``, ``length``, ``abort`` or ``error``; None while it runs.
        total_logprob: sum of its generated tokens' log probabilities.
        score: in beam search, the sum of its tokens' log probabilities after biases and penalties.
        candidates: in beam search, its continuations while its siblings are waited for.
        expected: a continuation to be scored, where nothing is to be generated.
        scores: of the tokens of ``expected``, as far as they are known.
    """

    def __init__(self, request: Request, index: int, tokens: list[int], expected: list[int] | None = None) -> None:
        self.request = request
        self.index = index
        self.tokens = tokens
        self.computed = 0
        self.pending = 0
        self.blocks: list[int] = []
        self.keys: list[bytes] = []
        self.finish: str | None = None
        self.stopped_by: int | str | None = None
        self.total_logprob = 0.0
        self.logprobs: list[TokenLogprobs] = []
        self.score = 0.0
        self.candidates: list[BeamCandidate] | None = None
        self.generator: torch.Generator | None = None
        self.text: TextStream | None = None
        self.expected = expected or []
        self.scores: list[TokenScore] = []

    @property
    def first_wanted(self) -> int:
        """The first position whose logits are still wanted."""
        if self.expected:
            return len(self.request.prompt) - 1 + len(self.scores)
        if self.request.params.prompt_logprobs is not None and not self.request.forked:
            return len(self.request.prompt_logprobs)
        return len(self.tokens) - 1

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed; none while siblings are waited for.

        Those being chosen count, too, but for the last that the sequence may have, after which nothing is computed.
        """
        if self.candidates is not None:
            return 0
        length = len(self.tokens) + self.pending
        return 0 if self.pending and length >= self.request.grows_to else length - self.computed


@dataclass
class Request:
    """A prompt to be continued.

    Attributes:
        id: its name.
        prompt: token ids.
        params: how.
        grows_to: the most tokens a sequence of it may come to have.
        salt: distinguishes cached keys and values that depend on more than tokens.
        sequences: all of them, ended ones too.
        prompt_logprobs: for each token of the prompt but the first, if asked for.
        forked: whether the prompt has been computed and its samples have gone their ways.
        error: the sentence, if it failed.
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

    @property
    def is_finished(self) -> bool:
        return bool(self.sequences) and all(sequence.finish for sequence in self.sequences)

    @property
    def max_tokens(self) -> int:
        """The most tokens to generate."""
        return self.grows_to - len(self.prompt)
