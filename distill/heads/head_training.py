"""One training of a draft head, from settings to weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...models.structure.open_model import OpenModel
from ...system.errors import SmeltError
from ..run.snapshots import Snapshots
from ..run.student import WholeModel
from ..run.text_writer import Writer
from ..run.training_log import TrainingLog, curve
from ..run.training_parts import (
    TrainingPlace,
    again,
    failed,
    held_out_of,
    trainer_settings,
    watch_of,
)
from ..run.training_text import WindowsFile
from ..settings import Training
from ..training.batches import ShuffledWindows, TrainingBatch
from ..training.optimizer import MasterAdamW, Trained
from ..training.sharded import Sharding
from ..training.trainer import Trainer, TrainingError
from .head_module import HeadModule, HeadShape
from .head_objective import HeadLearner, StatesBetweenLayers
from .head_text import head_windows

# EAGLE-3's, beyond which a head's lm_head takes longer to read than the rest of it.
MOST_TOKENS = 32_000


@dataclass(frozen=True)
class TrainedHead:
    """The result of a training.

    Attributes:
        module: the head, in float32.
        tokens: which of the model's tokens each of its logits is for; None for all, in their order.
        training: the curve, as plain data.
        sentence: the result in words.
    """

    module: HeadModule
    tokens: Tensor | None
    training: dict[str, Any]
    sentence: str


def train_head(
    settings: Training, model: OpenModel, place: TrainingPlace, *, vocabulary: int | None = None, ahead: int = 4
) -> TrainedHead:
    """Train a draft head for a model, or continue an interrupted training.

    Args:
        settings: of the training; of ``data`` the beginnings of what the model writes are taken.
        model: that it drafts for.
        place: where it runs.
        vocabulary: how many tokens it may draft, the most frequent of the text; None for all, and at most :data:`MOST_TOKENS`.
        ahead: how many tokens of a draft it learns.

    Raises:
        SmeltError: the text is too short, or training cannot continue.
    """
    alone = Sharding()
    tokenizer, whole = model.directory.tokenizer(), model.vocabulary()

    def writer() -> Writer:
        directory, trust = model.directory, model.directory.trust_remote_code
        return Writer(directory.path, place.device, settings.length, 32, whole, trust_remote_code=trust)

    windows = head_windows(settings, tokenizer, writer, place.journal, place.seed, place.progress)
    reading = WholeModel(again(model), place.dtype, place.device)
    tokens = _drafted_tokens(windows, whole, vocabulary)
    shape = HeadShape.of(
        reading.module.config.get_text_config(), len(reading.blocks), whole if tokens is None else len(tokens)
    )
    head = HeadModule(shape)
    table, rows = reading.module.get_input_embeddings().weight, reading.split.head.weight.float().cpu()
    if table.shape[1] != shape.config.hidden_size:
        raise SmeltError(
            f"{model.directory.path}: its embeddings are {table.shape[1]} wide and its layers {shape.config.hidden_size}; a draft head needs"
            " both alike"
        )
    head.begin(_final_norm(reading), rows if tokens is None else rows[tokens], place.seed)
    head.to(place.device)
    kept = held_out_of(windows, place.device, alone)
    on_device = None if tokens is None else tokens.to(place.device)
    learner = HeadLearner(head, StatesBetweenLayers(reading, shape.after), table, on_device, ahead, kept)
    trained = {name: Trained(parameter, decays=parameter.dim() == 2) for name, parameter in head.named_parameters()}
    optimizer = MasterAdamW(trained, settings.weight_decay, small_states=settings.small_states)
    log = TrainingLog(place.log, place.name, settings.steps)
    order = ShuffledWindows(windows.batch, windows.count, settings.batch, place.seed)

    def batch_at(step: int) -> TrainingBatch:
        batch = order.at(step)
        return batch.on(place.device)

    store = Snapshots(place.journal, alone, [])
    trainer = Trainer(learner, optimizer, batch_at, trainer_settings(settings), store, watch_of(settings, place, log))
    try:
        trainer.run()
    except TrainingError as error:
        raise failed(error, place, alone) from None
    finally:
        log.write(trainer.metrics)
        log.close()
    record = {
        "curve": curve(trainer.started, trainer.metrics),
        "tokens": trainer.metrics[-1].tokens,
        "skipped": sum(each.skipped for each in trainer.metrics),
    }
    return TrainedHead(head.cpu(), tokens, record, _sentence(settings, windows, trainer))


def drafted_tokens(whole: int, vocabulary: int | None) -> int:
    """How many tokens a head may draft."""
    return min(whole, MOST_TOKENS if vocabulary is None else vocabulary)


def _drafted_tokens(windows: WindowsFile, whole: int, vocabulary: int | None) -> Tensor | None:
    count = drafted_tokens(whole, vocabulary)
    if count == whole:
        return None
    # A stable order: those that occur equally often by their numbers.
    often = windows.counts(whole).argsort(descending=True, stable=True)
    return often[:count].sort().values


def _final_norm(model: WholeModel) -> Tensor | None:
    """The weight of the last norm before lm_head, if it is a plain RMS norm."""
    norms = [each for name, each in model.split.body.named_children() if "norm" in name]
    plain = len(norms) == 1 and getattr(norms[0], "bias", None) is None and "Gemma" not in type(norms[0]).__name__
    weight = getattr(norms[0], "weight", None) if plain else None
    return weight.float().cpu() if isinstance(weight, Tensor) else None


def _sentence(settings: Training, windows: WindowsFile, trainer: Trainer) -> str:
    last = trainer.metrics[-1]
    epochs = last.tokens / (settings.length * windows.count)
    sentence = (
        f"trained on {last.tokens:,} tokens that the model wrote after beginnings from {settings.data.text().label}"
        f" ({epochs:.3g} times {windows.count} windows)"
    )
    shares = [value for name, value in (last.held_out or {}).items() if name.startswith("accepted")]
    if shares:
        listed = ", ".join(f"{share:.1%}" for share in shares)
        sentence += f"; on such text that was held out its draft tokens would be accepted, by place, {listed} of the time after right ones"
    return sentence
