"""The training loop: batches, gradients, steps, snapshots, and the resulting curve."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...system.interrupts import waiting_interrupts
from .batches import TrainingBatch
from .optimizer import MasterAdamW, Rows, Saved
from .schedule import rate_at
from .sharded import Sharding

# Snapshots take at most this share of the time, and are at least this many seconds apart.
_SNAPSHOT_SHARE, _SNAPSHOT_SECONDS = 0.05, 20.0
# A step is a spike if its gradient is so many times the median of those before it.
_REMEMBERED, _FEWEST_REMEMBERED = 64, 8
_SKIPPED_IN_A_ROW = 20


class TrainingError(Exception):
    """Training cannot continue; the text says why and what to do.

    Attributes:
        batch: the batch on which it failed.
    """

    def __init__(self, text: str, batch: TrainingBatch) -> None:
        super().__init__(text)
        self.batch = batch


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step.

    Attributes:
        step: its number, from 1.
        tokens: tokens read so far.
        loss: the training loss, averaged over the step's tokens.
        parts: each loss separately.
        rate: the learning rate.
        norm: of the gradient, before clipping.
        seconds: time since the start, over all runs of this training.
        skipped: whether the step was skipped as a gradient spike.
        held_out: losses on held-out text, if measured after the step.
    """

    step: int
    tokens: int
    loss: float
    parts: dict[str, float]
    rate: float
    norm: float
    seconds: float
    skipped: bool = False
    held_out: dict[str, float] | None = None


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of the training loop.

    Attributes:
        steps: number of steps.
        rate: the peak learning rate.
        schedule: a name of ``schedule.SCHEDULES``.
        warmup: steps until the peak.
        parts: passes that a step's gradient is summed over.
        clip: the maximum gradient norm; None for no clipping.
        average: the decay of an exponential moving average of the weights, the result; None for the last weights.
        judge: one number of held-out losses; the weights for which it is least become the result. None for the last.
        spike: a step whose gradient is this many times the usual one is skipped; None for never.
        measures: how often the held-out loss is measured, including the start and the end.
    """

    steps: int
    rate: float
    schedule: str = "cosine"
    warmup: int = 0
    parts: int = 1
    clip: float | None = 1.0
    average: float | None = None
    judge: Callable[[dict[str, float]], float] | None = None
    spike: float | None = None
    measures: int = 0


@dataclass
class BestWeights:
    """The weights with the lowest held-out loss so far.

    Attributes:
        step: after which they were reached.
        losses: their held-out losses; None before the first.
        weights: by name.
    """

    weights: dict[str, Tensor]
    step: int = 0
    losses: dict[str, float] | None = None


class Learner(Protocol):
    """A model with its objective."""

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """The differentiable loss, and its parts by name."""
        ...

    def held_out(self) -> dict[str, float]:
        """Losses on held-out text."""
        ...


class Store(Protocol):
    """Where snapshots are kept: each replaces the one before atomically, in all processes."""

    def load(self) -> tuple[Saved, dict[str, Any]] | None:
        """The last snapshot, if any: a function that reads its tensors, and its data."""
        ...

    def save(self, tensors: dict[str, Tensor], rows: Mapping[str, Rows], data: dict[str, Any]) -> None:
        """Save a snapshot: tensors, the rows they hold if not all, and plain data."""
        ...


@dataclass
class Watch:
    """Callbacks of a training.

    Attributes:
        track: passes step numbers through, and shows progress.
        on_step: called after every step, with the metrics of all steps so far.
    """

    track: Callable[[Iterable[int]], Iterator[int]] = field(default=iter)
    on_step: Callable[[list[StepMetrics]], None] = field(default=lambda _: None)


class Trainer:
    """Trains, and resumes where it stopped: a rerun reads the same batches and ends with the same weights.

    Args:
        learner: the model with its objective.
        optimizer: of its parameters.
        batch_at: returns the batch of a step in this process.
        settings: of the loop.
        store: where snapshots are kept.
        watch: callbacks.
        spread: how training is distributed over processes.

    Attributes:
        metrics: one for each finished step.
        started: held-out losses before the first step.
        best: the best weights so far, if they are to be the result.
    """

    def __init__(
        self,
        learner: Learner,
        optimizer: MasterAdamW,
        batch_at: Callable[[int], TrainingBatch],
        settings: TrainerSettings,
        store: Store,
        watch: Watch | None = None,
        spread: Sharding | None = None,
    ) -> None:
        self._learner, self._optimizer, self._batch_at = learner, optimizer, batch_at
        self._settings, self._store, self._watch = settings, store, watch or Watch()
        self._spread = spread or Sharding()
        self.metrics: list[StepMetrics] = []
        self._average: dict[str, Tensor] = {}
        if settings.average is not None:
            self._average = self._masters()
        self.best = None if settings.judge is None else BestWeights(self._masters())
        measures = max(0, settings.measures - 1)
        self._measured = {settings.steps * i // measures for i in range(measures + 1)} if measures else set()
        self.started: dict[str, float] | None = None
        self._begun = time.monotonic()

    def run(self) -> dict[str, Tensor]:
        """Train to the end. The model then has the resulting weights: the last ones, their average, or the best.

        Returns:
            The same by name, in float32; this process's shards of them.

        Raises:
            TrainingError: the loss is not finite, or there are only gradient spikes.
        """
        found = self._store.load()
        if found is not None:
            self._resume(*found)
        elif self._measured:
            self.started = self._learner.held_out()
            self._compare(0, self.started)
        done = len(self.metrics)
        saved, taken = time.monotonic(), 0.0
        self._begun = saved - (self.metrics[-1].seconds if self.metrics else 0.0)
        # A snapshot needs all processes, which an interrupt may find at different points.
        alone = self._spread.count == 1
        try:
            self._measure()
            for step in self._watch.track(range(len(self.metrics), self._settings.steps)):
                self._step(step)
                self._measure()
                self._watch.on_step(self.metrics)
                now = time.monotonic()
                due = self._spread.rank == 0 and now - saved > max(_SNAPSHOT_SECONDS, taken / _SNAPSHOT_SHARE)
                if self._spread.sums([due])[0]:  # the first process's clock decides
                    self._snapshot()
                    saved = time.monotonic()
                    taken = saved - now
        except KeyboardInterrupt:
            if alone and len(self.metrics) > done:
                self._optimizer.forget()
                self._snapshot()
            raise
        if len(self.metrics) > done:
            self._snapshot()
        if self._average:
            self._optimizer.adopt(self._average)
            if self._measured:
                self.metrics[-1] = replace(self.metrics[-1], held_out=self._learner.held_out())
        if self.best is not None:
            self._optimizer.adopt(self.best.weights)
        return {name: each.detach() for name, each in self._optimizer.masters.items()}

    @property
    def ended(self) -> dict[str, float] | None:
        """Held-out losses of the result."""
        return self.metrics[-1].held_out if self.best is None else self.best.losses

    def _masters(self) -> dict[str, Tensor]:
        return {name: master.detach().clone() for name, master in self._optimizer.masters.items()}

    def _measure(self) -> None:
        """The held-out loss after the last step, if it is wanted and not known, as after an interrupt."""
        if not self.metrics:
            return
        last = self.metrics[-1]
        at_end = self._average and last.step == self._settings.steps  # of the average, later
        if last.step in self._measured and last.held_out is None and not at_end:
            found = self._learner.held_out()
            # Both or neither: a snapshot does not ask again for what is known.
            with waiting_interrupts():
                self.metrics[-1] = replace(last, held_out=found, seconds=time.monotonic() - self._begun)
                self._compare(last.step, found)

    @torch.no_grad()
    def _compare(self, step: int, losses: dict[str, float]) -> None:
        """Keep the current weights if they are the best so far."""
        best, judge = self.best, self._settings.judge
        if best is None or judge is None or (best.losses is not None and not judge(losses) < judge(best.losses)):
            return
        best.step, best.losses = step, losses
        for name, kept in best.weights.items():
            kept.copy_(self._optimizer.masters[name])

    def _step(self, step: int) -> None:
        settings, batch = self._settings, self._batch_at(step)
        count, numel = self._spread.sums([batch.weight, batch.tokens.numel()])
        loss, parts = 0.0, dict[str, float]()
        for part in batch.parts(settings.parts):
            share = part.weight / max(count, 1e-12)
            value, named = self._learner.loss(part)
            (value * (share * self._spread.count)).backward()  # gradients are averaged over processes
            self._optimizer.collect()
            loss += float(value.detach()) * share
            for name, each in named.items():
                parts[name] = parts.get(name, 0.0) + each * share
        loss, *totals = self._spread.sums([loss, *parts.values()])
        parts = dict(zip(parts, totals, strict=True))
        rate = settings.rate * rate_at(settings.schedule, step, settings.steps, settings.warmup)
        norm = self._optimizer.clip(settings.clip)
        if not math.isfinite(loss) or (not math.isfinite(norm) and settings.spike is None):
            raise TrainingError(f"step {step + 1}: the loss is {loss:g} and its gradient {norm:g}", batch)
        skipped = self._is_spike(norm)
        read = (self.metrics[-1].tokens if self.metrics else 0) + round(numel)
        if skipped:
            self._optimizer.forget()
            if all(each.skipped for each in self.metrics[-_SKIPPED_IN_A_ROW:]) and step >= _SKIPPED_IN_A_ROW:
                text = f"step {step + 1}: {_SKIPPED_IN_A_ROW} steps in a row were gradient spikes"
                raise TrainingError(text, batch)
        # Weights, moments and metrics are of one step, whenever an interrupt comes.
        with waiting_interrupts():
            if not skipped:
                self._optimizer.step(rate)
                self._follow()
            seconds = time.monotonic() - self._begun
            self.metrics.append(StepMetrics(step + 1, read, loss, parts, rate, norm, seconds, skipped))

    def _is_spike(self, norm: float) -> bool:
        if self._settings.spike is None:
            return False
        usual = [each.norm for each in self.metrics[-_REMEMBERED:] if not each.skipped and each.norm > 0]
        if not math.isfinite(norm):
            return True
        return len(usual) >= _FEWEST_REMEMBERED and norm > self._settings.spike * statistics.median(usual)

    @torch.no_grad()
    def _follow(self) -> None:
        decay = self._settings.average
        if decay is None:
            return
        # At first an average of few steps, so that the initial weights are soon forgotten.
        done = len(self.metrics) + 1
        decay = min(decay, done / (done + 10))
        for name, kept in self._average.items():
            kept.lerp_(self._optimizer.masters[name], 1 - decay)

    def _snapshot(self) -> None:
        tensors = self._optimizer.state() | self._kept()
        rows = {key: found for key in tensors if (found := self._optimizer.rows(key)) is not None}
        data: dict[str, Any] = {"started": self.started, "metrics": [asdict(each) for each in self.metrics]}
        if self.best is not None:
            data["best"] = {"step": self.best.step, "losses": self.best.losses}
        self._store.save(tensors, rows, data)

    def _resume(self, saved: Saved, data: dict[str, Any]) -> None:
        self.started = data["started"]
        self.metrics = [StepMetrics(**each) for each in data["metrics"]]
        self._optimizer.load(saved)
        if self.best is not None:
            self.best.step, self.best.losses = data["best"]["step"], data["best"]["losses"]
        for key, kept in self._kept().items():
            found = saved(key, self._optimizer.rows(key))
            assert found is not None
            kept.copy_(found)

    def _kept(self) -> dict[str, Tensor]:
        """Weights beside the optimizer's, by the names of snapshots."""
        found = {f"averaged.{name}": each for name, each in self._average.items()}
        return (
            found if self.best is None else found | {f"best.{name}": each for name, each in self.best.weights.items()}
        )
