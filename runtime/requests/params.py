"""A request's generation parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...system.errors import RuntimeProblem
from ...system.plain_data import is_unicode
from .constraint import Constraint

_MOST_LOGPROBS = 1000
_MOST_SAMPLES = 256
_LARGEST = 1e6  # of what logits are multiplied by or added to: beyond, float32 overflows
# Logits divided by less are no numbers any more, and the most likely token is certain long before.
_COLDEST = 1e-5
_LEAST_PENALTY, _MOST_PENALTY = 1e-3, 1e3


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Attributes:
        max_tokens: the most tokens to generate; None for the rest of the model's length.
        min_tokens: no end token and no stop before this many tokens.
        temperature: 0 is greedy, and so is less than 0.00001.
        top_k: sample among this many most likely tokens; 0 or -1 for all.
        top_p: sample among the most likely tokens that together have this probability.
        min_p: drop tokens less likely than this share of the most likely one.
        repetition_penalty: above 1, tokens of prompt and output become less likely.
        presence_penalty, frequency_penalty: subtracted once, or as often as it occurs, from a token of the output.
        logit_bias: added to tokens' logits.
        allowed_token_ids: the only tokens that may be chosen, end tokens included; None for all.
        bad_words: texts that the output may not contain, at its beginning, after a space or within a word, as the tokenizer writes them there.
            A token is chosen all the same where nothing else is allowed.
        seed: fixes this request's draws, which without one differ from request to request; with ``Engine(reproducible=True)`` its tokens, regardless of other requests.
        stop: strings that end the output.
        stop_token_ids: tokens that end the output.
        include_stop_str_in_output: keep in the text what has ended it, a string or one of ``stop_token_ids``.
        ignore_eos: do not stop at the model's end token.
        logprobs: report the log probabilities of this many most likely tokens with each token (the model's, before any change).
        prompt_logprobs: the same for the prompt.
        n: how many samples of the same prompt.
        beam_width: above 1, beam search of that width; ``n`` best are returned.
        length_penalty: in beam search, the power of the length that scores are divided by.
        skip_special_tokens: leave special tokens out of the text.
        constraint: a grammar that the output follows; not with beam search.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    skip_special_tokens: bool = True
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        for name in ("stop", "stop_token_ids", "bad_words"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if 0 < self.temperature < _COLDEST:
            object.__setattr__(self, "temperature", 0.0)
        for name, holds, expected in self._rules():
            if not holds:
                raise RuntimeProblem(f"{name} is {getattr(self, name)!r}; it must be {expected}")

    @property
    def is_beam_search(self) -> bool:
        return self.beam_width > 1

    @property
    def sequences(self) -> int:
        """The number of sequences that run at once."""
        return self.beam_width if self.is_beam_search else self.n

    @property
    def changes_logits(self) -> bool:
        """Whether tokens become likelier, less likely or impossible, before the temperature and the filters."""
        return bool(
            self.forbids_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
        )

    @property
    def forbids_tokens(self) -> bool:
        """Whether tokens are impossible that no list of a few says once and for all."""
        return self.constraint is not None or self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0 and not self.changes_logits

    def _rules(self) -> list[tuple[str, bool, str]]:
        return [
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            ("min_tokens", 0 <= self.min_tokens <= (self.max_tokens or math.inf), "from 0 to max_tokens"),
            ("temperature", 0 <= self.temperature <= _LARGEST, f"from 0 to {_LARGEST:g}"),
            ("top_k", self.top_k >= 0, "0 or -1 (all), or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            (
                "repetition_penalty",
                _LEAST_PENALTY <= self.repetition_penalty <= _MOST_PENALTY,
                f"from {_LEAST_PENALTY:g} to {_MOST_PENALTY:g}",
            ),
            ("presence_penalty", abs(self.presence_penalty) <= _LARGEST, f"within ±{_LARGEST:g}"),
            ("frequency_penalty", abs(self.frequency_penalty) <= _LARGEST, f"within ±{_LARGEST:g}"),
            (
                "logit_bias",
                all(abs(v) <= _LARGEST for v in self.logit_bias.values()),
                f"numbers within ±{_LARGEST:g} by token id",
            ),
            (
                "allowed_token_ids",
                self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
                "token ids, at least one, or None",
            ),
            (
                "bad_words",
                all(isinstance(word, str) and word.strip() and is_unicode(word) for word in self.bad_words),
                "strings that are not blank, in characters that UTF-8 has",
            ),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2^63 - 1"),
            ("stop", all(self.stop) and all(isinstance(s, str) for s in self.stop), "strings that are not empty"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= _MOST_LOGPROBS, f"from 0 to {_MOST_LOGPROBS}"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= _MOST_LOGPROBS,
                f"from 0 to {_MOST_LOGPROBS}",
            ),
            ("n", 1 <= self.n <= _MOST_SAMPLES, f"from 1 to {_MOST_SAMPLES}"),
            (
                "beam_width",
                self.beam_width in (0, 1) or self.n <= self.beam_width <= _MOST_SAMPLES,
                f"0 (no beam search) or from n to {_MOST_SAMPLES}",
            ),
            ("length_penalty", math.isfinite(self.length_penalty), "a number"),
            ("constraint", self.constraint is None or not self.is_beam_search, "None with beam search"),
        ]
