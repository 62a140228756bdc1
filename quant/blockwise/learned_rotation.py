"""Rotations of a model learned from the inputs of its linears, with one block in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...models.steps.block_loop import forward
from ...models.steps.parts import load_part
from ...models.steps.step import RunContext
from ...models.streaming.streamed import StreamedModel
from ...models.structure.open_model import OpenModel
from ...system.activation_store import ActivationStore
from ...system.processes import Processes
from ...system.resources import Cost
from ...system.tensor_files import save_tensors
from ..layer_stats import SAMPLE_ROWS, LayerStats
from ..transforms.learned_rotation import learn_rotation
from ..transforms.links import weight_rows
from ..transforms.rotated_model import ModelRotation, Residual, rotated
from ..transforms.rotation import Rotation
from .block_passes import BlockPasses

# Tokens that are read, and elements kept as a sample of the hidden states: a quarter of a gigabyte.
_TOKENS = 8192
_SAMPLE_NUMBERS = 1 << 26
_FILE = "rotations.safetensors"


def learned_model_rotation(
    model: OpenModel, residual: Residual, start: ModelRotation, steps: int, seed: int, context: RunContext
) -> ModelRotation:
    """Learn the rotations of hidden states and of value heads; an earlier run's are read from the journal.

    Args:
        model: the model, not rotated.
        residual: its residual stream.
        start: random rotations to start from; rotations missing there are not learned.
        steps: of descent for each rotation.
        seed: of the rows' order.
        context: the run around it.
    """
    path = context.journal / _FILE

    def learn() -> tuple[dict[str, Tensor], None]:
        if not path.exists():
            matrices = _Learning(model, residual, start, steps, seed, context).matrices()
            save_tensors(path, {name: matrix.contiguous() for name, matrix in matrices.items()})
        return load_part(path), None

    # Only in the first process: it reads a small part of the calibration text.
    matrices, _ = context.processes.broadcast(learn)
    found = {name: Rotation.dense(matrix.cpu()) for name, matrix in matrices.items()}
    heads = tuple(found.get(f"heads.{index}", head) for index, head in enumerate(start.heads))
    return ModelRotation(found.get("hidden", start.hidden), heads)


def learning_cost(model: OpenModel, residual: Residual, steps: int, tokens: int) -> Cost:
    """The cost of :func:`learned_model_rotation`."""
    width = model.skeleton.hidden_size
    tokens = min(tokens, _TOKENS)
    rows = min(_SAMPLE_NUMBERS // width, 2 * len(residual.blocks) * SAMPLE_ROWS)
    blocks = [model.block_numel(index) for index in range(len(residual.blocks))]
    # A step multiplies its rows forwards and backwards, solves for Cayley's transform and multiplies by it.
    step = 3 * 2 * min(rows, 2048) * width**2 + 8 * width**3
    heads = sum(3 * 2 * SAMPLE_ROWS * width * block.heads.width for block in residual.blocks if block.heads)
    memory = 4 * (2 * rows * width + 4 * 2048 * width) + 8 * 6 * width**2
    return Cost(
        max(memory, 4 * 4 * max(blocks)), 4 * tokens * width, steps * (step + heads) + 2 * 2 * sum(blocks) * tokens
    )


@dataclass(frozen=True)
class _Learning:
    model: OpenModel
    residual: Residual
    start: ModelRotation
    steps: int
    seed: int
    context: RunContext

    def matrices(self) -> dict[str, Tensor]:
        """``hidden``, and ``heads.0`` and so on."""
        found: dict[str, Tensor] = {}
        # With norms folded, all readers read the hidden states up to their norm.
        folded = rotated(self.model, self.residual, ModelRotation.none(self.residual))
        context = self.context
        streamed = StreamedModel(folded.skeleton, folded.weights, context.dtype, context.journal)
        windows = -(-_TOKENS // context.tokens.shape[1])
        rows: list[Tensor] = []
        with forward(streamed, context.tokens[:windows], context.progress, "reading what is rotated") as (
            store,
            blocks,
        ):
            for index in blocks:
                self._block(index, folded, streamed, store, rows, found)
        if self.start.hidden is not None and rows:
            found["hidden"] = learn_rotation(
                self.start.hidden.matrix(),
                torch.cat(rows),
                self.steps,
                self.seed,
                keep_ones=self.residual.centred,
                track=lambda numbers: context.progress.track(numbers, "learning the rotation", self.steps),
            )
        return found

    def _block(
        self,
        index: int,
        folded: OpenModel,
        streamed: StreamedModel,
        store: ActivationStore,
        rows: list[Tensor],
        found: dict[str, Tensor],
    ) -> None:
        residual, rotation = self.residual.blocks[index], self.start.heads[index]
        anatomy = folded.anatomy.blocks[index]
        reading = [link.groups[0] for link in residual.norms if link.groups]
        of_heads = residual.heads.reader if residual.heads is not None and rotation is not None else None
        wanted = [
            group
            for group in anatomy.groups
            if of_heads in group.linears or any(set(group.linears) & set(other.linears) for other in reading)
        ]
        most = max(1, _SAMPLE_NUMBERS // folded.skeleton.hidden_size // (2 * len(streamed)))
        with streamed.block(index) as block:
            passes = BlockPasses(block, anatomy, store, partial(streamed.call, index), store.tokens, Processes())
            for group, stats in passes.statistics(wanted):
                weights = [block.get_submodule(name) for name in group.linears]
                weighed = _weighed(stats, torch.cat([weight_rows(module) for module in weights]))
                if of_heads in group.linears:
                    assert rotation is not None
                    found[f"heads.{index}"] = learn_rotation(rotation.matrix(), weighed, self.steps, self.seed)
                else:
                    rows.append(weighed[:: max(1, -(-len(weighed) // most))].clone())  # a view would keep all of them
            passes.advance()


def _weighed(stats: LayerStats, weight: Tensor) -> Tensor:
    """Sampled inputs, scaled so that an error counts as it does in the layer's outputs, relative to these."""
    rows, weight = stats.rows.float(), weight.float()
    size = (rows @ weight.T).square().sum(-1).mean()
    return rows * (weight.square().sum() / size.clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
