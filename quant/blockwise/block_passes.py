"""Running all calibration windows through one block repeatedly while it is being quantized.

Quantizing in order (q/k/v, then o, then gate/up, then down) needs the inputs of each linear after
the earlier ones have changed. Done naively that is five passes per block. But once the inputs of a
part's last linear have been seen, nothing before them changes any more: they are stored, and later
passes start the part from there. All passes together then cost little more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn

from ...models.directory.experts import shown_all_tokens
from ...models.streaming.streamed import HeadFunction
from ...models.structure.anatomy import BlockAnatomy, SharedInput, Tail
from ...models.structure.block_calls import BlockCall
from ...system.processes.process_group import Processes
from ...system.storage.activation_store import ActivationStore
from ..layer_stats import SAMPLE_ROWS, LayerStats, StatsCollector
from ..transforms.links import weight_rows
from .unrounded import UnroundedInputs, add_compared

# Experts of one layer are observed together as long as their statistics fit in this much memory.
_STATS_BYTES = 512 << 20


# An expert that fewer tokens than this reach is calibrated on all tokens.
_FEW = 64


class _SeenEnough(Exception):  # noqa: N818 - not an error
    """Ends a forward pass once the wanted inputs have been observed."""


class BlockPasses:
    """One block, its input windows, and the intermediate activations stored so far.

    Args:
        block: the block, with its weights loaded.
        anatomy: its anatomy.
        store: its input hidden states; :meth:`advance` replaces them by its outputs.
        call: how the model calls the block, for hidden states of a given shape.
        unrounded: inputs of linears in the unrounded model, for methods that compare with it.
        tokens: how many the windows of all processes hold.
        processes: this one and those with other windows.
    """

    def __init__(
        self,
        block: nn.Module,
        anatomy: BlockAnatomy,
        store: ActivationStore,
        call: Callable[[Tensor], BlockCall],
        tokens: int,
        processes: Processes,
        unrounded: UnroundedInputs | None = None,
    ) -> None:
        self.block = block
        self.anatomy = anatomy
        self.processes = processes
        self._tokens = tokens
        self._store = store
        self._call = call
        self._kept: dict[str, ActivationStore] = {}
        self._filling: dict[str, ActivationStore] = {}
        self._unrounded = unrounded

    def observe(
        self, groups: list[SharedInput], *, hessian: bool, energy: bool = False
    ) -> Iterator[tuple[SharedInput, LayerStats]]:
        """Collect the inputs of each group of one phase, with as many groups at a time as memory allows."""
        waves = list(self._waves(groups, hessian))
        for wave in waves:
            collectors = self._collectors(wave, hessian, energy=energy)
            self._watch(collectors, stop=len(groups) == 1)
            found = {group: collectors.pop(group).result(self.processes) for group in wave}
            few = min(_FEW, self._tokens)  # a linear that sees all of a short text is not such an expert
            rare = {group: stats for group, stats in found.items() if stats.tokens < few}
            found |= self._unreached(rare, hessian, energy=energy)
            for group in wave:
                yield group, found.pop(group)

    def _unreached(
        self, few: dict[SharedInput, LayerStats], hessian: bool, *, energy: bool
    ) -> dict[SharedInput, LayerStats]:
        """Statistics over all tokens for experts that very few tokens reached."""
        collectors = self._collectors(few, hessian, energy=energy)
        if collectors:
            with shown_all_tokens(self.block, [group.linears[0] for group in few]):
                self._watch(collectors, stop=False, keep=False)
        return {
            group: replace(collector.result(self.processes), reached=few[group].tokens)
            for group, collector in collectors.items()
        }

    def statistics(
        self, groups: list[SharedInput], *, hessian: bool = False, energy: bool = False
    ) -> Iterator[tuple[SharedInput, LayerStats]]:
        """Collect the inputs of every group before rounding. Nothing is stored for later passes, as the block may change."""
        for wave in self._waves(groups, hessian):
            collectors = self._collectors(wave, hessian, energy=energy)
            self._watch(collectors, stop=False, keep=False)
            for group in wave:
                yield group, collectors.pop(group).result(self.processes)

    def advance(self) -> None:
        """Run all windows through the block."""
        for batch in self._store.batches():
            hidden = self._store.read(batch)
            with self._shortcuts(batch):
                self._store.write(batch, self._call(hidden).run(self.block, hidden))

    def columns(self, group: SharedInput) -> int:
        """The width of a group's inputs."""
        return weight_rows(self.block.get_submodule(group.linears[0])).shape[1]

    def close(self) -> None:
        """Drop stored activations."""
        for kept in (self._kept, self._filling):
            for store in kept.values():
                store.close()
            kept.clear()

    def _watch(self, collectors: dict[SharedInput, StatsCollector], *, stop: bool, keep: bool = True) -> None:
        tails = {tail.linear: tail for tail in self.anatomy.tails}
        current: list[slice] = []

        def hook_of(group: SharedInput, collector: StatsCollector) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            tail = tails.get(group.linears[0])

            def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
                if keep and self._unrounded is not None and self._is_compared(group):
                    self._unrounded.add(collector, group.linears[0], inputs[0], current[0])
                else:
                    collector.add(inputs[0])
                if keep and tail is not None and len(group.linears) == 1 and tail.part != tail.linear:
                    self._keep(tail, current[0], inputs[0])
                if stop:
                    raise _SeenEnough

            return hook

        with ExitStack() as hooks:
            for group, collector in collectors.items():
                module = self.block.get_submodule(group.linears[0])
                hooks.enter_context(module.register_forward_pre_hook(hook_of(group, collector)))
            for batch in self._store.batches():
                current[:] = [batch]
                hidden = self._store.read(batch)
                with suppress(_SeenEnough), self._shortcuts(batch):
                    self._call(hidden).run(self.block, hidden)
        self._kept |= self._filling  # complete only after every batch
        self._filling.clear()

    def _keep(self, tail: Tail, batch: slice, inputs: Tensor) -> None:
        if inputs.dim() != 3 or inputs.shape[:2] != (batch.stop - batch.start, self._store.shape[1]):
            return  # flattened or routed tokens: the part is computed again
        if tail.linear not in self._filling:
            self._filling[tail.linear] = self._store.beside(inputs.shape[-1])
        self._filling[tail.linear].write(batch, inputs)

    @contextmanager
    def _shortcuts(self, batch: slice) -> Iterator[None]:
        """Let parts whose last linear's inputs are stored start from them."""
        shortened = []
        for tail in self.anatomy.tails:
            part, linear = self.block.get_submodule(tail.part), self.block.get_submodule(tail.linear)
            if tail.linear in self._kept:
                inputs = self._kept[tail.linear].read(batch)
                part.forward = _shortcut(linear, inputs, tail.extras)  # type: ignore[method-assign]
                shortened.append(part)
        try:
            yield
        finally:
            for part in shortened:
                del part.forward

    def _waves(self, groups: list[SharedInput], hessian: bool) -> Iterator[list[SharedInput]]:
        wave: list[SharedInput] = []
        size = 0
        for group in groups:
            matrices = 2 * hessian * (1 + self._is_compared(group))
            needed = 4 * self.columns(group) * (SAMPLE_ROWS + self.columns(group) * matrices)
            if wave and size + needed > _STATS_BYTES:
                yield wave
                wave, size = [], 0
            wave.append(group)
            size += needed
        if wave:
            yield wave

    def _is_compared(self, group: SharedInput) -> bool:
        return self._unrounded is not None and group.linears[0] in self._unrounded

    def _collectors(
        self, groups: Iterable[SharedInput], hessian: bool, *, energy: bool = False
    ) -> dict[SharedInput, StatsCollector]:
        return {
            group: StatsCollector(
                self.columns(group),
                self._tokens,
                hessian=hessian,
                shift=hessian and self._is_compared(group),
                energy=energy,
            )
            for group in groups
        }


