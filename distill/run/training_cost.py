"""Common to all steps that train: where training runs, and its cost in memory, disk and operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...models.steps.step import RunContext
from ...models.structure.open_model import OpenModel
from ...system.hardware.resources import Cost, compute_dtype
from ..losses.chunked import rows_at_once
from ..settings import Training, TrainQuantized
from .training_parts import TrainingPlace

# Activations of a block kept by autograd, as a factor of its linears' inputs and outputs.
_KEPT = 1.5
# Buffers of a chunk of logits: both models', probabilities and gradients, in float32.
_LOGITS = 6


def training_place(context: RunContext) -> TrainingPlace:
    """Where a step trains: its files next to the step's other parts, its logs in the output."""
    return TrainingPlace(
        context.journal,
        context.journal.parent.parent,
        f"step-{context.number}",
        context.dtype,
        context.seed,
        context.progress,
        context.processes,
    )


def training_cost(
    settings: Training,
    student: OpenModel,
    teacher: OpenModel | None,
    rounded: Sequence[str] = (),
    nested: Sequence[str] = (),
    *,
    on_gpu: bool = False,
) -> Cost:
    """Memory above the process's start, disk for text and snapshots, and operations.

    Args:
        settings: the recipe's section.
        student: the model that is trained.
        teacher: the model that runs alongside, if any.
        rounded: its linears that are rounded at every step.
        nested: those of which the upper bits are trained, and nothing else is; their original weights are kept, too.
        on_gpu: whether it is trained in GPU memory, which is not planned; snapshots and the result then use main memory.
    """
    itemsize = compute_dtype(student.dtype).itemsize
    numel = trained = _numel(student)
    rank = settings.lora if isinstance(settings, TrainQuantized) else None
    upper = sum(student.linears[name].rows * student.linears[name].columns for name in nested)
    if nested:
        trained = upper
    if rank is not None:
        facts = [student.linears[name] for name in nested or rounded]
        # Their scales, too, of which there is one for 32 weights at most.
        trained = sum(rank * (each.rows + each.columns) + each.rows * each.columns // 32 for each in facts)
    moments = 2 if settings.small_states else 8
    master = 4 if itemsize < 4 or rounded else 0
    result = 4 if settings.average is not None or settings.keep == "best" else 0
    latent = sum(student.linears[name].rows * student.linears[name].columns for name in rounded)
    held = numel * 2 * itemsize + trained * (master + 4 + moments + result) + (4 * latent if rank is not None else 0)
    held += upper * itemsize
    if teacher is not None and settings.stored is None:
        held += _numel(teacher) * itemsize
    tokens = settings.batch // settings.accumulate * settings.length
    width = student.skeleton.hidden_size
    passing = [
        sum(student.linears[name].rows + student.linears[name].columns for name in block.linears) * _KEPT + 6 * width
        for block in student.anatomy.blocks
    ]
    kept = sum(passing) if not settings.checkpointing else max(passing) + width * len(passing)
    vocabulary = student.vocabulary()
    logits = rows_at_once(vocabulary) * vocabulary * 4 * _LOGITS + vocabulary * width * 4
    read = settings.steps * settings.batch * settings.length
    operations = 6.0 * numel * read * (4 / 3 if settings.checkpointing else 1)
    if teacher is not None:
        operations += 2.0 * _numel(teacher) * read
    disk = 2 * trained * (4 + moments + result) + 5 * read + student.weights.nbytes
    if settings.stored is not None:
        disk += (4 if vocabulary <= 1 << 16 else 6) * settings.stored * read
    if on_gpu:
        snapshot = trained * (4 + moments + result)
        return Cost(4 * numel + snapshot, int(disk), operations, sharded=snapshot)
    # Each process holds both models whole before they are sharded.
    loaded = itemsize * (numel + (0 if teacher is None or settings.stored is not None else _numel(teacher)))
    memory = int(held + tokens * kept * itemsize + logits)
    return Cost(memory, int(disk), operations, sharded=max(0, int(held) - loaded))


def _numel(model: OpenModel) -> int:
    return sum(math.prod(model.weights.info(key).shape) for key in model.names.values())
