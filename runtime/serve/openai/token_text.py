"""Log probabilities by the text of tokens."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ...requests.sequence import TokenLogprobs
from ...requests.text_stream import special_tokens
from ..model.served_model import ServedModel

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# JSON has no infinity.
_LEAST = -9999.0


# A letter for each byte in vocabularies of bytes: those of Latin-1 that can be seen are themselves, others come after them.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTE_OF = {chr(byte): byte for byte in _SEEN} | {chr(256 + number): byte for number, byte in enumerate(_UNSEEN)}
_SPELLED = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_bytes(piece: str) -> bytes:
    """The bytes of a vocabulary's piece that is a part of a character: in GPT-2's letters for bytes, or sentencepiece's ``<0x0A>``."""
    spelled = _SPELLED.fullmatch(piece)
    if spelled is not None:
        return bytes([int(spelled[1], 16)])
    return bytes(_BYTE_OF[letter] for letter in piece if letter in _BYTE_OF)


class TokenText:
    """The texts of single tokens; each is decoded once.

    Attributes:
        special: tokens that texts may leave out.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._known: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        tokenizer = model.tokenizer
        self.special = frozenset[int]() if tokenizer is None else special_tokens(tokenizer)

    def of(self, token: int) -> str:
        """A token's text as it goes on another; ``token_id:N`` if it is a part of a character."""
        found = self._known.get(token)
        if found is None:
            if self._model.tokenizer is None:
                text = _UNFINISHED
            else:
                # Sentencepiece's decoders leave out the space before a first word.
                letter, before = ([], "") if token in self.special else self._letter
                text = self._model.decode([*letter, token], skip_special_tokens=False).removeprefix(before)
            found = self._known[token] = f"token_id:{token}" if _UNFINISHED in text else text
        return found

    @cached_property
    def _letter(self) -> tuple[list[int], str]:
        """Tokens of a letter, and their text."""
        tokens = self._model.encode("a", add_special_tokens=False)
        return tokens, self._model.decode(tokens)

    def bytes_of(self, token: int) -> bytes:
        """A token's own bytes, which may be a part of a character."""
        found = self._bytes.get(token)
        if found is None:
            text, tokenizer = self.of(token), self._model.tokenizer
            found = text.encode()
            if tokenizer is not None and text == f"token_id:{token}":
                found = piece_bytes(tokenizer.convert_ids_to_tokens(token))
            self._bytes[token] = found
        return found

    def completion(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], places: Sequence[int]
    ) -> dict[str, Any]:
        """In the form of ``/v1/completions``.

        Args:
            tokens: with their log probabilities.
            logprobs: of each: the token's own, and of the most likely ones; None for the first of a prompt.
            places: where each begins in the text.
        """
        return {
            "tokens": [self.of(token) for token in tokens],
            "token_logprobs": [
                None if known is None else _finite(known[token]) for token, known in zip(tokens, logprobs, strict=True)
            ],
            "top_logprobs": [None if known is None else self._by_text(known) for known in logprobs],
            "text_offset": list(places),
        }

    def chat(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], count: int) -> dict[str, Any]:
        """In the form of ``/v1/chat/completions``, with so many of the most likely tokens."""
        return {
            "content": [
                {
                    **self._entry(token, known[token]),
                    "top_logprobs": [self._entry(other, value) for other, value in list(known.items())[:count]],
                }
                for token, known in zip(tokens, logprobs, strict=True)
            ],
            "refusal": None,
        }

    def vllm(self, logprobs: Sequence[TokenLogprobs], count: int) -> list[dict[str, Any] | None]:
        """In the form of vLLM's ``prompt_logprobs``, with so many of the most likely tokens; another one's rank is not known."""
        entries: list[dict[str, Any] | None] = [None]
        for known in logprobs:
            entries.append(
                {
                    str(token): {
                        "logprob": _finite(value),
                        "rank": rank if rank <= count else None,
                        "decoded_token": self.of(token),
                    }
                    for rank, (token, value) in enumerate(known.items(), start=1)
                }
            )
        return entries

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.of(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(self.bytes_of(token))}

    def _by_text(self, known: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, value in known.items():
            text = self.of(token)
            found[text] = max(_finite(value), found.get(text, _LEAST))
        return found


def _finite(value: float) -> float:
    return max(_LEAST, value)


class TextPlaces:
    """Where each token of a choice begins in its text, whether that comes at once or in pieces.

    Args:
        texts: of the tokens.
        skip_special_tokens: whether outputs leave special tokens out.
    """

    def __init__(self, texts: TokenText, *, skip_special_tokens: bool) -> None:
        self._texts, self._skips = texts, skip_special_tokens
        self._decoder = getincrementaldecoder("utf-8")("replace")  # a character ends with the last of its tokens
        self._place = 0
        self._has_begun = False

    def of_prompt(self, tokens: Sequence[int], text: str) -> list[int]:
        """A prompt's, which comes before all others; its text has what the client sent, and no token that the tokenizer added."""
        return [self._next(token, self._in_prompt(token, text)) for token in tokens]

    def of_output(self, tokens: Sequence[int]) -> list[int]:
        """Those of the next tokens of the output."""
        return [self._next(token, 0 if self._skips and token in self._texts.special else None) for token in tokens]

    def _next(self, token: int, width: int | None) -> int:
        place = self._place
        self._has_begun = self._has_begun or token not in self._texts.special
        self._place += len(self._decoder.decode(self._texts.bytes_of(token))) if width is None else width
        return place

    def _in_prompt(self, token: int, text: str) -> int | None:
        """The characters of the text that are a token's; None if they are as many as its own."""
        own = self._texts.of(token)
        if text.startswith(own, self._place):
            return None
        if token in self._texts.special:
            return 0
        # A tokenizer may begin a text with a space, which may be a token of its own there.
        is_added = own[:1] == " " and (own != " " or not self._has_begun)
        return len(own) - 1 if is_added and text.startswith(own[1:], self._place) else None
