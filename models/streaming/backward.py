"""Gradients through a model of any size: every block's inputs are kept on disk, then blocks are visited from the last one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...system.storage.activation_store import ActivationStore
from .streamed import LOGIT_TOKENS, HeadFunction, StreamedModel


class KeptPass:
    """A forward pass that keeps the inputs of every stage.

    Args:
        streamed: the model.

    Attributes:
        stores: what each block reads, then what the head reads.
    """

    def __init__(self, streamed: StreamedModel) -> None:
        self._streamed = streamed
        self.stores: list[ActivationStore] = []

    def begin(self, tokens: Tensor) -> None:
        """Embed windows ``[windows, length]``."""
        self.stores.append(self._streamed.embed(tokens))

    def forward(self, index: int) -> None:
        """Run all windows through a block, and keep its outputs in addition to its inputs."""
        before = self.stores[-1]
        after = before.beside(before.shape[2])
        self.stores.append(after)
        with self._streamed.block(index) as block:
            self._streamed.run_block(index, block, before, after)

    def head_backward(
        self, function: HeadFunction, flow: ActivationStore, ascent: Callable[[Tensor, slice], Tensor]
    ) -> None:
        """Write the gradients of the last block's outputs.

        Args:
            function: the head.
            flow: where gradients are written.
            ascent: maps the logits of some windows to the gradient of the measured quantity.
        """
        for batch in self.stores[-1].batches(LOGIT_TOKENS):
            hidden = self.stores[-1].read(batch).requires_grad_()
            with torch.enable_grad():
                logits = function.traced(hidden)
            wanted = ascent(logits.detach(), batch).to(logits.dtype)
            (gradient,) = torch.autograd.grad(logits, hidden, wanted)
            flow.write(batch, gradient)

    def block_backward(self, index: int, block: nn.Module, flow: ActivationStore) -> None:
        """Replace the gradients of a block's outputs by those of its inputs."""
        store = self.stores[index]
        for batch in store.batches():
            hidden = store.read(batch).requires_grad_()
            with torch.enable_grad():
                out = self._streamed.call(index, hidden).run(block, hidden)
            (gradient,) = torch.autograd.grad(out, hidden, flow.read(batch))
            flow.write(batch, gradient)

    def close(self) -> None:
        """Drop what is kept."""
        for store in self.stores:
            store.close()
