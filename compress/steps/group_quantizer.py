"""Rounding linears that share their inputs, as one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...quant.layer_stats import LayerStats, output_error
from ...quant.quantized_weight import restore
from ...quant.rounding import Method, RoundingOptions
from ...quant.scheme import Scheme
from ..errors import SmeltError
from ..open_model import LinearFacts


@dataclass(frozen=True)
class LayerRecord:
    """What is kept of one quantized layer.

    Attributes:
        name: its full name.
        shape: rows and columns.
        scheme: what it is stored as.
        error: relative error of its outputs on calibration inputs; None if no token reached it.
        notes: sentences about what did not go as planned.
    """

    name: str
    shape: tuple[int, int]
    scheme: str
    error: float | None
    notes: list[str] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "scheme": self.scheme,
            "error": self.error,
            "notes": self.notes,
        }


class GroupQuantizer:
    """Applies one scheme and rounding method to groups of linears."""

    def __init__(self, scheme: Scheme, method: Method, options: RoundingOptions) -> None:
        self._scheme = scheme
        self._method = method
        self._options = options

    def round(
        self, modules: list[nn.Module], facts: list[LinearFacts], stats: LayerStats
    ) -> list[tuple[dict[str, Tensor], LayerRecord]]:
        """Round linears that share their inputs; each gets its stored tensors and its record.

        They are stacked into one weight: rows do not depend on each other, the Hessian is factored
        once, and NVFP4's global scale is shared, as servers that fuse q/k/v or gate/up need it.
        Blocks of rows (FP8_BLOCK) must not straddle two linears, so there each is rounded alone.
        """
        stacked = self._scheme.args.strategy != "block"
        results = []
        for members in [list(range(len(modules)))] if stacked else [[i] for i in range(len(modules))]:
            weights = [cast(Tensor, modules[i].weight).to(facts[i].dtype) for i in members]
            whole = self._method.function(torch.cat(weights), self._scheme.args, stats, self._options)
            start = 0
            for i, weight in zip(members, weights, strict=True):
                mine = whole.rows(start, start + weight.shape[0])
                start += weight.shape[0]
                tensors = mine.stored(self._scheme)
                error = output_error(weight, restore(tensors, self._scheme), stats)
                if error is not None and not math.isfinite(error):
                    raise SmeltError(
                        f"{facts[i].name}: its outputs on the calibration text are not finite; add it to ignore or use other text"
                    )
                record = LayerRecord(
                    facts[i].name,
                    (facts[i].rows, facts[i].columns),
                    self._scheme.name,
                    _rounded(error),
                    list(mine.notes),
                )
                results.append((tensors, record))
        return results


def _rounded(error: float | None) -> float | None:
    return None if error is None else float(f"{error:.6g}")
