"""How much a model's predictions suffer when one unit is stored in fewer bits, measured block by block.

First all windows run forward and every block's inputs are stored on disk. Then the blocks are visited
from the last to the first. ``fisher`` draws a token from the model's own predictions at every position and
backpropagates the gradient of its log-likelihood; at each linear it gives the cost of any small change of
the linear's outputs. ``kl`` instead runs every change through the rest of the model, which is exact, but takes longer
by a factor of the number of blocks after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...models.steps.block_loop import BackwardJob, each_block, kept_pass, run_backward
from ...models.steps.parts import Measured, block_files, load_data
from ...models.steps.step import RunContext
from ...models.streaming.backward import KeptPass
from ...models.streaming.streamed import LOGIT_TOKENS, HeadFunction, StreamedModel
from ...models.structure.open_model import OpenModel
from ...system.processes.process_group import Processes
from ...system.progress import Progress
from ...system.storage.activation_store import ActivationStore
from ..activations import ActivationRounding, quantize_inputs
from ..blockwise.assignment import Treatment, alike
from ..blockwise.block_passes import BlockPasses, observe_head
from ..blockwise.group_quantizer import GroupQuantizer, ToRound
from ..divergence import OutputChange, divergence, squared_effect
from ..layer_stats import LayerStats
from ..settings.methods import TransformChoice
from ..stored.compressed_tensors import restore
from ..transforms.links import as_rows, weight_rows
from .format_units import Unit

Changes = dict[str, list[OutputChange]]


class Candidates(Protocol):
    """The candidate treatments of linears.

    Attributes:
        count: how many candidates there are.
        needs_hessian: whether they need the second moments of inputs.
    """

    @property
    def count(self) -> int: ...

    @property
    def needs_hessian(self) -> bool: ...

    def changes(self, weights: dict[str, Tensor], stats: LayerStats) -> Changes:
        """How each candidate changes the outputs of linears that share their inputs.

        Args:
            weights: by full name, ``[rows, columns]``.
            stats: of the inputs, with each channel's energy.
        """
        ...


@dataclass(frozen=True)
class SensitivityInputs:
    """What to measure, and on which data.

    Attributes:
        model: the model whose predictions are compared.
        units: what to change, one at a time.
        candidates: how to change them.
        context: the run around it, whose text is read; only one process measures.
    """

    model: OpenModel
    units: list[Unit]
    candidates: Candidates
    context: RunContext

    @property
    def journal(self) -> Path:
        """A directory for finished parts and for activations."""
        return self.context.journal / "sensitivity"


class Roundings:
    """Candidates that round linears as a quantize step would.

    Args:
        model: whose linears they are.
        treatments: for every candidate, each linear's treatment, by name.
        ranges: choices of grids' ranges that the step applies.
        dtype: what is computed in.
    """

    def __init__(
        self,
        model: OpenModel,
        treatments: list[dict[str, Treatment]],
        ranges: list[TransformChoice],
        dtype: torch.dtype,
    ) -> None:
        self._model, self._treatments, self._ranges, self._dtype = model, treatments, ranges, dtype
        self.count = len(treatments)
        self.needs_hessian = any(t.method.needs_hessian for each in treatments for t in each.values())

    def changes(self, weights: dict[str, Tensor], stats: LayerStats) -> Changes:
        """How each candidate changes the outputs of linears that share their inputs."""
        found: Changes = {name: [] for name in weights}
        for treatments in self._treatments:
            for names in alike({name: treatments[name] for name in weights}):
                treatment = treatments[names[0]]
                facts = [self._model.linears[name] for name in names]
                own = [weights[name] for name in names]
                linears = [ToRound(f, weight.to(f.dtype)) for f, weight in zip(facts, own, strict=True)]
                results = GroupQuantizer(treatment, self._ranges).round(linears, stats)
                for name, weight, (tensors, _) in zip(names, own, results, strict=True):
                    inputs = treatment.scheme.activations
                    rounding = None if inputs is None else ActivationRounding.stored_as(inputs, tensors)
                    difference = restore(tensors, treatment.scheme).to(weight.dtype) - weight
                    found[name].append(OutputChange(difference.to(self._dtype), rounding))
        return found


def fisher_losses(measured: SensitivityInputs) -> list[list[float]]:
    """The second-order estimate of the KL divergence from the original, by unit and candidate, in nats per token."""
    return _Fisher(measured).losses()


def kl_losses(measured: SensitivityInputs) -> list[list[float]]:
    """The KL divergence from the original with only that unit rounded, by unit and candidate, in nats per token."""
    return _Divergence(measured).losses()


class _Measurement:
    """Shared by both methods: the model, and the changes by rounding."""

    def __init__(self, measured: SensitivityInputs) -> None:
        self._measured = measured
        self._model = measured.model
        self._count = measured.candidates.count
        self._streamed = StreamedModel(
            measured.model.skeleton, measured.model.weights, measured.context.dtype, measured.journal
        )
        self._wanted = {name for unit in measured.units for name in unit.linears}
        self._positions = measured.context.tokens.numel()
        self._candidates = measured.candidates
        measured.journal.mkdir(parents=True, exist_ok=True)

    def _inside(self, index: int) -> dict[str, str]:
        """The wanted linears of a block, and their names within it."""
        return self._model.anatomy.blocks[index].local_names(self._wanted)

    def _block_changes(self, index: int, block: nn.Module, entering: ActivationStore) -> Changes:
        """How every candidate changes the outputs of a block's linears, by the linears' full names."""
        anatomy, call = self._model.anatomy.blocks[index], partial(self._streamed.call, index)
        passes = BlockPasses(block, anatomy, entering, call, self._positions, Processes())
        groups = anatomy.wanted_groups(self._wanted)
        found: Changes = {}
        for group, stats in passes.statistics(groups, hessian=self._candidates.needs_hessian, energy=True):
            weights = {f"{anatomy.name}.{local}": weight_rows(block.get_submodule(local)) for local in group.linears}
            found |= self._candidates.changes(weights, stats)
        return found

    def _head_changes(self, function: HeadFunction, entering: ActivationStore) -> Changes:
        """Likewise of the output head, if it is wanted."""
        head = self._model.anatomy.head
        if head not in self._wanted:
            return {}
        hessian = self._candidates.needs_hessian
        stats = observe_head(function, entering, self._positions, Processes(), hessian=hessian)
        return self._candidates.changes({head: weight_rows(function.module)}, stats)


class _Fisher(_Measurement, BackwardJob):
    description = "measuring sensitivity"

    def __init__(self, measured: SensitivityInputs) -> None:
        super().__init__(measured)
        self.files = [
            *block_files(measured.journal, len(self._streamed), "json"),
            measured.journal / "head.json",
        ]

    def losses(self) -> list[list[float]]:
        """By unit and candidate."""
        run_backward(self, self._streamed, self._measured.context.tokens, self._measured.context.progress)
        sums: dict[str, list[float]] = {}
        for file in self.files:
            sums |= load_data(file)
        return [
            [sum(sums[name][c] for name in unit.linears) / (2 * self._positions) for c in range(self._count)]
            for unit in self._measured.units
        ]

    def work(self, index: int, kept: KeptPass, flow: ActivationStore, *, finished: bool) -> dict[str, list[float]]:
        """Accumulate the effect of every change of a block's linears during the backward pass of the sampled tokens."""
        if index == len(self._streamed):
            return self._head(kept, flow, finished=finished)
        with self._streamed.block(index) as block, ExitStack() as hooks:
            changes = {} if finished else self._block_changes(index, block, kept.stores[index])
            modules = {name: block.get_submodule(local) for name, local in self._inside(index).items()}
            sums = hooks.enter_context(_measuring(changes, modules))
            kept.block_backward(index, block, flow)
        return sums

    def _head(self, kept: KeptPass, flow: ActivationStore, *, finished: bool) -> dict[str, list[float]]:
        """Sample a token from every prediction; write the gradient of their log-likelihood at the last block's outputs."""
        function, name = self._streamed.head(), self._model.anatomy.head
        generator = torch.Generator().manual_seed(self._measured.context.seed)
        changes = {} if finished else self._head_changes(function, kept.stores[-1])

        def drawn_ascent(logits: Tensor, _: slice) -> Tensor:
            chances = logits.float().softmax(-1)
            drawn = torch.multinomial(chances.flatten(0, -2), 1, generator=generator).view(*chances.shape[:-1], 1)
            return chances.neg_().scatter_add_(-1, drawn, torch.ones(drawn.shape))

        with _measuring(changes, {name: function.module}) as sums:
            kept.head_backward(function, flow, drawn_ascent)
        return sums


