"""Incremental detokenization, with stop strings that may be split across tokens.

``tokenizers.decoders.DecodeStream`` works in the same way, but for fast tokenizers only: it repeats a prompt that ends
inside a character, raises on bytes that are not text (sentencepiece's), and holds back unfinished text at the end.
So all tokenizers use this class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .params import SamplingParams

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # tokens of the prompt
_MOST_BYTES = 4  # of a character in UTF-8
# Tokens that have become no text: no character takes so many, and they would all be decoded with each further one.
_MOST_WAITING = 32

_SPECIAL: WeakKeyDictionary[PreTrainedTokenizerBase, frozenset[int]] = WeakKeyDictionary()


class TextStream:
    """The text of a growing list of tokens.

    Text is emitted once no later token can change it: not while a character lacks bytes, nor while its
    end may begin a stop string.

    Args:
        tokenizer: turns ids into text.
        prompt: preceding tokens, which decide whether the first word begins with a space.
        stop: strings that end the text.
        skip_special_tokens: leave special tokens out.
        include_stop: keep the stop string that ends the text.

    Attributes:
        text: the text to emit.
        stop_reason: the stop string that was found.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[int],
        stop: tuple[str, ...],
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._decode = decoding(tokenizer, skip_special_tokens=skip_special_tokens)
        # A benchmark lets a model repeat its end token thousands of times: with each all of them would be decoded again.
        self._left_out = special_tokens(tokenizer) if skip_special_tokens else frozenset[int]()
        self._stop, self._includes_stop = stop, include_stop
        self._tokens = self._context(prompt)
        self._from = 0  # decoding begins here, early enough to join words correctly
        self._to = len(self._tokens)  # text up to here is decoded
        self._decoded = ""
        self._searched = 0  # stop strings are looked for from here on
        self.text = ""
        self.stop_reason: str | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, prompt: list[int], params: SamplingParams) -> TextStream:
        """That of a request's output."""
        return cls(
            tokenizer,
            prompt,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        )

    def add(self, token: int, *, may_stop: bool = True) -> None:
        """Add a token; stop strings that begin in its text count only if it ``may_stop``."""
        if token in self._left_out:
            return
        self._tokens.append(token)
        before = self._decode(self._tokens[self._from : self._to])
        after = self._decode(self._tokens[self._from :])
        if after.endswith(_UNFINISHED) or len(after) <= len(before):
            if len(self._tokens) - self._to >= _MOST_WAITING:
                self._give_up_bytes(before, may_stop=may_stop)
            return
        self._emit(after[len(before) :], len(self._tokens), may_stop=may_stop)

    def _give_up_bytes(self, before: str, *, may_stop: bool) -> None:
        """Emit bytes that have become no character for long, up to where one that still may would begin."""
        last = len(self._tokens) - _MOST_BYTES
        places = range(last, last - _MOST_BYTES, -1)
        texts = {place: self._decode(self._tokens[self._from : place]) for place in places}
        place = next((place for place in places if not texts[place].endswith(_UNFINISHED)), places[-1])
        self._emit(texts[place][len(before) :], place, may_stop=may_stop)

    def _emit(self, piece: str, until: int, *, may_stop: bool) -> None:
        if not may_stop:
            self._searched = len(self._decoded) + len(piece)
        self._extend(piece)
        self._from, self._to = self._to, until

    def fork(self) -> TextStream:
        """A copy that continues from here."""
        other = copy.copy(self)
        other._tokens = list(self._tokens)
        return other

    def end(self) -> None:
        """No token follows: emit the rest."""
        if self.stop_reason is not None:
            return
        rest = self._decode(self._tokens[self._from :])[len(self._decode(self._tokens[self._from : self._to])) :]
        if rest:
            self._extend(rest)
        if self.stop_reason is None:
            self.text = self._decoded

    def _extend(self, piece: str) -> None:
        longest = max((len(s) for s in self._stop), default=0)
        start = max(self._searched, len(self._decoded) - longest)  # one may have begun in text that was held back
        self._decoded += piece
        met = [(place, s) for s in self._stop if (place := self._decoded.find(s, start)) >= 0]
        if met:
            place, self.stop_reason = min(met)
            ends = place + len(self.stop_reason) if self._includes_stop else place
            self._decoded = self.text = self._decoded[:ends]
            return
        self.text = self._decoded[: len(self._decoded) - self._held()]

    def _held(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        text, first = self._decoded, len(self._decoded)
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1, first)
            first = at if at >= 0 else first
        return len(text) - first

    def _context(self, prompt: list[int]) -> list[int]:
        """The prompt's last tokens, from the beginning of a character on.

        Sentencepiece's bytes are decoded one run at a time, and a run that begins inside a character is not valid text.
        """
        sizes = range(_CONTEXT, _CONTEXT + _MOST_BYTES)
        whole = (size for size in sizes if not self._decode(prompt[-size:]).startswith(_UNFINISHED))
        return list(prompt[-next(whole, _CONTEXT) :])


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """What decoding without special tokens leaves out."""
    found = _SPECIAL.get(tokenizer)
    if found is None:
        if tokenizer.is_fast:
            marked = tokenizer.added_tokens_decoder.items()
            found = frozenset(id for id, token in marked if token.special)
        else:
            found = frozenset(tokenizer.all_special_ids)
        _SPECIAL[tokenizer] = found
    return found


def decoding(tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """How a tokenizer decodes. Where its Python only passes tokens on, it is left out: it takes longer than all the rest."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    inherits = getattr(kind, "_decode", None) is PreTrainedTokenizerFast._decode
    if isinstance(tokenizer, PreTrainedTokenizerFast) and inherits and kind.decode is PreTrainedTokenizerBase.decode:
        backend = tokenizer.backend_tokenizer
        return lambda tokens: backend.decode(tokens, skip_special_tokens=skip_special_tokens)
    return lambda tokens: str(
        tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )
