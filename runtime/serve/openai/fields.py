"""Fields that completions and chats share, and what they mean to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ....system.errors import SmeltError
from ...requests.constraint import Constraint
from ...requests.params import SamplingParams
from ..constraints.formats import Form, StructuredOutputs
from ..http.errors import ApiError, beams_without_grammar, refused
from ..model.choosing import chosen
from ..model.scheduling import LONGEST_STOP, MOST_STOPS, SchedulingFields

# Of a conversation: each is validated before others are served.
MOST_MESSAGES = 8192
# Of one request: prompts times samples.
MOST_SEQUENCES = 128
# Tokens that may be chosen, and words that may not come: each is looked at with each token.
_MOST_ALLOWED = 1 << 14
_MOST_BAD_WORDS, _LONGEST_BAD_WORD = 256, 128
# Log probabilities of one request's prompts together: each is an object in memory, and most of them a line of the answer.
_MOST_PROMPT_LOGPROBS = 1 << 18


# One or more texts, or their tokens. What is wrong with the first element that is, is enough: a body may have a million.
TextsOrTokens = Annotated[
    str
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[int], Field(fail_fast=True)]
    | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)],
    Field(union_mode="left_to_right"),
]


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("give -1 for as many tokens as there is room for, or at least 1")
    return value


# Of a prompt, from its end.
TruncateTokens = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]


class Fields(BaseModel):
    """A request's body. A field that is not known is an error, as at OpenAI."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def last_tokens(prompt: list[int], most: int | None, room: int) -> list[int]:
    """A prompt of which ``truncate_prompt_tokens`` keeps the end.

    Args:
        prompt: its tokens.
        most: how many are kept; -1 for as many as there is room for, None for all.
        room: what the model's context leaves for the prompt.
    """
    if most is None:
        return prompt
    return prompt[-max(1, room if most == -1 else most) :]


class StreamOptions(BaseModel):
    """``stream_options``.

    Attributes:
        include_usage: whether the last chunk has the numbers of tokens.
        continuous_usage_stats: whether every chunk does.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


# What clients of vLLM's and OpenAI's send that asks for nothing here.
_UNUSED = ("request_id", "verbosity", "prompt_cache_retention", "prompt_cache_options", "moderation")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True, False),  # of tokenizers that are not fast ones
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "include_reasoning": (True,),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "functions": ([],),
    "function_call": ("none",),
}


class ChoosingFields(Fields, SchedulingFields):
    """How tokens are chosen, in every API of OpenAI's. Those from ``top_k`` on are vLLM's fields.

    A field that is null is one that is not there.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool = False
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[int], Field(max_length=_MOST_ALLOWED, fail_fast=True)] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        known = cls.model_fields

        def asks(name: str, value: Any) -> bool:
            if value is None:  # of tokens that means as many as there is room for
                return name in known and (name == "max_tokens" or known[name].is_required())
            return name in known or not (name in _UNUSED or value in _NEUTRAL.get(name, ()))

        return {name: value for name, value in body.items() if asks(name, value)}

    def params(self, defaults: Mapping[str, float], **others: Any) -> SamplingParams:
        """The engine's parameters.

        Args:
            defaults: of fields that are not given.
            others: those that are not fields here.

        Raises:
            ApiError: the engine refuses a value.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        limits = (
            ("stop", stop, MOST_STOPS, LONGEST_STOP),
            ("bad_words", self.bad_words or [], _MOST_BAD_WORDS, _LONGEST_BAD_WORD),
        )
        for name, texts, most, longest in limits:
            if len(texts) > most or max(map(len, texts), default=0) > longest:
                raise ApiError(400, f"{name} may have {most} texts of {longest} characters.", param=name)
        try:
            return SamplingParams(
                **chosen(self, defaults),
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                seed=None if self.seed in (None, -1) else self.seed % 2**63,
                stop=tuple(stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                include_stop_str_in_output=self.include_stop_str_in_output,
                skip_special_tokens=self.skip_special_tokens,
                logit_bias=self.logit_bias or {},
                allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
                bad_words=tuple(self.bad_words or ()),
                ignore_eos=self.ignore_eos,
                **others,
            )
        except SmeltError as problem:
            raise refused(problem) from None


class SamplingFields(ChoosingFields):
    """What completions and chats share besides. The second half are vLLM's fields.

    Attributes:
        user, metadata, store, service_tier, safety_identifier, prompt_cache_key: accepted, and not used.
    """

    n: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    response_format: Form | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 1.0
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate_prompt_tokens: TruncateTokens | None = None

    def sampling(
        self,
        *,
        defaults: Mapping[str, float],
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        constraint: Constraint | None = None,
    ) -> SamplingParams:
        """The engine's parameters.

        Raises:
            ApiError: the engine refuses a value.
        """
        self._check_beams(constraint)
        found = self.params(
            defaults,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=self.n or 1,
            constraint=constraint,
            beam_width=self.n or 1 if self.use_beam_search else 0,
            length_penalty=self.length_penalty,
        )
        return replace(found, temperature=0.0) if self.use_beam_search else found  # a single beam is greedy, too

    def _check_beams(self, constraint: Constraint | None) -> None:
        if self.use_beam_search and self.stream:
            raise ApiError(400, "Beam search is not streamed; leave stream out.", param="stream")
        if self.use_beam_search and constraint is not None:
            raise beams_without_grammar()
        if self.length_penalty != 1 and not self.use_beam_search:
            raise ApiError(400, "length_penalty is for beams; set use_beam_search.", param="length_penalty")

    def check_prompt_logprobs(self, prompts: Sequence[Sequence[int]], count: int | None) -> None:
        """Refuse more log probabilities of prompts than an answer can hold, and those that a stream would leave out.

        Args:
            prompts: their tokens.
            count: how many are wanted of each token; None for none.

        Raises:
            ApiError: it asks for them.
        """
        if self.prompt_logprobs and self.stream:
            raise ApiError(400, "prompt_logprobs are not streamed; leave stream out.", param="prompt_logprobs")
        wanted = 0 if count is None else (count + 1) * sum(map(len, prompts))
        if wanted > _MOST_PROMPT_LOGPROBS:
            why = f"The prompts have {wanted:,} log probabilities together; at most {_MOST_PROMPT_LOGPROBS:,} are answered."
            raise ApiError(400, why, param="prompt_logprobs" if self.prompt_logprobs is not None else "logprobs")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)
