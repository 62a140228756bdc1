"""One training, from a recipe's section to weights: text, teacher, trainer, snapshots and its record in the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...models.structure.open_model import OpenModel
from ...system.errors import SmeltError
from ...system.storage.digests import digest
from ..losses.attention_matching import AttentionMatching, NotSeenError
from ..losses.functions import functions_for
from ..losses.hidden_matching import HiddenMatching, paired
from ..settings import Training
from ..training.batches import ShuffledWindows, TrainingBatch
from ..training.objective import ATTENTION, DIVERGENCE, HIDDEN, TEXT, Distilling
from ..training.optimizer import MasterAdamW, Trained
from ..training.sharded import ShardedModule, Sharding
from ..training.teachers import Comparison, ReadingTeacher, StoredTeacher, Teacher
from ..training.trainer import Trainer, TrainingError
from .cached_teacher import CachedTeacherLogits
from .sharding import sharded
from .snapshots import Snapshots
from .student import WholeModel
from .text_writer import Writer
from .training_log import TrainingLog, continued, curve
from .training_parts import (
    TrainingPlace,
    again,
    by_the_first,
    failed,
    held_out_of,
    judged,
    trainer_settings,
    watch_of,
    windows_of,
)
from .training_text import WindowsFile
from .written_text import OnPolicy

# When prompts are continued, and which part of them.
_SAMPLED = (0.0, 0.5, 1.0)
_PROMPTS, _PROMPT_TOKENS, _CONTINUED_TOKENS = 2, 16, 32


@dataclass(frozen=True)
class Outcome:
    """The result of a training.

    Attributes:
        weights: in float32, by name; only in the first process.
        training: the curve and samples, as plain data for the report.
        sentences: the same in sentences; first that it made the model worse, if it did.
    """

    weights: dict[str, Tensor]
    training: dict[str, Any]
    sentences: list[str]


def train(
    settings: Training,
    student: WholeModel,
    trained: dict[str, Trained],
    teacher: OpenModel | None,
    tokenizer: PreTrainedTokenizerBase,
    place: TrainingPlace,
) -> Outcome:
    """Train a student, or continue an interrupted training.

    Args:
        settings: the recipe's section.
        student: the model to train; it has the resulting weights afterwards, with several processes only in the first.
        trained: its parameters, by name.
        teacher: the teacher; None to learn from the text alone.
        tokenizer: of both models.
        place: where it runs.

    Raises:
        SmeltError: training cannot continue.
    """
    with sharded(place.processes) as spread:
        return _train(settings, student, trained, teacher, tokenizer, place, spread)


def _train(
    settings: Training,
    student: WholeModel,
    trained: dict[str, Trained],
    teacher: OpenModel | None,
    tokenizer: PreTrainedTokenizerBase,
    place: TrainingPlace,
    spread: Sharding,
) -> Outcome:
    windows = windows_of(settings, student.vocabulary, teacher, tokenizer, place)
    cached = None if teacher is None or settings.stored is None else _cached(settings, windows, teacher, student, place)
    reading = None
    if teacher is not None and cached is None:
        reading = WholeModel(again(teacher), place.dtype, place.device)
    matched = {} if reading is None else _matched(settings, student, reading, place.device)
    for kind, (module, _) in matched.items():
        trained = trained | {f"projection.{kind}.{name}": Trained(each) for name, each in module.named_parameters()}
    stage = ShardedModule(student.module, *(module for module, _ in matched.values()))
    trained = spread.over(stage, student.in_order, trained)
    kept = windows.read(windows.held_out())
    learner = Distilling(
        student.split,
        _teacher(settings, reading, cached, place.device, spread),
        text_share=settings.cross_entropy,
        matched=matched,
        kept=held_out_of(windows, place.device, spread),
        stage=stage,
        spread=spread,
        functions=functions_for(place.device),
    )
    others = None if spread.count == 1 else spread
    optimizer = MasterAdamW(trained, settings.weight_decay, small_states=settings.small_states, others=others)
    log = TrainingLog(place.log, place.name, settings.steps) if spread.rank == 0 else None
    samples = _Samples(student, stage, tokenizer, kept, settings.steps, place)
    store = Snapshots(place.journal, spread, samples.written)
    batch_at = _batches(settings, windows, student, teacher, place, spread, stage)
    watch = watch_of(settings, place, log, samples.after)
    trainer = Trainer(learner, optimizer, batch_at, trainer_settings(settings), store, watch, spread)
    if store.is_new:
        samples.after(0)
    try:
        pieces = trainer.run()
        samples.after(settings.steps)
        weights = spread.gathered(pieces, trained)
        spread.undone(stage)
    except NotSeenError as error:
        raise SmeltError(f"attention cannot be compared: {error}; remove attention from the recipe") from None
    except TrainingError as error:
        raise failed(error, place, spread) from None
    finally:
        if log is not None:
            log.write(trainer.metrics)
            log.close()
    weights = {name: each for name, each in weights.items() if not name.startswith("projection.")}
    return Outcome(weights, _record(trainer, samples), _sentences(settings, windows, trainer))


def _cached(
    settings: Training, windows: WindowsFile, teacher: OpenModel, student: WholeModel, place: TrainingPlace
) -> CachedTeacherLogits:
    """The teacher's top logits for all windows; those not stored by an earlier run are computed now."""
    assert settings.stored is not None
    vocabulary = min(teacher.vocabulary(), student.vocabulary)
    home = _home_of_cache(settings, windows, teacher, vocabulary, place)
    cached = CachedTeacherLogits(home, windows, settings.stored, vocabulary)
    by_the_first(
        place,
        lambda: cached.compute(
            lambda: WholeModel(again(teacher), place.dtype, place.device), settings.temperature, place.progress
        ),
    )
    return cached