@contextmanager
def _measuring(changes: Changes, modules: dict[str, nn.Module]) -> Iterator[dict[str, list[float]]]:
    """Accumulate the squared effects, by linear and candidate, during a backward pass."""
    sums = {name: [0.0] * len(each) for name, each in changes.items()}
    with ExitStack() as hooks:
        for name, each in changes.items():
            hooks.callback(modules[name].register_forward_hook(_watching(each, sums[name])).remove)
        yield sums


def _watching(changes: list[OutputChange], sums: list[float]) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    """A forward hook that takes the gradient of a linear's outputs and accumulates the effect of every change."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if not output.requires_grad or not output.numel():
            return
        rows = inputs[0].detach().flatten(0, -2)

        def arrived(gradient: Tensor) -> None:
            weight = weight_rows(module).to(rows.dtype)
            for place, change in enumerate(changes):
                sums[place] += squared_effect(gradient.flatten(0, -2), change(rows, weight))

        output.register_hook(arrived)

    return hook


class _Divergence(_Measurement):
    def losses(self) -> list[list[float]]:
        """By unit and candidate."""
        begins = [self._first_block(unit) for unit in self._measured.units]
        waves = Measured(self._measured.journal / "by-first-block.json", Processes())
        missing = [start for start in sorted(set(begins), reverse=True) if str(start) not in waves.known]
        progress = self._measured.context.progress
        if missing:
            with kept_pass(self._streamed, self._measured.context.tokens, progress) as kept:
                for start in progress.track(missing, "measuring sensitivity", len(missing)):
                    units = [u for u, first in zip(self._measured.units, begins, strict=True) if first == start]
                    waves.once(str(start), partial(self._wave, start, units, kept))
        found: dict[str, list[float]] = {}
        for losses in waves.known.values():
            found |= losses
        return [found[unit.name] for unit in self._measured.units]

    def _first_block(self, unit: Unit) -> int:
        """The first block that a change of a unit affects; for lm_head, the number of blocks."""
        blocks = range(len(self._streamed))
        return next((i for i in blocks if any(name in unit.linears for name in self._inside(i))), len(self._streamed))

    def _wave(self, start: int, units: list[Unit], kept: KeptPass) -> dict[str, list[float]]:
        """Run the changes of all units that begin in one block through the rest of the model."""
        before = kept.stores[start]
        variants = [(unit, candidate) for unit in units for candidate in range(self._count)]
        stores: list[ActivationStore] = []
        with ExitStack() as held:
            for index in each_block(range(start, len(self._streamed)), Progress(False), ""):
                if index == start:
                    stores += [held.enter_context(closing(before.beside(before.shape[2]))) for _ in variants]
                self._through(index, variants, [before] * len(variants) if index == start else stores, stores, kept)
            return self._compared(variants, stores, kept)

    def _through(
        self,
        index: int,
        variants: list[tuple[Unit, int]],
        sources: list[ActivationStore],
        targets: list[ActivationStore],
        kept: KeptPass,
    ) -> None:
        """Run each variant's hidden states through a block with the variant's changes."""
        with self._streamed.block(index) as block:
            inside = self._inside(index)
            touched = any(name in unit.linears for unit, _ in variants for name in inside)
            changes = self._block_changes(index, block, kept.stores[index]) if touched else {}
            modules = {name: block.get_submodule(local) for name, local in inside.items()}
            for (unit, candidate), source, target in zip(variants, sources, targets, strict=True):
                mine = {name: each[candidate] for name, each in changes.items() if name in unit.linears}
                with _changed(mine, modules):
                    self._streamed.run_block(index, block, source, target)

    def _compared(
        self, variants: list[tuple[Unit, int]], stores: list[ActivationStore], kept: KeptPass
    ) -> dict[str, list[float]]:
        function, head, original = self._streamed.head(), self._model.anatomy.head, kept.stores[-1]
        losses: dict[str, list[float]] = {}
        changes = {} if stores else self._head_changes(function, original)
        for place, (unit, candidate) in enumerate(variants):
            store = stores[place] if stores else original
            mine = {name: each[candidate] for name, each in changes.items()}
            total = 0.0
            for batch in original.batches(LOGIT_TOKENS):
                unchanged = function(original.read(batch))
                with _changed(mine, {head: function.module}):
                    total += divergence(unchanged, function(store.read(batch)))
            losses.setdefault(unit.name, []).append(total / self._positions)
        return losses


@contextmanager
def _changed(changes: dict[str, OutputChange], modules: dict[str, nn.Module]) -> Iterator[None]:
    """Let linears compute as after rounding."""
    with ExitStack() as undo:
        for name, change in changes.items():
            module = modules[name]
            own: Tensor = module.weight.data  # type: ignore[union-attr, assignment]
            undo.callback(setattr, module.weight, "data", own)
            module.weight.data = own + as_rows(module, change.weight).to(own.dtype)  # type: ignore[union-attr]
            if change.rounding is not None:
                undo.callback(quantize_inputs(module, change.rounding).remove)
        yield
