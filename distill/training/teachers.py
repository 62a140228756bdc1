"""Where the teacher's logits come from: a model that runs alongside, or a cache of its top logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..losses.functions import TORCH, LossFunctions
from ..losses.loss_and_gradient import LossAndGradient
from ..losses.options.base import LossOptions
from .batches import TrainingBatch
from .sharded import ShardedModule
from .split_model import SplitModel

# From the student's logits ``[positions, vocabulary]`` and their positions in the batch to the loss.
Compared = Callable[[Tensor, slice], LossAndGradient]


@dataclass(frozen=True)
class Comparison:
    """How student and teacher are compared.

    Attributes:
        loss: a name of ``losses.table.LOSSES``.
        options: the loss's.
        temperature: of both distributions.
        functions: compute it.
    """

    loss: str
    options: LossOptions
    temperature: float = 1.0
    functions: LossFunctions = TORCH

    def __call__(self, student: Tensor, teacher: Tensor) -> LossAndGradient:
        """Values and gradients for logits ``[positions, vocabulary]`` of both.

        Models of one family pad their vocabularies differently; tokens that only one has are ignored.
        """
        shared = min(student.shape[-1], teacher.shape[-1])
        function, beyond = self.functions.divergence, student.shape[-1] - shared
        value, gradient = function(self.loss, student[:, :shared], teacher[:, :shared], self.temperature, self.options)
        return value, functional.pad(gradient, (0, beyond)) if beyond else gradient


class Teacher(Protocol):
    """A teacher's logits."""

    def read(self, batch: TrainingBatch) -> Compared:
        """Read a batch; returns a function that compares the student's logits with the teacher's."""
        ...


class ReadingTeacher:
    """A model that reads every batch alongside the student. Its logits, too, are computed a few positions at a time.

    Args:
        model: the teacher.
        comparison: how the student is compared with it.
        stage: the teacher, as distributed over processes.
    """

    def __init__(self, model: SplitModel, comparison: Comparison, stage: ShardedModule | None = None) -> None:
        self.model, self._comparison = model, comparison
        self._stage = stage or ShardedModule(model.model)

    @torch.no_grad()
    def read(self, batch: TrainingBatch) -> Compared:
        """Read a batch."""
        hidden = self._stage(lambda: self.model.hidden(batch.tokens)).flatten(0, 1)
        head = self.model.head

        @torch.no_grad()
        def compared(student: Tensor, rows: slice) -> LossAndGradient:
            logits = self.model.logits(hidden[rows].unsqueeze(0), head.weight, head.bias)[0]
            return self._comparison(student, logits)

        return compared


class StoredTeacher:
    """A teacher's stored top tokens at every position of the corpus.

    Args:
        loss: a name of :data:`LOSSES` that top tokens suffice for.
        find: returns ids and log-probabilities ``[windows, length, k]`` for windows by their numbers.
        temperature: at which they were stored.
        vocabulary: how many tokens student and teacher share; those that only the student has are ignored.
        functions: compare the student with them.
    """

    def __init__(
        self,
        loss: str,
        find: Callable[[Tensor], tuple[Tensor, Tensor]],
        temperature: float,
        vocabulary: int,
        functions: LossFunctions = TORCH,
    ) -> None:
        self._loss, self._find, self._temperature, self._functions = loss, find, temperature, functions
        self._vocabulary = vocabulary

    def read(self, batch: TrainingBatch) -> Compared:
        """Look a batch up."""
        assert batch.windows is not None
        places, kept = (each.flatten(0, 1) for each in self._find(batch.windows))

        def compared(student: Tensor, rows: slice) -> LossAndGradient:
            shared = student[:, : self._vocabulary]
            value, gradient = self._functions.of_top(self._loss, shared, places[rows], kept[rows], self._temperature)
            beyond = student.shape[-1] - shared.shape[-1]
            return value, functional.pad(gradient, (0, beyond)) if beyond else gradient

        return compared