def _batches(
    settings: Training,
    windows: WindowsFile,
    student: WholeModel,
    teacher: OpenModel | None,
    place: TrainingPlace,
    spread: Sharding,
    stage: ShardedModule,
) -> Callable[[int], TrainingBatch]:
    """This process's batch of each step."""
    order = ShuffledWindows(windows.batch, windows.count, settings.batch, place.seed)
    on_policy = None
    if settings.data.writer == "student":
        directory = student.directory
        writer = Writer(
            directory.path,
            place.device,
            settings.length,
            settings.batch,
            student.vocabulary if teacher is None else min(student.vocabulary, teacher.vocabulary()),
            trust_remote_code=directory.trust_remote_code,
        )
        on_policy = OnPolicy(student, writer, settings.data, place.seed, lambda: spread.whole(stage))

    def batch_at(step: int) -> TrainingBatch:
        batch = spread.share(order.at(step))
        if on_policy is not None:
            batch = on_policy.instead(batch, step, spread.first_window(settings.batch))
        return batch.on(place.device)

    return batch_at


def _record(trainer: Trainer, samples: _Samples) -> dict[str, Any]:
    """The training's part of the report."""
    return {
        "curve": curve(trainer.started, trainer.metrics),
        "samples": samples.written,
        "tokens": trainer.metrics[-1].tokens,
        "skipped": sum(each.skipped for each in trainer.metrics),
    }


def _teacher(
    settings: Training,
    reading: WholeModel | None,
    cached: CachedTeacherLogits | None,
    device: torch.device,
    spread: Sharding,
) -> Teacher | None:
    if cached is not None:
        found, functions = cached.find, functions_for(device)

        def find(numbers: Tensor) -> tuple[Tensor, Tensor]:
            places, kept = found(numbers)
            return places.to(device), kept.to(device)

        return StoredTeacher(settings.loss.method, find, settings.temperature, cached.vocabulary, functions)
    if reading is None:
        return None
    comparison = Comparison(settings.loss.method, settings.loss.settled(), settings.temperature, functions_for(device))
    stage = ShardedModule(reading.module)
    if spread.shards > 1:
        spread.over(stage, reading.in_order, {})
    return ReadingTeacher(reading.split, comparison, stage)


def _home_of_cache(
    settings: Training, windows: WindowsFile, teacher: OpenModel, vocabulary: int, place: TrainingPlace
) -> Path:
    """Where a teacher's stored logits are kept: in this run's files, or where other runs find them."""
    if settings.stored_at is None or teacher.weights is not teacher.stored:  # an adapter, which its name does not show
        return place.journal
    known_by = {
        "teacher": teacher.stored.content_digest(),
        "configuration": teacher.directory.config_data(),
        "text": windows.fingerprint(),
        "stored": settings.stored,
        "temperature": settings.temperature,
        "vocabulary": vocabulary,
        "dtype": str(place.dtype),
    }
    return Path(settings.stored_at) / digest(known_by)


