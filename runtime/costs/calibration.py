"""A device's calibration: prices fitted to measured steps, how wrong they are elsewhere, and the file that holds them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ...system.errors import RuntimeProblem
from ...system.storage.files import read_json, write_text
from .fitted import ALWAYS, FittedCost, features, kernel_of, nearest_kernel
from .model_size import ModelSize
from .work import StepWork

_VERSION = 2
# How much of its caches a processor gives one program is not known: the size whose fits predict best is taken.
_CACHED_BYTES = tuple(count << 20 for count in (0, 8, 16, 32, 48, 64, 96))
# Prices that no step separates are still decided.
_RIDGE = 1e-12
# Steps that other work on the machine has slowed down are left out of the fit.
_OUTLIER = 3.0


@dataclass(frozen=True)
class MeasuredStep:
    """One step of a real engine.

    Attributes:
        size: of its model.
        work: what it did.
        seconds: from its start to the next one's.
    """

    size: ModelSize
    work: StepWork
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on a device.

    Attributes:
        device: its name, with its number of threads.
        made: command, date and versions.
        prices: seconds of one of each amount.
        spread: how far the time of all steps of a configuration was from its prediction when all configurations of its shape were left
            out of the fit: the largest ratio of the two, minus one.
        left_out: that ratio, predicted over measured, of each configuration.
        ranges: of what was measured: the least and the most.
        kernels: the kinds of linears that were measured.
        memory_bytes: the device's memory.
        cached_bytes: of weights, that stay in the processor's caches from step to step.
    """

    device: str
    made: dict[str, str]
    prices: dict[str, float]
    spread: float
    left_out: dict[str, float]
    ranges: dict[str, tuple[float, float]]
    kernels: list[str]
    memory_bytes: int = 0
    cached_bytes: int = 0
    version: int = field(default=_VERSION)

    def cost(self, size: ModelSize) -> FittedCost:
        """A model's step times on this device."""
        return FittedCost(size, self.prices, self.cached_bytes)

    def outside(self, size: ModelSize, *, sequences: int, tokens: int, context: int) -> list[str]:
        """What of a model and its load was not measured here, as sentences."""
        found = []
        for name, value in (
            ("weight bytes", size.weight_bytes),
            ("layers", size.layers),
            ("hidden size", size.hidden),
            ("tokens of a step", tokens),
            ("sequences", sequences),
            ("context", context),
        ):
            low, high = self.ranges[name]
            if not low <= value <= high:
                found.append(f"{name}: {value:,.0f}, measured from {low:,.0f} to {high:,.0f}")
        kernels = {kernel_of(each): each.scheme for each in (*size.linears, size.head)}
        for kernel, scheme in kernels.items():
            if kernel not in self.kernels:
                near = nearest_kernel(kernel, set(self.kernels))
                found.append(f"linears in {scheme} ({kernel}) were not measured; {near} stands for them")
        return found

    def write(self, path: Path) -> None:
        """Write it as JSON, atomically."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read it.

        Raises:
            SmeltError: the file is missing or is not a calibration.
        """
        data: dict[str, Any] = read_json(path, "a calibration")
        try:
            if data.pop("version") != _VERSION:
                raise ValueError("another version wrote it")
            ranges = {name: (float(low), float(high)) for name, (low, high) in data.pop("ranges").items()}
            prices = {str(name): float(value) for name, value in data.pop("prices").items()}
            found = cls(ranges=ranges, prices=prices, **data)
            missing = [name for name in ALWAYS if name not in prices]
            if missing:
                raise ValueError(f"it has no price of {missing[0]!r}")
            if not found.spread >= 0 or not found.cached_bytes >= 0 or not all(price >= 0 for price in prices.values()):
                raise ValueError("a price is negative")
            return found
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise RuntimeProblem(
                f"{path}: is not a calibration of this version ({type(error).__name__}: {error}); write it again with"
                " smelt bench --calibrate"
            ) from None


def fit(steps: Sequence[MeasuredStep], cached_bytes: int = 0) -> dict[str, float]:
    """The non-negative prices whose predictions are closest to the measured steps, in relative terms.

    Args:
        steps: of any models. Outliers are left out: steps several times slower than predicted by a first fit.
        cached_bytes: of weights, that stay in the processor's caches.
    """
    names, amounts = _amounts(steps, cached_bytes)
    prices = _fitted(amounts, np.array([step.seconds for step in steps]), _weights(steps))
    return {name: float(price) for name, price in zip(names, prices, strict=True)}


def _weights(steps: Sequence[MeasuredStep]) -> np.ndarray:
    """Each model counts alike, however many steps it took in the time it was measured for."""
    counts = Counter(step.size for step in steps)
    return np.array([counts[step.size] ** -0.5 for step in steps])


