"""Rotations of a model learned from the inputs of its linears, with one block in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.steps.block_loop import BlockJob, BlockResult, run_forward
from ...models.steps.parts import block_files, load_part
from ...models.steps.step import RunContext
from ...models.streaming.streamed import StreamedModel
from ...models.structure.open_model import OpenModel
from ...system.hardware.resources import Cost
from ...system.processes.process_group import Processes
from ...system.storage.activation_store import ActivationStore
from ...system.storage.tensor_files import save_tensors
from ..layer_stats import SAMPLE_ROWS, LayerStats
from ..transforms.learned_rotation import learn_rotation
from ..transforms.links import weight_rows
from ..transforms.rotated_model import ModelRotation, Residual, rotated
from ..transforms.rotation import Rotation
from .block_passes import BlockPasses

# Tokens that are read, and elements kept as a sample of the hidden states: a quarter of a gigabyte.
_TOKENS = 8192
_SAMPLE_NUMBERS = 1 << 26
_FILE, _ROWS = "rotations.safetensors", "rows."


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
    path, inputs = context.journal / _FILE, context.journal / "rotation-inputs"

    def learn() -> tuple[dict[str, Tensor], None]:
        if not path.exists():
            inputs.mkdir(parents=True, exist_ok=True)
            matrices = _Learning(model, residual, start, steps, seed, context, inputs).matrices()
            save_tensors(path, {name: matrix.contiguous() for name, matrix in matrices.items()})
        shutil.rmtree(inputs, ignore_errors=True)
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
    # A step multiplies its rows forwards and backwards, solves for Cayley's transform and multiplies by it.
    step = 3 * 2 * min(rows, 2048) * width**2 + 8 * width**3
    heads = sum(3 * 2 * SAMPLE_ROWS * width * block.heads.width for block in residual.blocks if block.heads)
    memory = 4 * (2 * rows * width + 4 * 2048 * width) + 8 * 6 * width**2
    return Cost(
        max(memory, 4 * 4 * model.largest_block()),
        4 * (tokens + rows) * width,
        steps * (step + heads) + 2 * 2 * sum(model.block_numels) * tokens,
    )


class _Learning(BlockJob):
    """Learns the rotation of each block's value heads, keeps a sample of the hidden states, and learns theirs at the end."""

    description = "reading what is rotated"

    def __init__(
        self,
        model: OpenModel,
        residual: Residual,
        start: ModelRotation,
        steps: int,
        seed: int,
        context: RunContext,
        journal: Path,
    ) -> None:
        self._residual, self._start, self._steps, self._seed = residual, start, steps, seed
        # With norms folded, all readers read the hidden states up to their norm.
        self._folded = rotated(model, residual, ModelRotation.none(residual))
        windows = -(-_TOKENS // context.tokens.shape[1])
        self._context = replace(context, tokens=context.tokens[:windows], processes=Processes())
        self._streamed = StreamedModel(self._folded.skeleton, self._folded.weights, context.dtype, context.journal)
        self.files = self._parts = block_files(journal, len(self._streamed))

    def matrices(self) -> dict[str, Tensor]:
        """``hidden``, and ``heads.0`` and so on."""
        run_forward(self, self._streamed, self._context)
        found: dict[str, Tensor] = {}
        rows: list[Tensor] = []
        for file in self._parts:
            for name, tensor in sorted(load_part(file).items()):
                if name.startswith(_ROWS):
                    rows.append(tensor)
                else:
                    found[name] = tensor
        if self._start.hidden is not None and rows:
            found["hidden"] = learn_rotation(
                self._start.hidden.matrix(),
                torch.cat(rows),
                self._steps,
                self._seed,
                keep_ones=self._residual.centred,
                track=lambda numbers: self._context.progress.track(numbers, "learning the rotation", self._steps),
            )
        return found

    def restore(self, index: int, stored: dict[str, Tensor]) -> AbstractContextManager[nn.Module]:
        return self._streamed.block(index)

    @contextmanager
    def work(self, index: int, store: ActivationStore) -> Iterator[BlockResult]:
        residual, rotation = self._residual.blocks[index], self._start.heads[index]
        anatomy, streamed = self._folded.anatomy.blocks[index], self._streamed
        found: dict[str, Tensor] = {}
        reading = [link.groups[0] for link in residual.norms if link.groups]
        of_heads = residual.heads.reader if residual.heads is not None and rotation is not None else None
        wanted = [
            group
            for group in anatomy.groups
            if of_heads in group.linears or any(set(group.linears) & set(other.linears) for other in reading)
        ]
        most = max(1, _SAMPLE_NUMBERS // self._folded.skeleton.hidden_size // (2 * len(streamed)))
        with streamed.block(index) as block:
            passes = BlockPasses(block, anatomy, store, partial(streamed.call, index), store.tokens, Processes())
            for group, stats in passes.statistics(wanted):
                weights = [block.get_submodule(name) for name in group.linears]
                weighed = _weighed(stats, torch.cat([weight_rows(module) for module in weights]))
                if of_heads in group.linears:
                    assert rotation is not None
                    heads = learn_rotation(rotation.matrix(), weighed, self._steps, self._seed)
                    found[f"heads.{index}"] = heads.contiguous()
                else:
                    # A copy: a view would keep all of them.
                    found[f"{_ROWS}{len(found):03d}"] = weighed[:: max(1, -(-len(weighed) // most))].clone()
            yield BlockResult(found, advance=passes.advance)


def _weighed(stats: LayerStats, weight: Tensor) -> Tensor:
    """Sampled inputs, scaled so that an error counts as it does in the layer's outputs, relative to these."""
    rows, weight = stats.rows.float(), weight.float()
    size = (rows @ weight.T).square().sum(-1).mean()
    return rows * (weight.square().sum() / size.clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
