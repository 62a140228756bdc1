"""Log probabilities by the text of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...requests.sequence import TokenLogprobs
from ..model.served_model import ServedModel

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# JSON has no infinity.
_LEAST = -9999.0


class TokenText:
    """The texts of single tokens; each is decoded once."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._known: dict[int, str] = {}

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
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
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

    def vllm(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """In the form of vLLM's ``prompt_logprobs``."""
        entries: list[dict[str, Any] | None] = [None]
        for known in logprobs:
            ranks = {token: rank for rank, token in enumerate(sorted(known, key=lambda token: -known[token]), start=1)}
            entries.append(
                {
                    str(token): {"logprob": _finite(value), "rank": ranks[token], "decoded_token": self.of(token)}
                    for token, value in known.items()
                }
            )
        return entries

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.of(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    def _by_text(self, known: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, value in known.items():
            text = self.of(token)
            found[text] = max(_finite(value), found.get(text, _LEAST))
        return found


def _finite(value: float) -> float:
    return max(_LEAST, value)
