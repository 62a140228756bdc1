"""Allocation of a prune step's sparsity to linears."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...models.steps.block_loop import forward
from ...models.steps.parts import load_data, save_data
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
from ...system.processes import Processes
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
    file = context.journal / "sparsities.json"

    def found() -> tuple[dict[str, Tensor], Any]:
        if file.exists():
            return {}, load_data(file)
        measure = _by_outliers if allocation == "owl" else _by_sensitivity
        shares = measure(sparsity, facts, model, context)
        save_data(file, shares)
        return {}, shares

    return context.processes.broadcast(found)[1]


def _by_outliers(sparsity: float, facts: list[LinearFacts], model: OpenModel, context: RunContext) -> dict[str, float]:
    wanted = {each.name for each in facts}
    streamed = StreamedModel(model.skeleton, model.weights, context.dtype, context.journal)
    outliers: dict[int, float] = {}
    with forward(streamed, context.tokens, context.progress, "counting outliers") as (store, blocks):
        for index in blocks:
            anatomy, tokens = model.anatomy.blocks[index], context.tokens.numel()
            with streamed.block(index) as block:
                passes = BlockPasses(block, anatomy, store, partial(streamed.call, index), tokens, Processes())
                scores = [
                    wanda(weight_rows(block.get_submodule(name)), stats.energy)
                    for group, stats in passes.statistics(anatomy.wanted_groups(wanted), energy=True)
                    for name in group.linears
                    if stats.energy is not None
                ]
                if scores:
                    outliers[index] = outlier_share(scores)
                streamed.run_block(index, block, store)
    shares = dict(zip(outliers, by_outliers(list(outliers.values()), sparsity), strict=True))
    blocks = {anatomy.name: index for index, anatomy in enumerate(model.anatomy.blocks)}
    return {name: shares[index] for name in wanted for block, index in blocks.items() if name.startswith(f"{block}.")}


def _by_sensitivity(
    sparsity: float, facts: list[LinearFacts], model: OpenModel, context: RunContext
) -> dict[str, float]:
    levels = [sparsity + (place - LEVELS // 2) * _APART for place in range(LEVELS)]
    levels = sorted({min(_MOST, max(0.0, round(level, 4))) for level in levels} | {sparsity})
    units = [Unit(each.name, (each.name,), ((each.name,),)) for each in facts]
    measured = SensitivityInputs(
        model,
        units,
        _Sparsities(levels, context.dtype),
        context.tokens,
        context.dtype,
        context.seed,
        context.journal / "sensitivity",
        context.progress,
    )
    losses = fisher_losses(measured)
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