def _matched(
    settings: Training, student: WholeModel, teacher: WholeModel, device: torch.device
) -> dict[str, tuple[HiddenMatching | AttentionMatching, float]]:
    """The internal comparisons of both models, and their weights."""
    blocks = [list(each.blocks) for each in (student, teacher)]
    pairs = paired(len(blocks[0]), len(blocks[1]))
    found: dict[str, tuple[HiddenMatching | AttentionMatching, float]] = {}
    if settings.hidden:
        hidden = HiddenMatching(blocks[0], blocks[1], pairs, (student.hidden_size, teacher.hidden_size))
        found[HIDDEN] = hidden.to(device), settings.hidden
    if settings.attention:
        heads = [(student.heads[i], teacher.heads[j]) for i, j in pairs]
        attention = AttentionMatching(blocks[0], blocks[1], pairs, heads)
        found[ATTENTION] = attention.to(device), settings.attention
    return found


# Nats a token: beyond what a model that knows nothing of its vocabulary has by far.
_DIVERGED = 100.0


# A loss that is so much larger at the end is no chance of a few held-out windows, which are the same ones.
_WORSE = 1.02


def _sentences(settings: Training, windows: WindowsFile, trainer: Trainer) -> list[str]:
    last = trainer.metrics[-1]
    epochs = last.tokens / (settings.length * windows.count)
    sentence = f"trained on {last.tokens:,} tokens of {settings.data.text().label} ({epochs:.3g} times {windows.count} windows)"
    before, after = trainer.started or {}, trainer.ended or {}
    if not after.get(TEXT, 0.0) < _DIVERGED:
        raise SmeltError(
            f"training diverged: its loss on held-out text is {after[TEXT]:.4g} at the end"
            f"{f', and was {before[TEXT]:.4g} before' if TEXT in before else ''}; start over with --fresh and a lower learning_rate, or with clip"
        )
    if DIVERGENCE in before and DIVERGENCE in after:
        sentence += (
            f"; on held-out text, {settings.loss.method} from the teacher went from {before[DIVERGENCE]:.3g} to"
            f" {after[DIVERGENCE]:.3g}"
        )
    if TEXT in before and TEXT in after:
        sentence += f"{',' if DIVERGENCE in before else '; on held-out text,'} perplexity from"
        sentence += f" {math.exp(before[TEXT]):.4g} to {math.exp(after[TEXT]):.4g}"
    if trainer.best is not None and trainer.best.step < last.step:
        sentence += f"; the weights after step {trainer.best.step} are kept, which were the best"
    skipped = sum(each.skipped for each in trainer.metrics)
    sentence += f"; {skipped} steps were skipped as gradient spikes" if skipped else ""
    was, became = judged(settings, before), judged(settings, after)
    if not before or not after or became <= _WORSE * was:
        return [sentence]
    worse = (
        f"training made the model worse: its loss on held-out text was {was:.3g} before and is {became:.3g}; lower"
        " learning_rate, train on more text, or leave training out"
    )
    return [worse, sentence]


class _Samples:
    """The student's continuations of a few prompts at the start, half way and at the end."""

    def __init__(
        self,
        student: WholeModel,
        stage: ShardedModule,
        tokenizer: PreTrainedTokenizerBase,
        kept: Tensor,
        steps: int,
        place: TrainingPlace,
    ) -> None:
        self.written: list[dict[str, Any]] = []
        self._student, self._stage, self._tokenizer = student, stage, tokenizer
        self._prompts = kept[:_PROMPTS, :_PROMPT_TOKENS].to(place.device)
        self._count = _CONTINUED_TOKENS
        if student.context is not None:
            self._prompts = self._prompts[:, : max(1, student.context // 2)]
            self._count = min(self._count, student.context - self._prompts.shape[1])
        self._at = {round(share * steps) for share in _SAMPLED}

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Generate samples, if due."""
        if step not in self._at or not len(self._prompts) or any(each["step"] == step for each in self.written):
            return
        split = self._student.split

        def last(tokens: Tensor) -> Tensor:
            hidden = split.hidden(tokens)[:, -1:]
            return split.logits(hidden, split.head.weight, split.head.bias)[:, -1]

        tokens = continued(lambda tokens: self._stage(lambda: last(tokens)), self._prompts, self._count)
        length = self._prompts.shape[1]
        texts = [
            {"prompt": self._tokenizer.decode(each[:length]), "text": self._tokenizer.decode(each[length:])}
            for each in tokens
        ]
        self.written.append({"step": step, "texts": texts})
