"""Log probabilities by the text of tokens."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from ...requests.sequence import TokenLogprobs
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
    """The texts of single tokens; each is decoded once."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._known: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    def of(self, token: int) -> str:
        """A token's text; ``token_id:N`` if it is a part of a character."""
        found = self._known.get(token)
        if found is None:
            text = (
                self._model.decode([token], skip_special_tokens=False)
                if self._model.tokenizer is not None
                else _UNFINISHED
            )
            found = self._known[token] = f"token_id:{token}" if _UNFINISHED in text else text
        return found

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
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offset: int
    ) -> dict[str, Any]:
        """In the form of ``/v1/completions``.

        Args:
            tokens: with their log probabilities.
            logprobs: of each: the token's own, and of the most likely ones; None for the first of a prompt.
            offset: of the first one's text.
        """
        texts = [self.of(token) for token in tokens]
        offsets, decoder = [], getincrementaldecoder("utf-8")("replace")  # a character ends with the last of its tokens
        for token in tokens:
            offsets.append(offset)
            offset += len(decoder.decode(self.bytes_of(token)))
        return {
            "tokens": texts,
            "token_logprobs": [
                None if known is None else _finite(known[token]) for token, known in zip(tokens, logprobs, strict=True)
            ],
            "top_logprobs": [None if known is None else self._by_text(known) for known in logprobs],
            "text_offset": offsets,
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
