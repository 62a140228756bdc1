"""Rounding linears that share their inputs together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...models.steps.record import LayerRecord, significant
from ...models.structure.open_model import LinearFacts
from ...system.errors import SmeltError
from ..activations import ActivationRounding
from ..channels import channel_notes
from ..grid import Grid
from ..layer_stats import LayerStats, output_error, weight_error
from ..scheme import Scheme
from ..settings.methods import TransformChoice
from ..stored.compressed_tensors import restore
from ..stored.quantized_weight import QuantizedWeight
from ..transforms import TRANSFORMS
from .assignment import Treatment


@dataclass(frozen=True)
class ToRound:
    """A linear that is about to be rounded.

    Attributes:
        facts: its facts.
        weight: ``[rows, columns]``, in its stored dtype, or in float32 if it has been transformed.
    """

    facts: LinearFacts
    weight: Tensor


class GroupQuantizer:
    """Rounds linears that share their inputs and their treatment.

    Args:
        treatment: the scheme and the rounding.
        ranges: range choices, applied in order to the min-max grid.
    """

    def __init__(self, treatment: Treatment, ranges: list[TransformChoice]) -> None:
        self._treatment = treatment
        self._ranges = ranges

    def round(self, linears: list[ToRound], stats: LayerStats | None) -> list[tuple[dict[str, Tensor], LayerRecord]]:
        """Round linears that share their inputs; each gets its stored tensors and its record.

        They are stacked into one weight: rows are independent, the Hessian is factored
        once, and NVFP4's global scale is shared, as servers that fuse q/k/v or gate/up need it.
        Blocks of rows (FP8_BLOCK) must not straddle two linears, so there each is rounded alone.

        Args:
            linears: those that are rounded.
            stats: of their inputs; None if no text was read.
        """
        scheme = self._treatment.scheme
        stacked = scheme.args.strategy != "block"
        inputs = None
        if stats is not None:
            inputs = input_rounding(scheme, stats, [linear.weight for linear in linears], linears[0].facts.dtype)
        results = []
        for members in [linears] if stacked else [[linear] for linear in linears]:
            stored = members[0].facts.dtype
            weight = torch.cat([linear.weight for linear in members])
            grid = Grid.fit(weight, scheme.args, stored)
            for choice in self._ranges:
                fitted = TRANSFORMS[choice.method].range
                assert fitted is not None
                assert stats is not None  # which ranges need
                grid = fitted(weight.float(), grid, stats, choice.settled())
            whole = self._treatment.method.function(weight, scheme.args, stats, self._treatment.options, grid)
            start = 0
            for linear in members:
                mine = whole.rows(start, start + len(linear.weight))
                start += len(linear.weight)
                results.append(finished(linear, mine, scheme, stats, inputs))
        return results


def input_rounding(
    scheme: Scheme, stats: LayerStats, weights: Sequence[Tensor], stored: torch.dtype
) -> ActivationRounding | None:
    """How the inputs that some linears share are rounded; None if the scheme does not round inputs.

    Args:
        scheme: of the linears.
        stats: of their inputs.
        weights: of all of them, ``[rows, columns]``.
        stored: the dtype that scales are stored in.
    """
    if scheme.activations is None:
        return None
    energy = torch.stack([weight.float().square().sum(0) for weight in weights]).sum(0)
    return ActivationRounding.fitted(scheme.activations, stats, energy, stored)


def finished(
    linear: ToRound,
    rounded: QuantizedWeight,
    scheme: Scheme,
    stats: LayerStats | None,
    inputs: ActivationRounding | None,
) -> tuple[dict[str, Tensor], LayerRecord]:
    """What the checkpoint stores for a rounded linear, and its record in the report."""
    facts = linear.facts
    beside = {} if inputs is None else {name: tensor.clone() for name, tensor in inputs.stored().items()}
    tensors = rounded.stored(scheme) | beside
    restored = restore(tensors, scheme)
    if stats is None:
        return tensors, record_of(facts, scheme, weight_error(linear.weight, restored), "weights", rounded.notes)
    notes = [*rounded.notes, *channel_notes(stats, scheme), *reached_notes(stats)]
    return tensors, record_of(facts, scheme, output_error(linear.weight, restored, stats), "outputs", notes)


def record_of(
    facts: LinearFacts,
    scheme: Scheme,
    error: float | None,
    error_of: Literal["outputs", "weights"],
    notes: list[str],
) -> LayerRecord:
    """The record of a rounded linear.

    Raises:
        SmeltError: the error is not finite.
    """
    if error is not None and not math.isfinite(error):
        if error_of == "weights":
            raise SmeltError(f"{facts.name}: its quantized weights are not finite; add it to ignore")
        raise SmeltError(
            f"{facts.name}: its outputs on the calibration text are not finite; add it to ignore or use other text"
        )
    shape = (facts.rows, facts.columns)
    return LayerRecord(facts.name, shape, scheme.label, significant(error, 6), notes, error_of)


def reached_notes(stats: LayerStats) -> list[str]:
    """A note about an expert that very few tokens reached."""
    if stats.reached is None or not stats.tokens:
        return []
    some = f"only {stats.reached}" if stats.reached else "none"
    return [f"{some} of {stats.tokens} calibration tokens reached this expert; it was calibrated on all of them"]
