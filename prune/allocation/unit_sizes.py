"""Allocation of units to blocks: how many each block keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from ...models.steps.step import RunContext
from ...models.structure.open_model import OpenModel
from ...quant.divergence import OutputChange
from ...quant.layer_stats import LayerStats
from ...quant.mixed.choose import best_choice
from ...quant.mixed.format_units import Unit
from ...quant.mixed.sensitivity import Changes, SensitivityInputs, fisher_losses
from ..structure import axes
from ..structure.axes import Axis
from ..update.least_squares import refitted

# Numbers of units that a block may keep: this many steps of about this share, around the average, and all.
_STEPS, _STEP = 3, 1 / 16
MOST_LEVELS = 2 * _STEPS + 2

Scores = Callable[[str, Tensor, LayerStats], Tensor]


def levels_of(model: OpenModel, axis: Axis, average: int) -> list[int]:
    """The numbers of units that a block may keep, fewest first.

    Args:
        model: the model.
        axis: the units.
        average: the average number that blocks keep; it is one of the numbers.
    """
    step = max(1, round(axis.units * _STEP / axis.multiple)) * axis.multiple
    around = {average + step * place for place in range(-_STEPS, _STEPS + 1)}
    found = sorted({n for n in around if 0 < n < axis.units} | {axis.units})
    # A configuration accepts any width, but not every number of heads.
    return [n for n in found if axis.multiple > 1 or n in (average, axis.units) or axes.is_possible(model, axis, n)]


def worst_case_units(model: OpenModel, axis: Axis, average: int) -> list[int]:
    """The worst case of units by block, so that problems with any possible allocation are found before any work."""
    units = [average] * len(model.anatomy.blocks)
    places = [index for index, block in enumerate(model.anatomy.blocks) if axis.of_block(block.name)]
    levels = levels_of(model, axis, average)
    odd = sorted(levels, key=lambda n: n & -n)
    for place, least in zip(places, odd, strict=False):
        units[place] = least
    return units


def shared_out_units(
    model: OpenModel,
    axis: Axis,
    average: int,
    among: Collection[int],
    scores: Scores,
    context: RunContext,
    *,
    refits: bool,
) -> list[int]:
    """How many units each block keeps for the least predicted divergence; only the first process measures.

    The cost of removing a block's units, after the remaining columns are refitted, is estimated from the gradients of
    the model's own predictions (:mod:`smelt.quant.mixed.sensitivity`). Measurements of an interrupted run are reused.

    Args:
        model: the model.
        axis: the units.
        average: the average number that blocks keep.
        among: the blocks that units are allocated to; others keep the average.
        scores: the importance of a reader's units, given its name, its weight and its inputs.
        context: the run.
        refits: whether the remaining columns are refitted.
    """

    def found() -> tuple[dict[str, Tensor], list[int]]:
        levels = levels_of(model, axis, average)
        blocks = [
            block for index, block in enumerate(model.anatomy.blocks) if axis.of_block(block.name) and index in among
        ]
        readers = [tuple(axis.of_block(block.name)) for block in blocks]
        units = [
            Unit(block.name, names, tuple((n,) for n in names)) for block, names in zip(blocks, readers, strict=True)
        ]
        widths = _Widths(axis, levels, scores, context.dtype, refits=refits)
        losses = fisher_losses(SensitivityInputs(model, units, widths, context))
        chosen = best_choice(losses, [levels] * len(blocks), average * len(blocks))
        assert chosen is not None  # all at the average fit
        left = dict(zip([block.name for block in blocks], (levels[place] for place in chosen), strict=True))
        return {}, [left.get(block.name, average) for block in model.anatomy.blocks]

    return context.processes.broadcast(found)[1]


class _Widths:
    """Candidates that keep a number of a linear's input units."""

    def __init__(self, axis: Axis, levels: Sequence[int], scores: Scores, dtype: torch.dtype, *, refits: bool) -> None:
        self._axis, self._levels, self._scores, self._dtype = axis, levels, scores, dtype
        self.count = len(levels)
        self.needs_hessian = refits

    def changes(self, weights: dict[str, Tensor], stats: LayerStats) -> Changes:
        found: Changes = {}
        for name, weight in weights.items():
            order = self._scores(name, weight, stats).argsort(descending=True)
            found[name] = [OutputChange(self._change(weight, stats, order[:left])) for left in self._levels]
        return found

    def _change(self, weight: Tensor, stats: LayerStats, kept: Tensor) -> Tensor:
        columns = self._axis.columns_of(kept.sort().values).to(weight.device)
        narrow = weight.float()[:, columns]
        if stats.hessian is not None and stats.tokens and len(kept) < self._axis.units:
            narrow, _ = refitted(weight, stats.hessian, columns)
        change = weight.float().neg()
        change[:, columns] += narrow
        return change.to(self._dtype)
