"""What the loss would gain or lose without a unit, to first order (Molchanov et al., 2017, arXiv:1611.06440)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .axes import Axis
from .backward import KeptPass
from .open_model import OpenModel
from .processes import Processes
from .progress import Progress
from .resources import release_freed_memory
from .streamed import StreamedModel


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
    kept = KeptPass(streamed)
    sums = {reader: torch.zeros(axis.units, dtype=torch.float64) for reader in axis.readers}
    flow = None

    def descent(logits: Tensor, batch: slice) -> Tensor:
        chances = logits.float().softmax(-1)
        following = tokens[batch, 1:, None].to(chances.device)
        chances[:, :-1].scatter_add_(-1, following, -torch.ones_like(following, dtype=chances.dtype))
        chances[:, -1] = 0
        return chances

    try:
        kept.forward(tokens, progress, "reading the original")
        flow = kept.stores[-1].beside(kept.stores[-1].shape[2])
        kept.head_backward(streamed.head(), flow, descent)
        backwards = list(reversed(range(len(streamed))))
        for index in progress.track(backwards, "following gradients", len(backwards)):
            release_freed_memory()
            name = model.anatomy.blocks[index].name
            with streamed.block(index) as block, ExitStack() as hooks:
                for reader in axis.of_block(name):
                    module = block.get_submodule(reader.removeprefix(f"{name}."))
                    hook = _watching(sums[reader], axis.columns)
                    hooks.callback(module.register_forward_pre_hook(hook).remove)
                kept.block_backward(index, block, flow)
            kept.stores.pop().close()  # what only a later block reads
    finally:
        kept.close()
        if flow is not None:
            flow.close()
    for each in sums.values():
        processes.sum_(each)
    return {reader: each.float() for reader, each in sums.items()}


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
