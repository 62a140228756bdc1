"""Grammars compiled for a model's tokens."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from copy import copy
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from torch import Tensor

from ...requests.constraint import Matcher
from ..http.errors import ApiError
from .grammar import SPACES, Grammar

_LIMITS = LLParserLimits(max_items_in_row=4000, max_grammar_size=200_000, max_lexer_states=50_000, verbose_errors=False)
_KEPT = 64  # a grammar that reaches these limits takes tens of megabytes
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class Compiler:
    """Compiles grammars for one tokenizer, and keeps the latest.

    Args:
        tokenizer: a fast one.
        vocabulary: of the model, which may be larger.
        ends: tokens that end an output.

    Raises:
        ApiError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ApiError(400, "This model's tokenizer is not a fast one, which structured output needs.")
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        self._vocabulary = vocabulary
        self._tokenizer = LLTokenizer(
            backend.to_str(), n_vocab=max(vocabulary, len(tokenizer)), eos_token=sorted(ends) or None
        )
        self._ids: dict[str, int] = tokenizer.get_added_vocab()
        # The longest of those that begin at a place.
        tags = "|".join(re.escape(tag) for tag in sorted(self._ids, key=len, reverse=True))
        self._tags = re.compile(f"({tags})" if tags else "(?!)")
        self._ends = ends
        self._known: OrderedDict[tuple[Grammar, int | None], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar, after: int | None = None) -> CompiledGrammar:
        """A grammar for the engine. It takes milliseconds, and other threads go on meanwhile.

        Args:
            grammar: what outputs must look like.
            after: the token from which on it holds, such as the end of reasoning; None for the beginning.

        Raises:
            ApiError: the grammar is invalid, not supported, or allows no text.
        """
        key = grammar, after
        with self._lock:
            if key in self._known and not self._known[key].is_spent:
                self._known.move_to_end(key)
                return self._known[key]
        try:
            template = LLMatcher(self._tokenizer, self._text(grammar), log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise _refused(grammar, str(error)) from None
        problem = _problem(template)
        if problem:
            raise _refused(grammar, problem)
        found = CompiledGrammar(template, self._vocabulary, self._ends, after)
        with self._lock:
            self._known[key] = found
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found

    def _text(self, grammar: Grammar) -> str:
        match grammar.kind:
            case "json":
                return LLMatcher.grammar_from_json_schema(json.loads(grammar.text), overrides=SPACES)  # type: ignore[arg-type]
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "choice":
                return grammar_from("choice", grammar.text)
            case "calls" | "tags":
                return LLMatcher.grammar_from_lark(self._with_tokens(grammar.text))
            case _:
                return grammar_from("grammar", grammar.text)

    def _with_tokens(self, text: str) -> str:
        """A grammar in which tags that are one token are written as tokens: as text they never match."""

        def tokens_of(match: re.Match[str]) -> str:
            parts = self._split(json.loads(match[0]))
            return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)

        lines = []
        for line in text.split("\n"):
            # Tags inside of schemas are the client's text.
            before, mark, schema = line.partition("%json ")
            if not mark:
                written = _STRING.sub(tokens_of, line)
                # Text ends before a token by itself; before other text only if it is lazy.
                lines.append(written if written == line else written.replace("[lazy]", ""))
                continue
            value, end = json.JSONDecoder().raw_decode(schema)
            lines.append(
                f"{_STRING.sub(tokens_of, before)}%json {json.dumps(value)}{_STRING.sub(tokens_of, schema[end:])}"
            )
        return "\n".join(lines)

    def _split(self, text: str) -> list[str | int]:
        """A text's tags as tokens, and what is between them."""
        return [self._ids.get(part, part) for part in self._tags.split(text) if part]


class CompiledGrammar:
    """A grammar from which outputs start.

    Attributes:
        is_spent: whether an output of it has reached the limits, which all of them share.
    """

    def __init__(self, template: LLMatcher, vocabulary: int, ends: frozenset[int], after: int | None) -> None:
        self.is_spent = False
        self._template = template
        self._vocabulary = vocabulary
        self._ends = ends
        self._after = after

    def start(self) -> Matcher:
        """At the beginning of an output."""
        return GrammarMatcher(self, self._template.deep_copy(), self._vocabulary, self._ends, self._after)


class GrammarMatcher:
    """How far an output has come in its grammar."""

    def __init__(
        self, grammar: CompiledGrammar, matcher: LLMatcher, vocabulary: int, ends: frozenset[int], after: int | None
    ) -> None:
        self._grammar, self._matcher = grammar, matcher
        self._vocabulary = vocabulary
        self._ends = ends
        self._after = after

    def forbid(self, row: Tensor) -> None:
        """Set the logits of tokens that may not follow to minus infinity."""
        if self._after is not None:
            return
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(packed, count=self._vocabulary, bitorder="little").view(np.bool_)
        row.masked_fill_(~torch.from_numpy(allowed), float("-inf"))

    def accept(self, token: int) -> None:
        """Go on by a token."""
        if self._after is not None:
            self._after = None if token == self._after else self._after
        elif token not in self._ends:
            self._matcher.consume_token(token)

    def copy(self) -> GrammarMatcher:
        """Another one that has come as far."""
        return GrammarMatcher(self._grammar, self._matcher.deep_copy(), self._vocabulary, self._ends, self._after)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow, or the grammar became too complex to follow."""
        return self._after is None and self._matcher.is_stopped()

    @property
    def failure(self) -> str | None:
        """Why it cannot be followed any further."""
        if not self._matcher.is_error():
            return None
        self._grammar.is_spent = True
        return self._matcher.get_error().split("\n<")[0]


def _refused(grammar: Grammar, problem: str) -> ApiError:
    what = {"json": "JSON schema", "regex": "regular expression", "calls": "tools' schemas", "tags": "structural tag"}
    return ApiError(400, f"The {what.get(grammar.kind, grammar.kind)} cannot be followed: {problem}.")


def _problem(template: LLMatcher) -> str:
    """Why a grammar cannot be used; empty if it can."""
    if template.is_error():
        return _sentence(template.get_error())
    probe = template.deep_copy()
    probe.compute_bitmask()
    if probe.is_error() or (probe.is_stopped() and not template.is_accepting()):
        return _sentence(probe.get_error()) or "no text matches it"
    return ""


def _sentence(error: str) -> str:
    return " ".join(error.split("\n<")[0].split())[:300].rstrip(".")
