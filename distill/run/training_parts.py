"""What all trainings have in common: where they run, their text, and what is shown and kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...models.structure.open_model import OpenModel
from ...system.errors import SmeltError
from ...system.processes.process_group import Processes
from ...system.progress import Progress
from ...system.storage.tensor_files import save_tensors
from ..settings import Training
from ..training.batches import TrainingBatch
from ..training.objective import DIVERGENCE, TEXT
from ..training.sharded import Sharding
from ..training.trainer import StepMetrics, TrainerSettings, TrainingError, Watch
from .student import WholeModel
from .text_writer import Writer
from .training_log import TrainingLog
from .training_text import WindowsFile, training_windows
from .written_text import written_by

T = TypeVar("T")

# How often held-out loss is measured.
_MEASURES = 11
_KEPT_WINDOWS = 4


@dataclass(frozen=True)
class TrainingPlace:
    """Where a training runs, and what it uses of the run around it.

    Attributes:
        journal: directory for text, snapshots and stored teacher logits.
        log: directory of logs for the user.
        name: of the training, in the log.
        dtype: the compute dtype.
        seed: determines the order of the text.
        progress: shows progress.
        processes: the processes that train together.
    """

    journal: Path
    log: Path
    name: str
    dtype: torch.dtype
    seed: int
    progress: Progress
    processes: Processes

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.processes.device


def windows_of(
    settings: Training,
    vocabulary: int,
    teacher: OpenModel | None,
    tokenizer: PreTrainedTokenizerBase,
    place: TrainingPlace,
) -> WindowsFile:
    """The training windows: of the text, or as continued by a teacher.

    Args:
        settings: of the training.
        vocabulary: how many tokens the student has.
        teacher: that may write.
        tokenizer: of both.
        place: where it runs.

    Raises:
        SmeltError: the text is too short, or has tokens that the student lacks.
    """
    text = settings.data.text()

    def cut() -> WindowsFile:
        path, most = place.journal / "text.bin", settings.steps * settings.batch
        return training_windows(text, tokenizer, settings.length, most, path, place.progress)

    windows = by_the_first(place, cut)
    if settings.data.writer != "text" and windows.learned(torch.arange(1)) is not None:
        raise SmeltError(
            f"{text.label}: holds messages, of which windows are no prompts; with writer: {settings.data.writer} give texts"
        )
    if windows.count < settings.batch:
        raise SmeltError(
            f"{text.label}: too short: it has {windows.count} training windows of {settings.length} tokens, less than one"
            f" batch of {settings.batch}; give more text, or lower batch or length"
        )
    if windows.largest >= vocabulary:
        raise SmeltError(
            f"{text.label}: the tokenizer produces token id {windows.largest}, but the model has only {vocabulary} tokens;"
            " the tokenizer belongs to another model"
        )
    return by_the_first(place, lambda: _as_written(settings, windows, vocabulary, teacher, place))


def watch_of(
    settings: Training, place: TrainingPlace, log: TrainingLog | None, after: Callable[[int], object] = lambda _: None
) -> Watch:
    """Shows and logs a training's progress.

    Args:
        settings: of the training.
        place: where it runs.
        log: of the first process.
        after: called after each step but the last, with its number.
    """
    latest: list[StepMetrics] = []

    def on_step(metrics: list[StepMetrics]) -> None:
        latest[:] = metrics[-1:]
        if log is not None:
            log.on_step(metrics)
        if len(metrics) < settings.steps:
            after(len(metrics))

    def track(steps: Iterable[int]) -> Iterator[int]:
        return place.progress.track(steps, lambda: "training" if log is None else log.line(latest))

    return Watch(track, on_step)


def failed(error: TrainingError, place: TrainingPlace, spread: Sharding) -> SmeltError:
    """The sentence about a training that cannot go on, whose batch is kept."""
    whose = f"-process-{spread.rank}" if spread.rank else ""
    kept_at = place.log / f"failed-batch-{place.name}{whose}.safetensors"
    save_tensors(kept_at, {"tokens": error.batch.tokens.cpu().contiguous()})
    part = "" if spread.count == 1 else ", the first process' part,"
    return SmeltError(
        f"training failed at {error}; its batch{part} is saved in {kept_at}; start over with --fresh and a lower"
        " learning_rate, with clip or with skip_spikes"
    )


def by_the_first(place: TrainingPlace, make: Callable[[], T]) -> T:
    """Run ``make``, which reuses files it wrote before, in the first process and then in the others."""
    made: list[T] = []

    def once() -> tuple[dict[str, Tensor], None]:
        made.append(make())
        return {}, None

    place.processes.broadcast(once)
    return made[0] if made else make()


def held_out_of(windows: WindowsFile, device: torch.device, spread: Sharding) -> list[TrainingBatch]:
    """This process's held-out windows, in as many batches as other processes have; all windows if too few."""
    numbers = windows.held_out()
    if len(numbers) >= spread.count:
        largest = -(-len(numbers) // spread.count)
        batches = numbers.tensor_split(spread.count)[spread.rank].tensor_split(-(-largest // _KEPT_WINDOWS))
    else:
        batches = numbers.split(_KEPT_WINDOWS)
    return [windows.batch(each).on(device) for each in batches if len(each)]


def _as_written(
    settings: Training, windows: WindowsFile, vocabulary: int, teacher: OpenModel | None, place: TrainingPlace
) -> WindowsFile:
    """The windows with the teacher's text, if the teacher generates it."""
    if settings.data.writer != "teacher" or teacher is None:
        return windows
    directory = teacher.directory

    def writer() -> Writer:
        trust = directory.trust_remote_code
        shared = min(vocabulary, teacher.vocabulary())
        made = Writer(directory.path, place.device, settings.length, 32, shared, trust_remote_code=trust)
        if teacher.weights is not teacher.stored:  # an adapter is merged on reading
            whole = WholeModel(again(teacher), place.dtype, place.device)
            made.take_weights(whole.module.config, whole.tensor_names, whole.tensor)
        return made

    return written_by(writer, settings.data, windows, place.journal / "written.bin", place.seed, place.progress)


def trainer_settings(settings: Training) -> TrainerSettings:
    """The training loop's part of the settings."""
    return TrainerSettings(
        steps=settings.steps,
        rate=settings.learning_rate,
        schedule=settings.schedule,
        # The first step of a cold optimizer is as large as its rate, whatever the gradient.
        warmup=max(bool(settings.warmup), round(settings.warmup * settings.steps)),
        parts=settings.accumulate,
        clip=settings.clip,
        average=settings.average,
        judge=partial(judged, settings) if settings.keep == "best" else None,
        spike=settings.skip_spikes,
        measures=min(_MEASURES, settings.steps + 1),
    )


def judged(settings: Training, losses: Mapping[str, float]) -> float:
    """One number of held-out losses: the teacher's and the text's, as they count in training."""
    shares = {TEXT: settings.cross_entropy, DIVERGENCE: 1 - settings.cross_entropy}
    return sum(shares[name] * losses[name] for name in shares if name in losses)


def again(model: OpenModel) -> OpenModel:
    """The same model with separate modules."""
    return OpenModel(model.directory, model.weights, untied_head=not model.is_tied, is_edited=model.is_edited)
