"""What the loss would gain or lose without a unit, to first order (Molchanov et al., 2017, arXiv:1611.06440)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...models.streaming.backward import KeptPass
from ...models.streaming.streamed import StreamedModel
from ...models.structure.open_model import OpenModel
from ...system.activation_store import ActivationStore
from ...system.processes import Processes
from ...system.progress import Progress
from ...system.resources import release_freed_memory
from ..structure.axes import Axis


def first_order(
    model: OpenModel, axis: Axis, streamed: StreamedModel, tokens: Tensor, processes: Processes, progress: Progress
) -> dict[str, Tensor]:
    """For each reader of an axis and each of its units: the sum over tokens of ``|activation x gradient|``.

    Args:
        model: whose units they are.
        axis: the units.
        streamed: the same model, to compute with.
        tokens: windows of text, ``[windows, length]``; the gradient is that of the loss of their next tokens.
        processes: this one and those that see other windows.
        progress: shows how far it is.
    """
    sums = {reader: torch.zeros(axis.units, dtype=torch.float64) for reader in axis.readers}

    @contextmanager
    def watching(index: int, block: nn.Module) -> Iterator[None]:
        name = model.anatomy.blocks[index].name
        with ExitStack() as hooks:
            for reader in axis.of_block(name):
                module = block.get_submodule(reader.removeprefix(f"{name}."))
                hook = _watching(sums[reader], axis.columns)
                hooks.callback(module.register_forward_pre_hook(hook).remove)
            yield

    _backwards(streamed, tokens, progress, watching, lambda hidden, flow: None)
    for each in sums.values():
        processes.sum_(each)
    return {reader: each.float() for reader, each in sums.items()}


def first_order_of_stream(streamed: StreamedModel, tokens: Tensor, processes: Processes, progress: Progress) -> Tensor:
    """For each channel of the residual stream: the sum of ``|activation x gradient|`` over tokens and all that leaves a block."""
    sums = torch.zeros(streamed.skeleton.hidden_size, dtype=torch.float64)

    def add(hidden: ActivationStore, flow: ActivationStore) -> None:
        for batch in hidden.batches():
            moved = hidden.read(batch).float() * flow.read(batch).float()
            sums.add_(moved.abs().flatten(0, -2).sum(0).to(sums.device))

    _backwards(streamed, tokens, progress, lambda index, block: nullcontext(), add)
    processes.sum_(sums)
    return sums.float()


def _backwards(
    streamed: StreamedModel,
    tokens: Tensor,
    progress: Progress,
    watching: Callable[[int, nn.Module], AbstractContextManager[None]],
    arrived: Callable[[ActivationStore, ActivationStore], None],
) -> None:
    """Follow the gradient of the loss of the next tokens through all blocks.

    Args:
        streamed: the model.
        tokens: windows of text.
        progress: shows how far it is.
        watching: is entered while gradients go through a block.
        arrived: is told what left each block, and its gradient.
    """

    def descent(logits: Tensor, batch: slice) -> Tensor:
        chances = logits.float().softmax(-1)
        following = tokens[batch, 1:, None].to(chances.device)
        chances[:, :-1].scatter_add_(-1, following, -torch.ones_like(following, dtype=chances.dtype))
        chances[:, -1] = 0
        return chances

    kept, flow = KeptPass(streamed), None
    try:
        kept.forward(tokens, progress, "reading the original")
        flow = kept.stores[-1].beside(kept.stores[-1].shape[2])
        kept.head_backward(streamed.head(), flow, descent)
        backwards = list(reversed(range(len(streamed))))
        for index in progress.track(backwards, "following gradients", len(backwards)):
            release_freed_memory()
            arrived(kept.stores[-1], flow)
            with streamed.block(index) as block, watching(index, block):
                kept.block_backward(index, block, flow)
            kept.stores.pop().close()  # what only a later block reads
    finally:
        kept.close()
        if flow is not None:
            flow.close()


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