def _fitted(amounts: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    kept = np.ones(len(seconds), bool)
    prices = np.zeros(amounts.shape[1])
    for _ in range(3):
        rows = amounts[kept] * (weights[kept] / seconds[kept])[:, None]
        scale = rows.max(axis=0)
        scale[scale == 0] = 1.0
        # The same least squares in as many rows as there are prices, which are few.
        rows /= scale
        square = rows.T @ rows
        square += _RIDGE * np.trace(square) * np.eye(len(scale))
        factor = np.linalg.cholesky(square)
        wanted = np.linalg.solve(factor, rows.T @ weights[kept])
        prices = nnls(factor.T, wanted, maxiter=50 * len(prices))[0] / scale
        kept = seconds < _OUTLIER * np.maximum(amounts @ prices, 1e-12)
    return prices


def _amounts(steps: Sequence[MeasuredStep], cached_bytes: int) -> tuple[list[str], np.ndarray]:
    rows = [features(step.size, step.work, cached_bytes) for step in steps]
    names = sorted({name for row in rows for name in row})
    column = {name: i for i, name in enumerate(names)}
    amounts = np.zeros((len(rows), len(names)))
    for i, row in enumerate(rows):
        for name, amount in row.items():
            amounts[i, column[name]] = amount
    return names, amounts


def calibration(
    configurations: Mapping[str, Sequence[MeasuredStep]], *, device: str, made: dict[str, str], memory_bytes: int
) -> Calibration:
    """Fit a device's prices, and find how wrong they are for configurations that they were not fitted on.

    Args:
        configurations: measured steps by the name of the configuration.
        device: its name.
        made: how.
        memory_bytes: of the device.
    """
    found = {cached: _left_out(configurations, cached) for cached in _CACHED_BYTES}
    cached_bytes = min(found, key=lambda cached: sum(abs(math.log(ratio)) for ratio in found[cached].values()))
    left_out = found[cached_bytes]
    steps = [step for each in configurations.values() for step in each]
    spread = max((max(ratio, 1 / max(ratio, 1e-9)) - 1 for ratio in left_out.values()), default=0.0)
    return Calibration(
        device,
        made,
        fit(steps, cached_bytes),
        spread,
        left_out,
        _ranges(steps),
        sorted({kernel for measured in configurations.values() for kernel in _kernels(measured[0].size)}),
        memory_bytes,
        cached_bytes,
    )


def _left_out(configurations: Mapping[str, Sequence[MeasuredStep]], cached_bytes: int) -> dict[str, float]:
    """Predicted over measured time of each configuration, by a fit without all configurations of its shape."""
    steps = [step for measured in configurations.values() for step in measured]
    _, amounts = _amounts(steps, cached_bytes)
    seconds, weights = np.array([step.seconds for step in steps]), _weights(steps)
    shapes = np.array([(step.size.hidden, step.size.layers) for step in steps])
    names = np.array([name for name, measured in configurations.items() for _ in measured])
    ratios = {}
    for shape in np.unique(shapes, axis=0):
        mine = (shapes == shape).all(axis=1)
        if mine.all():
            continue
        prices = _fitted(amounts[~mine], seconds[~mine], weights[~mine])
        known = {kernel for name in set(names[~mine]) for kernel in _kernels(configurations[name][0].size)}
        for name in dict.fromkeys(names[mine]):
            if _kernels(configurations[name][0].size) <= known:
                ratios[str(name)] = _ratio(amounts[names == name] @ prices, seconds[names == name])
    return {name: ratios[name] for name in configurations if name in ratios}


def _kernels(size: ModelSize) -> set[str]:
    return {kernel_of(each) for each in (*size.linears, size.head)}


def _ratio(predicted: np.ndarray, seconds: np.ndarray) -> float:
    """Predicted over measured time of all steps but outliers."""
    usual = np.median(seconds / predicted)
    kept = seconds < _OUTLIER * usual * predicted
    return float(predicted[kept].sum() / seconds[kept].sum())


def _ranges(steps: Sequence[MeasuredStep]) -> dict[str, tuple[float, float]]:
    values = {
        "weight bytes": [step.size.weight_bytes for step in steps],
        "layers": [step.size.layers for step in steps],
        "hidden size": [step.size.hidden for step in steps],
        "tokens of a step": [step.work.tokens for step in steps],
        "sequences": [step.work.chunks for step in steps],
        "context": [step.work.cached / max(1, step.work.chunks) for step in steps],
    }
    return {name: (float(min(found)), float(max(found))) for name, found in values.items()}