def observe_head(
    head: HeadFunction,
    store: ActivationStore,
    tokens: int,
    processes: Processes,
    *,
    hessian: bool,
    unrounded: ActivationStore | None = None,
    rounding: QuantizationArgs | None = None,
) -> LayerStats:
    """Collect the inputs of the output head.

    Args:
        head: the head.
        store: the outputs of the blocks.
        tokens: how many the windows of all processes hold.
        processes: this one and those with other windows.
        hessian: whether the Hessian is wanted.
        unrounded: the outputs of the unrounded blocks, to compare with; None if not needed.
        rounding: how the head's inputs are rounded at run time.
    """
    module = head.module
    columns = module.weight.shape[1]
    collector = StatsCollector(columns, tokens, hessian=hessian, shift=hessian and unrounded is not None)
    seen: list[Tensor] = []

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen[:] = inputs[:1]
        raise _SeenEnough

    def read(hidden: Tensor) -> Tensor:
        with suppress(_SeenEnough):
            head(hidden)
        return seen[0]

    with module.register_forward_pre_hook(hook):
        for batch in store.batches():
            if unrounded is None:
                collector.add(read(store.read(batch)))
            else:
                add_compared(collector, read(store.read(batch)), read(unrounded.read(batch)), rounding)
    return collector.result(processes)


def _shortcut(linear: nn.Module, inputs: Tensor, extras: int | None) -> Callable[..., Any]:
    def forward(*_: Any, **__: Any) -> Any:
        out = linear(inputs)
        return out if extras is None else (out, *([None] * extras))

    return forward
