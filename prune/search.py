"""The search for a model's shape: the one with the least loss among those that meet a target."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..models.steps.block_loop import streamed_model
from ..models.steps.parts import Measured
from ..models.steps.step import RunContext
from ..models.structure.open_model import OpenModel
from ..system.progress import Progress
from .score.next_token_loss import next_token_loss
from .structure.shapes import DIMENSIONS, SizeGrid, Sizes

# Shapes that are built and evaluated on text, best first by the summed loss of their dimensions.
TRIED = 3
# The share of calibration windows held out for evaluation.
_JUDGING = 4


class ShapeSearch:
    """Evaluates shapes by the loss on held-out calibration windows.

    Args:
        grid: the sizes.
        context: the run.
        made: makes the model of some sizes, with its files in a directory.

    Attributes:
        losses: the measurements: of the whole model, of each size separately, of each shape that was tried.
    """

    def __init__(
        self, grid: SizeGrid, context: RunContext, made: Callable[[Sizes, RunContext, Path], OpenModel]
    ) -> None:
        self._grid, self._context, self._made = grid, context, made
        judged = max(1, len(context.tokens) // _JUDGING)
        self._judging = context.tokens[:judged]
        calibrating = context.tokens[judged:] if len(context.tokens) > 1 else context.tokens
        self._quiet = replace(context, tokens=calibrating, progress=Progress(False))
        self._measured = Measured(context.journal / "losses.json", context.processes)
        self.losses: dict[str, float] = self._measured.known

    def best(self, allowed: list[Sizes]) -> Sizes:
        """The shape with the least loss."""
        whole = self._loss("whole", self._grid.whole)
        each = list(self._grid.alone())
        alone: dict[tuple[str, int], float] = {}
        for name, size in self._context.progress.track(each, "measuring dimensions", len(each)):
            alone[name, size] = self._loss(f"{name} {size}", replace(self._grid.whole, **{name: size})) - whole

        def expected(sizes: Sizes) -> float:
            return sum(alone.get((name, getattr(sizes, name)), 0.0) for name in DIMENSIONS)

        first = sorted(allowed, key=expected)[:TRIED]
        tried = {}
        for sizes in self._context.progress.track(first, "trying shapes", len(first)):
            tried[sizes] = self._loss(_named(sizes), sizes)
        return min(first, key=lambda sizes: tried[sizes])

    def _loss(self, name: str, sizes: Sizes) -> float:
        return self._measured.once(name, lambda: self._loss_of(sizes))

    def _loss_of(self, sizes: Sizes) -> float:
        """Mean next-token loss of the model of some sizes."""
        place = self._context.journal / "trial"
        shutil.rmtree(place, ignore_errors=True)
        loss = _mean_loss(self._made(sizes, self._quiet, place), self._judging, self._context)
        shutil.rmtree(place, ignore_errors=True)
        return loss

    def sentence(self, found: Sizes) -> str:
        """What is left of each dimension, and the losses that decided it."""
        nouns = {
            "blocks": "blocks",
            "hidden": "hidden channels",
            "heads": "groups of heads",
            "ffn": "feed-forward channels",
        }
        whole, losses = self._grid.whole, self.losses
        left = [
            f"{getattr(found, name)} of {getattr(whole, name)} {nouns[name]}"
            for name in DIMENSIONS
            if getattr(found, name) < getattr(whole, name)
        ]
        loss = losses[_named(found)]
        others = [f"{value:.3f}" for name, value in losses.items() if name.count(" ") > 1 and value != loss]
        return (
            f"left are {', '.join(left) or 'all dimensions'}: on held-out calibration windows its loss was {loss:.3f},"
            f" the original's {losses['whole']:.3f}, and that of the other shapes tried was {', '.join(others) or 'none'}"
        )


@torch.no_grad()
def _mean_loss(model: OpenModel, tokens: Tensor, context: RunContext) -> float:
    streamed = streamed_model(model, context)
    with closing(streamed.final_hidden(tokens, Progress(False), "")) as store:
        lost, count = next_token_loss(streamed.head(), store, tokens)
    loss = lost / count
    return loss if math.isfinite(loss) else 1e9


def _named(sizes: Sizes) -> str:
    return " ".join(f"{name} {getattr(sizes, name)}" for name in DIMENSIONS)
