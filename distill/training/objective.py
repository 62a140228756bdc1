"""The training objective: the distance from a teacher, mixed with the text's cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from ...models.causal_attention import StripedAttention
from ..losses.chunked import chunked_loss
from ..losses.functions import TORCH, LossFunctions
from ..losses.loss_and_gradient import LossAndGradient
from .batches import TrainingBatch
from .sharded import ShardedModule, Sharding
from .split_model import SplitModel
from .teachers import Teacher

DIVERGENCE, TEXT, HIDDEN, ATTENTION = "teacher", "text", "hidden", "attention"


class Matching(Protocol):
    """A comparison of the internals of both models as they read."""

    def watching(self, who: str) -> AbstractContextManager[None]:
        """Within it, record the internals of ``student`` or ``teacher``."""
        ...

    def __call__(self, counted: Tensor | None) -> Tensor:
        """The distance of both; ``counted [windows, length]`` weighs positions."""
        ...


class Distilling:
    """A student and its training objective.

    Args:
        student: the model that is trained.
        teacher: the teacher; None to learn from the text alone.
        text_share: the share of the text's cross-entropy; the teacher has the rest.
        matched: further comparisons by name, with their weights; needs a teacher that runs alongside.
        kept: this process's held-out batches, for :meth:`held_out`.
        stage: the student, and all else that is trained, as one module.
        spread: how training is distributed over processes.
        functions: compute the loss of the text.
    """

    def __init__(
        self,
        student: SplitModel,
        teacher: Teacher | None,
        *,
        text_share: float = 0.0,
        matched: Mapping[str, tuple[Matching, float]] = MappingProxyType({}),
        kept: Sequence[TrainingBatch] = (),
        stage: ShardedModule | None = None,
        spread: Sharding | None = None,
        functions: LossFunctions = TORCH,
    ) -> None:
        self._student, self._teacher = student, teacher
        self._stage, self._spread = stage or ShardedModule(student.model), spread or Sharding()
        self._text_share = 1.0 if teacher is None else text_share
        self._matched, self._functions = matched, functions
        self._kept = kept

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """The loss on a batch, and its parts."""
        return self._stage(lambda: self._loss(batch))

    def _loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        with StripedAttention():
            compared = None
            if self._teacher is not None:
                with self._watching("teacher"):
                    compared = self._teacher.read(batch)
            with self._watching("student"):
                hidden = self._student.hidden(batch.tokens)
            head, targets = self._student.head, _next(batch.tokens).flatten()
            counted = _counted(batch).to(hidden.device)
            names = self._names(compared is not None)

            def losses(logits: Tensor, rows: slice) -> list[tuple[float, LossAndGradient]]:
                found: list[tuple[float, LossAndGradient]] = []
                if compared is not None:
                    found.append((1 - self._text_share, compared(logits, rows)))
                if TEXT in names:
                    found.append((self._text_share, self._functions.cross_entropy(logits, targets[rows])))
                return found

            loss, parts = chunked_loss(
                hidden.flatten(0, 1), head.weight, head.bias, self._student.logits, losses, counted.flatten()
            )
            named = dict(zip(names, parts.tolist(), strict=True))
            for name, (matching, share) in self._matched.items():
                apart = matching(counted)
                loss = loss + share * apart
                named[name] = float(apart.detach())
            return loss, named

    @contextmanager
    def _watching(self, who: str) -> Iterator[None]:
        with ExitStack() as watched:
            for matching, _ in self._matched.values():
                watched.enter_context(matching.watching(who))
            yield

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """The mean of each part over the held-out batches."""
        if not self._kept:
            return {}
        sums, weight = dict[str, float](), 0.0
        for batch in self._kept:
            weight += batch.weight
            for name, each in self.loss(batch)[1].items():
                sums[name] = sums.get(name, 0.0) + each * batch.weight
        total, *totals = self._spread.sums([weight, *sums.values()])
        return {name: each / max(total, 1e-12) for name, each in zip(sums, totals, strict=True)}

    def _names(self, compared: bool) -> list[str]:
        # The loss on the text itself is always reported for held-out text.
        with_text = self._text_share > 0 or not torch.is_grad_enabled()
        return [*([DIVERGENCE] if compared else []), *([TEXT] if with_text else [])]


def _counted(batch: TrainingBatch) -> Tensor:
    """Weights of positions; zero for the last of a window, which has no next token."""
    counted = torch.ones(batch.tokens.shape) if batch.counted is None else batch.counted.clone()
    counted[:, -1] = 0
    return counted


def _next(tokens: Tensor) -> Tensor:
    """Each position's next token; -1 after the last."""
    return torch.cat((tokens[:, 1:], tokens.new_full((len(tokens), 1), -1)), dim=1)
