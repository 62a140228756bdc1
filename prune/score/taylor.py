"""The change of the loss without a unit, to first order (Molchanov et al., 2017, arXiv:1611.06440)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...models.steps.block_loop import BackwardJob, run_backward
from ...models.steps.parts import tensors_once
from ...models.steps.step import RunContext
from ...models.streaming.backward import KeptPass
from ...models.streaming.streamed import StreamedModel
from ...models.structure.open_model import OpenModel
from ...system.storage.activation_store import ActivationStore
from ..structure.axes import Axis


def first_order(model: OpenModel, axis: Axis, streamed: StreamedModel, context: RunContext) -> dict[str, Tensor]:
    """For each reader of an axis and each of its units: the sum over tokens of ``|activation x gradient|``.

    The gradient is that of the next-token loss on the calibration text. Measurements of an interrupted run are reused.

    Args:
        model: the model.
        axis: the units.
        streamed: the same model, to compute with.
        context: the run.
    """

    def measure() -> dict[str, Tensor]:
        job = _OfUnits(model, axis, streamed, context)
        run_backward(job, streamed, job.tokens, context.progress)
        for each in job.sums.values():
            context.processes.sum_(each)
        return {reader: each.float().cpu() for reader, each in job.sums.items()}

    return tensors_once(context.journal / "taylor.safetensors", context.processes, measure)


def first_order_of_hidden(streamed: StreamedModel, context: RunContext) -> Tensor:
    """For each channel of the residual stream: the sum of ``|activation x gradient|`` over tokens and blocks."""
    job = _OfHidden(streamed, context)
    run_backward(job, streamed, job.tokens, context.progress)
    context.processes.sum_(job.sums)
    return job.sums.float()


class _Gradients(BackwardJob):
    """Backpropagates the next-token loss through all blocks; nothing is kept in files."""

    description = "following gradients"
    files = ()

    def __init__(self, streamed: StreamedModel, context: RunContext) -> None:
        self.tokens = context.processes.share(context.tokens)
        self._streamed = streamed

    def work(self, index: int, kept: KeptPass, flow: ActivationStore, *, finished: bool) -> None:
        if index == len(self._streamed):
            kept.head_backward(self._streamed.head(), flow, self._descent)
            return
        self.left(kept.stores[-1], flow)
        with self._streamed.block(index) as block, ExitStack() as hooks:
            self.watch(index, block, hooks)
            kept.block_backward(index, block, flow)

    def left(self, hidden: ActivationStore, flow: ActivationStore) -> None:
        """Receive a block's outputs and their gradient."""

    def watch(self, index: int, block: nn.Module, hooks: ExitStack) -> None:
        """Register hooks on a block before its backward pass."""

    def _descent(self, logits: Tensor, batch: slice) -> Tensor:
        chances = logits.float().softmax(-1)
        following = self.tokens[batch, 1:, None].to(chances.device)
        chances[:, :-1].scatter_add_(-1, following, -torch.ones_like(following, dtype=chances.dtype))
        chances[:, -1] = 0
        return chances


class _OfUnits(_Gradients):
    def __init__(self, model: OpenModel, axis: Axis, streamed: StreamedModel, context: RunContext) -> None:
        super().__init__(streamed, context)
        self._model, self._axis = model, axis
        self.sums = {reader: torch.zeros(axis.units, dtype=torch.float64) for reader in axis.readers}

    def watch(self, index: int, block: nn.Module, hooks: ExitStack) -> None:
        name = self._model.anatomy.blocks[index].name
        for reader in self._axis.of_block(name):
            module = block.get_submodule(reader.removeprefix(f"{name}."))
            hook = _watching(self.sums[reader], self._axis.columns)
            hooks.callback(module.register_forward_pre_hook(hook).remove)


class _OfHidden(_Gradients):
    def __init__(self, streamed: StreamedModel, context: RunContext) -> None:
        super().__init__(streamed, context)
        self.sums = torch.zeros(streamed.skeleton.hidden_size, dtype=torch.float64)

    def left(self, hidden: ActivationStore, flow: ActivationStore) -> None:
        for batch in hidden.batches():
            moved = hidden.read(batch).float() * flow.read(batch).float()
            self.sums.add_(moved.abs().flatten(0, -2).sum(0).to(self.sums.device))


def _watching(sums: Tensor, columns: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        read: Tensor = inputs[0]
        if not read.requires_grad or not read.numel():
            return

        def arrived(gradient: Tensor) -> None:
            moved = (read.detach().float() * gradient.float()).flatten(0, -2).unflatten(-1, (-1, columns)).sum(-1)
            sums.add_(moved.abs().sum(0).to(sums.device))

        read.register_hook(arrived)

    return hook
