"""An engine's draft head at work, beside the reference."""

from __future__ import annotations

from typing import Any

import torch
from smelt.runtime import Engine
from smelt.runtime.requests.sequence import Sequence
from smelt.runtime.speculation.eagle.head_drafter import HeadDrafter
from smelt.runtime.speculation.growing import GrowingBranch
from torch import Tensor

from .head_reference import ReferenceHead


class WatchedHead:
    """An engine's draft head, whose logits are kept, and whose drafts are made right but for every third token of an answer.

    Args:
        engine: with a draft head.
        prompts: of its requests.
        answers: of each.
    """

    def __init__(self, engine: Engine, prompts: list[list[int]], answers: list[list[int]]) -> None:
        assert isinstance(engine.drafter, HeadDrafter)
        self._answers = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
        self._drafter = drafter = engine.drafter
        self._compute, self._choose = drafter._logits, drafter._next
        drafter._logits, drafter._next = self._logits, self._next  # type: ignore[method-assign]
        self._lengths: dict[Sequence, int] = {}
        # Tokens, how many of them are not a draft's, and the head's logits over the model's vocabulary.
        self.seen: list[tuple[list[int], int, Tensor]] = []
        self.on_branches = 0  # how many of those are of branches

    def _next(self, parts: dict[Sequence, Any]) -> Any:
        self._lengths = {sequence: part.length for sequence, part in parts.items()}
        self.on_branches += sum(isinstance(part, GrowingBranch) for part in parts.values())
        return self._choose(parts)

    def _logits(self, sequences: list[Sequence]) -> Tensor:
        logits = self._compute(sequences)
        for row, sequence in zip(logits, sequences, strict=True):
            known = len(sequence.tokens) - self._lengths[sequence]
            self.seen.append((list(sequence.tokens), known, self._drafter._of_all(row).clone()))
            place = len(sequence.tokens) - len(sequence.request.prompt)
            answer = self._answers[tuple(sequence.request.prompt)]
            if place % 3 and place < len(answer):
                places = self._drafter._tokens
                mine = answer[place : place + 1] if places is None else (places == answer[place]).nonzero().flatten()
                row[mine] += 1000
        return logits

    def largest_error(self, head: ReferenceHead, every: int = 5) -> float:
        """Beside the reference, of some of what was seen."""
        pairs = [(found, head.logits(tokens, known)) for tokens, known, found in self.seen[::every]]
        assert all(torch.equal(found.isinf(), wanted.isinf()) for found, wanted in pairs)
        return max(float((found - wanted)[wanted.isfinite()].abs().max()) for found, wanted in pairs)
