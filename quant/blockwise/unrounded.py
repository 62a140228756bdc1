"""Inputs of linears in the unrounded model, stored for comparison with those in the quantized model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn

from ...models.structure.block_calls import BlockCall
from ...system.processes.process_group import Processes
from ...system.storage.activation_store import ActivationStore
from ..activations import rounded_inputs
from ..layer_stats import StatsCollector


class UnroundedInputs:
    """The inputs of some linears of one block, on disk.

    Routed tokens are not stored: they may take another route once the block's inputs change.

    Args:
        linears: names within the block, and how their inputs are rounded at run time, if at all.
        processes: this one and those that see other windows.
    """

    def __init__(self, linears: Mapping[str, QuantizationArgs | None], processes: Processes) -> None:
        self._linears = linears
        self._processes = processes
        self._kept: dict[str, ActivationStore] = {}
        self._known: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._linears)

    def __contains__(self, linear: str) -> bool:
        return linear in self._known

    def record(
        self,
        block: nn.Module,
        call: Callable[[Tensor], BlockCall],
        entering: ActivationStore,
        leaving: ActivationStore | None = None,
    ) -> None:
        """Run all windows through the block and store the inputs of its linears.

        Args:
            block: the block, not rounded yet.
            call: how the model calls it.
            entering: the outputs of the unrounded blocks before it.
            leaving: gets this block's outputs, if wanted.
        """
        current: list[slice] = []

        def hook_of(linear: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
                batch = current[0]
                shape = (batch.stop - batch.start, entering.shape[1], inputs[0].shape[-1])
                if inputs[0].shape == shape:
                    if linear not in self._kept:
                        self._kept[linear] = entering.beside(shape[-1])
                    self._kept[linear].write(batch, inputs[0])

            return hook

        with ExitStack() as held:
            for linear in self._linears:
                held.callback(block.get_submodule(linear).register_forward_pre_hook(hook_of(linear)).remove)
            for batch in entering.batches():
                current[:] = [batch]
                hidden = entering.read(batch)
                out = call(hidden).run(block, hidden)
                if leaving is not None:
                    leaving.write(batch, out)
        # A process without windows stores nothing, but must take part in the same sums as the others.
        kept = self._processes.all_gather({linear: torch.zeros(0) for linear in self._kept})
        self._known = {linear for each in kept for linear in each}

    def add(self, collector: StatsCollector, linear: str, inputs: Tensor, batch: slice) -> None:
        """Pass a linear's current inputs and those in the unrounded model to a collector."""
        add_compared(collector, inputs, self._kept[linear].read(batch), self._linears[linear])

    def close(self) -> None:
        """Drop what was kept."""
        for store in self._kept.values():
            store.close()
        self._kept.clear()


def add_compared(
    collector: StatsCollector, inputs: Tensor, unrounded: Tensor, rounding: QuantizationArgs | None
) -> None:
    """Pass a collector the inputs as the runtime will round them, where that needs no calibration, and the unrounded model's."""
    computed = inputs if rounding is None or rounding.dynamic is not True else rounded_inputs(inputs, rounding)
    collector.add(inputs, computed, unrounded)
