"""A step that runs on a GPU, and its outputs on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from ...gpu.draft_chains import on_host
from ...gpu.sampled_steps import StepOutputs
from ...requests.sequence import Sequence, TokenLogprobs
from ...sampling.sampling import Sampled
from ...scheduling.plan import StepPlan
from ...speculation.counts import DraftOutcome
from ...speculation.verification import VerifiedChain
from .executor import StepResult


@dataclass(frozen=True)
class SentOutputs:
    """A step's outputs on their way to the host.

    Attributes:
        scores, chosen: as in :class:`StepOutputs`.
        wanting: of rows whose most likely tokens are asked for: where they are in ``best``, and how many.
        best: the most likely tokens' log probabilities, and these tokens; None if nobody asks for them.
        event: after which all have come; None if they have.
    """

    scores: Tensor
    chosen: Tensor
    wanting: dict[int, tuple[int, int]]
    best: tuple[Tensor, Tensor] | None
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, found: StepOutputs, plan: StepPlan, drafts: SequenceOf[SequenceOf[int]]) -> SentOutputs:
        """Start the copy to the host."""
        asked: dict[int, int] = {}
        row = 0
        for chunk, draft in zip(plan.chunks, drafts, strict=True):
            rows = range(row, row := row + 1 + len(draft))
            count = chunk.sequence.request.params.logprobs
            if chunk.is_last and count is not None:
                asked |= dict.fromkeys(rows, count)
        best, wanting = None, {row: (row, count) for row, count in asked.items()}
        if asked:
            logits = found.logits[:row]
            if any(drafts):  # many rows, and no next step is being prepared that a copy to the device would hold up
                logits = logits[torch.tensor(list(asked), device=logits.device)]
                wanting = {row: (place, count) for place, (row, count) in enumerate(asked.items())}
            values, tokens = logits.log_softmax(-1).topk(max(1, *asked.values()))
            best = (on_host(values), on_host(tokens))
        scores, chosen, event = on_host(found.scores), on_host(found.chosen), None
        if found.scores.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return cls(scores, chosen, wanting, best, event)


@dataclass(frozen=True)
class LaunchedStep:
    """A running step.

    Attributes:
        drafts: a chain for each chunk, empty for most.
    """

    plan: StepPlan
    drafts: SequenceOf[SequenceOf[int]]
    sent: SentOutputs
    completed: bool = False

    def collect(self) -> StepResult:
        """Its results; waits for the device."""
        return self.with_outcomes()[0]

    def with_outcomes(self) -> tuple[StepResult, dict[Sequence, DraftOutcome]]:
        """The same, and what became of its drafts."""
        if self.sent.event is not None:
            self.sent.event.synchronize()
        logprobs, sound = self.sent.scores.tolist()
        tokens = self.sent.chosen.tolist()
        result, outcomes = StepResult(), {}
        row = 0
        for chunk, draft in zip(self.plan.chunks, self.drafts, strict=True):
            rows = range(row, row := row + 1 + len(draft))
            if not sound[rows.start] and chunk.is_last:
                result.broken.append(chunk.sequence)
            elif chunk.is_last:
                mine = slice(rows.start, rows.stop)
                found = VerifiedChain.of(draft, tokens[mine], sound[mine])
                result.tokens[chunk.sequence] = [
                    Sampled(tokens[i], logprobs[i], self._top(i, tokens[i], logprobs[i])) for i in rows[: found.count]
                ]
                if draft:
                    outcomes[chunk.sequence] = found.outcome
        return result, outcomes

    def _top(self, row: int, token: int, logprob: float) -> TokenLogprobs | None:
        """The most likely tokens at a row, if they are asked for."""
        if row not in self.sent.wanting or self.sent.best is None:
            return None
        place, count = self.sent.wanting[row]
        values, best = (part[place, :count].tolist() for part in self.sent.best)
        top = dict(zip(best, values, strict=True))
        top.setdefault(token, logprob)
        return top
