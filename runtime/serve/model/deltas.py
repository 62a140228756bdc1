"""What is new in a request's outputs."""

from __future__ import annotations

from dataclasses import dataclass

from ...requests.output import RequestOutput
from ...requests.sequence import TokenLogprobs


@dataclass(frozen=True)
class Delta:
    """What one completion has grown by.

    Attributes:
        index: which of the request's completions.
        text: new text.
        tokens: new tokens.
        logprobs: theirs, if requested.
        finish_reason: as the engine's, once it has ended.
        stop_reason: the stop string or token that ended it.
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    stop_reason: int | str | None


class Deltas:
    """Compares each output of a request with the one before."""

    def __init__(self) -> None:
        self._text: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._ended: set[int] = set()

    def of(self, output: RequestOutput) -> list[Delta]:
        """The completions that have grown or ended."""
        found = []
        for completion in output.outputs:
            index = completion.index
            said, counted = self._text.get(index, 0), self._tokens.get(index, 0)
            text, tokens = (completion.text or "")[said:], completion.token_ids[counted:]
            ends = completion.finish_reason is not None and index not in self._ended
            if not (text or tokens or ends):
                continue
            logprobs = [] if completion.logprobs is None else completion.logprobs[counted:]
            self._text[index], self._tokens[index] = said + len(text), counted + len(tokens)
            if ends:
                self._ended.add(index)
            found.append(
                Delta(index, text, tokens, logprobs, completion.finish_reason if ends else None, completion.stop_reason)
            )
        return found
