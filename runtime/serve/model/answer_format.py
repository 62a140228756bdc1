"""How a model writes reasoning and tool calls, as its chat template shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ....system.errors import RuntimeProblem, nearest_name
from ..answer.parts import Parser, Plain
from ..answer.reasoning import ReasoningParser, ReasoningTags, opens_reasoning, text_opens_reasoning
from ..answer.schema import CallFormat, call_format
from ..answer.table import PARSERS, detect, reasoning_tags


@dataclass(frozen=True)
class AnswerOptions:
    """How all models of a server answer.

    Attributes:
        tool_call_parser: the format of their calls; ``auto`` takes it from the chat template.
        chat_template: used instead of their own; None for their own.
        stream_interval: every how many tokens a stream has an event.
        generation_config: ``auto``: requests that do not say how tokens are chosen get what the models' ``generation_config.json``
            says; ``none``: a temperature of 1 and nothing else.
    """

    tool_call_parser: str = "auto"
    chat_template: str | None = None
    stream_interval: int = 1
    generation_config: Literal["auto", "none"] = "auto"


@dataclass(frozen=True)
class AnswerFormat:
    """A model's format.

    Attributes:
        tokenizer: of the model.
        calls: how it writes calls; None if that is not known.
        call_parser: makes a parser of them.
        tags: around its reasoning; None if it has none.
    """

    tokenizer: Any
    calls: CallFormat | None = None
    call_parser: Callable[[], Parser] | None = None
    tags: ReasoningTags | None = None

    @classmethod
    def of(cls, tokenizer: Any, parser: str = "auto") -> AnswerFormat:
        """The format of a tokenizer's chat template.

        Args:
            tokenizer: with or without one; None if the model has none.
            parser: of calls; ``auto`` finds it in the template.

        Raises:
            RuntimeProblem: there is no parser of that name.
        """
        if parser not in ("auto", *PARSERS):
            raise RuntimeProblem(
                f"tool_call_parser is {parser!r}; it must be auto, {', '.join(PARSERS)}{nearest_name(parser, list(PARSERS))}"
            )
        template = getattr(tokenizer, "chat_template", None)
        # Some models have a template for tools besides the usual one.
        template = template.get("tool_use", template.get("default", "")) if isinstance(template, dict) else template
        if not template:
            return cls(tokenizer)
        name = detect(template) if parser == "auto" else parser
        calls = None if name is None else call_format(name, template)
        return cls(tokenizer, calls, None if name is None else PARSERS[name], reasoning_tags(template))

    def leaves_reasoning_open(self, prompt: Sequence[int], begun: Callable[[], Sequence[int]]) -> bool:
        """Whether an answer begins within reasoning, since the prompt has opened it.

        Args:
            prompt: the conversation's tokens.
            begun: those that the template has written of the answer; needed where tags are several tokens, which users may write, too.
        """
        if self.tags is None:
            return False
        opening, closing = self._token(self.tags.opening), self._token(self.tags.closing)
        if opening is not None and closing is not None:
            return opens_reasoning(prompt, opening, closing)
        return text_opens_reasoning(self.tokenizer.decode(list(begun())), self.tags)

    @property
    def reasoning_end(self) -> int | None:
        """The token that ends reasoning; None if no single token does."""
        return None if self.tags is None else self._token(self.tags.closing)

    def reader(self, *, calls: bool, is_open: bool) -> Parser:
        """A parser of one answer.

        Args:
            calls: whether the model may call tools.
            is_open: whether it begins within reasoning.
        """
        rest = self.call_parser() if calls and self.call_parser is not None else Plain()
        return rest if self.tags is None else ReasoningParser(rest, is_open=is_open, tags=self.tags)

    def _token(self, tag: str) -> int | None:
        return self.tokenizer.get_added_vocab().get(tag)
