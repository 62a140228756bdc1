"""A model that is served under a name: its engine, perhaps an adapter, and its tokenizer for requests."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ....models.directory.directory import ModelDirectory
from ....models.text.chat_template import conversation_tokens
from ....system.errors import SmeltError
from ....system.plain_data import strings_in
from ...engine.engine import Engine, QueueFull
from ...engine.loop import Stream
from ...requests.constraint import Constraint
from ...requests.options import RequestOptions
from ...requests.params import SamplingParams
from ..constraints.compiler import Compiler
from ..constraints.grammar import Grammar
from ..http.errors import ApiError, busy, refused, too_long
from .answer_format import AnswerFormat, AnswerOptions
from .choosing import chosen
from .observer import Observer


class Aborted(Protocol):
    """A request that can be aborted."""

    def abort(self, why: ApiError) -> None: ...


@dataclass
class ServedModel:
    """A model, its engine and its tokenizer.

    Attributes:
        name: what requests call it.
        engine: all of whose requests come through here.
        path: of its checkpoint.
        created: when it was loaded, in seconds since 1970.
        options: how it answers.
        tokenizer: a copy of the engine's: the tokenizers library allows one thread at a time.
        format: of its answers.
        embeds: held while one prompt is embedded, whose keys and values are outside of the engine's cache.
        observers: of its requests.
        adapter: the name of the LoRA adapter that changes it; None for the base model.
        base: what the adapter changes; None for a base model.
        in_use: how many requests have found it and are not answered yet.
        running: those of them that its engine works on.
    """

    name: str
    engine: Engine
    path: Path
    created: int = field(default_factory=lambda: int(time.time()))
    options: AnswerOptions = field(default_factory=AnswerOptions)
    tokenizer: Any = field(init=False)
    format: AnswerFormat = field(init=False)
    observers: tuple[Observer, ...] = ()
    embeds: asyncio.Lock = field(default_factory=asyncio.Lock)
    adapter: str | None = None
    base: ServedModel | None = None
    in_use: int = 0
    running: set[Aborted] = field(default_factory=set)
    _defaults: Mapping[str, float] = field(default_factory=dict)
    _compiles: threading.Lock = field(default_factory=threading.Lock)
    _compiler: Compiler | None = None

    def __post_init__(self) -> None:
        self.tokenizer = copy.deepcopy(self.engine.tokenizer)
        if self.options.chat_template is not None and self.tokenizer is not None:
            self.tokenizer.chat_template = self.options.chat_template
        self.format = AnswerFormat.of(self.tokenizer, self.options.tool_call_parser)
        if self.options.generation_config == "auto":
            self._defaults = ModelDirectory(self.name, self.path).sampling_defaults()
            try:
                SamplingParams(**chosen(None, self._defaults))
            except SmeltError as problem:
                raise SmeltError(
                    f"{self.path / 'generation_config.json'}: {problem}; correct it, or start with --generation-config none"
                ) from None

    def variant(self, adapter: str) -> ServedModel:
        """The same model with an adapter that its engine has loaded, under the adapter's name."""
        found = copy.copy(self)
        found.name = found.adapter = adapter
        found.base = self
        found.created, found.running, found.in_use = int(time.time()), set(), 0
        return found

    @property
    def defaults(self) -> Mapping[str, float]:
        """How tokens are chosen where requests do not say: as the model's ``generation_config.json`` has it."""
        return self._defaults if self.base is None else self.base.defaults

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its output."""
        return self.engine.max_model_len

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens.

        Raises:
            ApiError: the checkpoint has no tokenizer, or the text is none, or longer than the model's positions can hold.
        """
        tokenizer = self._needed_tokenizer()
        self._check_texts([text])
        return list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens.

        Raises:
            ApiError: the checkpoint has no tokenizer, or a token is outside its vocabulary.
        """
        vocabulary = self.engine.model.spec.vocabulary
        wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise ApiError(400, f"Token {wrong} is outside the vocabulary of {vocabulary}.")
        return str(
            self._needed_tokenizer().decode(
                list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def conversation(self, turns: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """A conversation's tokens, as the model's template writes it; control tokens in what users wrote are text.

        Args:
            turns: messages.
            options: of :func:`conversation_tokens`.

        Raises:
            ApiError: there is no template, or it refuses the conversation.
        """
        tokenizer = self._needed_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise ApiError(
                400,
                f"The model {self.name!r} has no chat template; use /v1/completions, or a model with one.",
                param="model",
            )
        self._check_texts(strings_in([turns, options.get("tools"), options.get("template")]))
        try:
            return conversation_tokens(tokenizer, turns, **options)
        except SmeltError as problem:
            raise refused(problem, "messages") from None

    def compile(self, grammar: Grammar, after: int | None) -> Constraint:
        """A grammar for this model. Called outside of the event loop.

        Args:
            grammar: what outputs must look like.
            after: the token from which on it holds; None for the beginning.

        Raises:
            ApiError: it is invalid.
        """
        if self.base is not None:
            return self.base.compile(grammar, after)
        with self._compiles:
            if self._compiler is None:
                self._compiler = Compiler(self._needed_tokenizer(), self.engine.model.spec.vocabulary, self.engine.ends)
        return self._compiler.compile(grammar, after)

    def abort_all(self, why: ApiError) -> None:
        """Abort the requests that are being served by it, which are answered with an error."""
        for running in list(self.running):
            running.abort(why)

    @property
    def is_alive(self) -> bool:
        """Whether its engine can work."""
        return self.engine.loop.is_alive and self.engine.problem is None

    def start(
        self, prompt: list[int], params: SamplingParams, name: str, options: RequestOptions, *, joins: bool = False
    ) -> Stream:
        """Queue a prompt; one that ``joins`` those before belongs to the same HTTP request.

        Raises:
            ApiError: it is too long, cannot be served, or too many wait.
        """
        wanted = params.max_tokens
        if len(prompt) >= self.longest or len(prompt) + (wanted or 0) > self.longest:
            raise too_long(len(prompt), wanted if len(prompt) < self.longest else None, self.longest)
        try:
            return self.engine.start(prompt, params, id=name, joins=joins, **{**options, "adapter": self.adapter})
        except QueueFull as problem:
            raise busy(str(problem)) from None
        except SmeltError as problem:
            raise refused(problem) from None

    def _check_texts(self, texts: Iterable[str]) -> None:
        """Refuse what is no text, and what is too long before it is tokenized, for which all others would wait."""
        length = 0
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ApiError(
                    400, "The text has half of a surrogate pair, which is no character; send valid Unicode."
                ) from None
            length += len(text)
        if length > self.longest * self._longest_token:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.longest} tokens, and the prompt has {length} characters, more than these can"
                " hold; shorten the prompt.",
                code="context_length_exceeded",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest one, at most."""
        return max(map(len, self._needed_tokenizer().get_vocab()))

    def _needed_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ApiError(400, f"The model {self.name!r} has no tokenizer; give prompts as token ids.", param="prompt")
        return self.tokenizer
