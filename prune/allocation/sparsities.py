"""Allocation of a prune step's sparsity to linears."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ...models.steps.block_loop import BlockJob, BlockResult, run_forward
from ...models.steps.parts import block_files, data_once, load_part
from ...models.steps.step import RunContext
from ...models.streaming.streamed import StreamedModel
from ...models.structure.open_model import LinearFacts, OpenModel
from ...quant.blockwise.block_passes import BlockPasses
from ...quant.divergence import OutputChange
from ...quant.layer_stats import LayerStats
from ...quant.mixed.choose import best_choice
from ...quant.mixed.format_units import Unit
from ...quant.mixed.sensitivity import Changes, SensitivityInputs, fisher_losses
from ...quant.sparsity import keep_share
from ...quant.transforms.links import weight_rows
from ...system.processes.process_group import Processes
from ...system.storage.activation_store import ActivationStore
from ..score.weights import wanda
from .owl import by_outliers, outlier_share

# Sparsities that a linear may get by its sensitivity: their number and spacing, around the average.
LEVELS, _APART = 9, 0.05
_MOST = 0.95


def shared_out(
    allocation: str, sparsity: float, facts: list[LinearFacts], model: OpenModel, context: RunContext
) -> dict[str, float]:
    """The sparsity of each linear, by name; measurements of an interrupted run are reused.

    Args:
        allocation: ``owl`` or ``sensitivity``.
        sparsity: overall; for ``owl``, on average over blocks.
        facts: the linears.
        model: their model.
        context: the run. Only the first process measures.
    """
    file, measure = context.journal / "sparsities.json", _by_outliers if allocation == "owl" else _by_sensitivity
    return context.processes.broadcast(lambda: ({}, data_once(file, lambda: measure(sparsity, facts, model, context))))[
        1
    ]


def _by_outliers(sparsity: float, facts: list[LinearFacts], model: OpenModel, context: RunContext) -> dict[str, float]:
    wanted = {each.name for each in facts}
    counting = _OutlierCount(wanted, model, context)
    run_forward(counting, counting.streamed, replace(context, processes=Processes()))
    counted = {index: load_part(file) for index, file in enumerate(counting.parts)}
    outliers = {index: stored["outliers"].item() for index, stored in counted.items() if stored}
    shares = dict(zip(outliers, by_outliers(list(outliers.values()), sparsity), strict=True))
    blocks = {anatomy.name: index for index, anatomy in enumerate(model.anatomy.blocks)}
    return {name: shares[index] for name in wanted for block, index in blocks.items() if name.startswith(f"{block}.")}


class _OutlierCount(BlockJob):
    """The share of outliers in each block that has a wanted linear."""

    description = "counting outliers"

    def __init__(self, wanted: set[str], model: OpenModel, context: RunContext) -> None:
        self._wanted, self._model, self._tokens = wanted, model, context.tokens.numel()
        self.streamed = StreamedModel(model.skeleton, model.weights, context.dtype, context.journal)
        journal = context.journal / "outliers"
        journal.mkdir(exist_ok=True)
        self.files = self.parts = block_files(journal, len(self.streamed))

    @contextmanager
    def work(self, index: int, store: ActivationStore) -> Iterator[BlockResult]:
        anatomy, call = self._model.anatomy.blocks[index], partial(self.streamed.call, index)
        with self.streamed.block(index) as block:
            passes = BlockPasses(block, anatomy, store, call, self._tokens, Processes())
            scores = [
                wanda(weight_rows(block.get_submodule(name)), stats.energy)
                for group, stats in passes.statistics(anatomy.wanted_groups(self._wanted), energy=True)
                for name in group.linears
                if stats.energy is not None
            ]
            share = {"outliers": torch.tensor(outlier_share(scores), dtype=torch.float64)} if scores else {}
            yield BlockResult(share, advance=partial(self.streamed.run_block, index, block, store))

    def restore(self, index: int, stored: dict[str, Tensor]) -> AbstractContextManager[nn.Module]:
        return self.streamed.block(index)


def _by_sensitivity(
    sparsity: float, facts: list[LinearFacts], model: OpenModel, context: RunContext
) -> dict[str, float]:
    levels = [sparsity + (place - LEVELS // 2) * _APART for place in range(LEVELS)]
    levels = sorted({min(_MOST, max(0.0, round(level, 4))) for level in levels} | {sparsity})
    units = [Unit(each.name, (each.name,), ((each.name,),)) for each in facts]
    losses = fisher_losses(SensitivityInputs(model, units, _Sparsities(levels, context.dtype), context))
    kept = [[round(each.numel * (1 - level)) for level in levels] for each in facts]
    for unit in losses:
        if not any(unit):  # an expert without tokens has no scores and gets the average
            unit[:] = [0.0 if level == sparsity else 1e9 for level in levels]
    chosen = best_choice(losses, kept, sum(round(each.numel * (1 - sparsity)) for each in facts))
    assert chosen is not None  # all at the average fit
    return {each.name: levels[place] for each, place in zip(facts, chosen, strict=True)}


class _Sparsities:
    """Candidates that prune a linear by Wanda's score, without compensation."""

    needs_hessian = False

    def __init__(self, levels: list[float], dtype: torch.dtype) -> None:
        self._levels, self._dtype = levels, dtype
        self.count = len(levels)

    def changes(self, weights: dict[str, Tensor], stats: LayerStats) -> Changes:
        assert stats.energy is not None
        found: Changes = {}
        for name, weight in weights.items():
            scores = wanda(weight, stats.energy)
            keeps = (keep_share(scores, level, by_row=True) for level in self._levels)
            found[name] = [OutputChange((weight * ~keep).neg().to(self._dtype)) for keep in keeps]
        return found
