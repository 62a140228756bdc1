"""Does the simulator predict the engine? Requests on this machine's engine beside their simulation.

``python -m benchmarks.serving.simulator --scratch DIR`` calibrates this machine (or reads ``--calibration FILE``), then serves requests with
models, formats and loads that the calibration has not seen, each at its time, and simulates the same arrivals. The engine serves them twice: how
far the second time is from the first is what no prediction can know.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smelt.models.directory.directory import ModelDirectory
from smelt.quant.scheme import resolve
from smelt.runtime import Engine
from smelt.runtime.costs.calibration import Calibration
from smelt.runtime.costs.model_size import ModelSize, model_size
from smelt.runtime.measure.calibrate import Shape, calibrate
from smelt.runtime.measure.percentile import percentile
from smelt.runtime.measure.random_checkpoint import write_random_checkpoint
from smelt.runtime.requests.synthetic import LengthDistribution, synthetic
from smelt.runtime.requests.trace import Arrival
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.results import Served
from smelt.runtime.simulate.simulation import simulate

from ..common import parser, save
from .engine_run import EngineRun

NAME = "simulator"
# None of these shapes, nor W3A16, is among those that are calibrated.
SMALL, WIDE, DEEP = (
    Shape(384, 1024, 10, 6, 2, 8192),
    Shape(1536, 4096, 6, 12, 4, 16384),
    Shape(576, 1536, 30, 9, 3, 49152),  # SmolLM2-135M's
)
CONFIGURATIONS: dict[str, tuple[Shape, str, int | None]] = {
    "384x10, W4A16 g128": (SMALL, "W4A16", 128),
    "384x10, bfloat16": (SMALL, "bfloat16", None),
    "1536x6, W8A8": (WIDE, "W8A8", None),
    "1536x6, W3A16 g128": (WIDE, "W3A16", 128),
    "SmolLM2-135M, bfloat16": (DEEP, "bfloat16", None),
    "SmolLM2-135M, W4A16 g64": (DEEP, "W4A16", 64),
}
# Load: the share of time that the engine should be busy, and how bursty arrivals are.
LOADS = {"half busy": (0.5, 1.0), "bursts": (0.7, 3.0)}
REQUESTS = 40
PROMPTS, OUTPUTS = "lognormal:150,0.8", "lognormal:40,0.7"
_LONGEST = 1024


Latency = Callable[[Served], float | None]
# Of a request, in seconds; no pause between tokens if it has one token.
LATENCIES: dict[str, Latency] = {
    "first_token": lambda each: each.first - each.at,
    "between_tokens": lambda each: (each.ended - each.first) / (each.output - 1) if each.output > 1 else None,
    "completion": lambda each: each.ended - each.at,
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--scratch", type=Path, required=True, help="a directory for random checkpoints")
    options.add_argument(
        "--calibration", type=Path, help="what smelt bench --calibrate wrote; measured first if not given"
    )
    options.add_argument("--only", nargs="*", default=list(CONFIGURATIONS), help="configurations")
    given = options.parse_args()
    calibrated = (
        Calibration.read(given.calibration)
        if given.calibration
        else calibrate(command="python -m benchmarks.serving.simulator", log=print)
    )
    found = {}
    for name in given.only:
        shape, form, group = CONFIGURATIONS[name]
        folder = given.scratch / name.replace(",", "").replace(" ", "-")
        if not folder.exists():
            write_random_checkpoint(folder, shape.config(), None if form == "bfloat16" else resolve(form, group))
        found[name] = {load: _compared(folder, calibrated, *settings) for load, settings in LOADS.items()}
        print(name, found[name])
    save(
        NAME,
        "python -m benchmarks.serving.simulator --scratch DIR",
        {"configurations": found, "left_out": calibrated.left_out},
    )


def _compared(folder: Path, calibrated: Calibration, busy: float, burstiness: float) -> dict[str, Any]:
    engine = Engine(folder, max_num_seqs=32, enable_prefix_caching=False, quiet=True, max_model_len=_LONGEST)
    size = model_size(ModelDirectory(folder.name, folder))
    options = SimulatedEngine(engine.reservation.blocks, max_num_seqs=32)
    arrivals = _arrivals(size, options, calibrated, busy, burstiness)
    first, again = (EngineRun.of(engine, arrivals).served for _ in range(2))
    result = simulate(arrivals, options, calibrated.cost(size))
    return {
        "busy": result.busy,
        "requests_per_second": len(arrivals) / arrivals[-1].at,
        **{name: _errors(latency, first, result.served) for name, latency in LATENCIES.items()},
        "again": {name: _errors(latency, first, again)["median_error"] for name, latency in LATENCIES.items()},
        "outside": calibrated.outside(size, sequences=32, tokens=512, context=_LONGEST),
    }


def _arrivals(
    size: ModelSize, options: SimulatedEngine, calibrated: Calibration, busy: float, burstiness: float
) -> list[Arrival]:
    """At a rate at which the engine should be busy for such a share of the time."""
    rate = 1.0
    found: list[Arrival] = []
    for _ in range(6):
        found = synthetic(
            LengthDistribution.parse(PROMPTS, "prompts"), LengthDistribution.parse(OUTPUTS, "outputs"), count=REQUESTS, rate=rate,
            longest=_LONGEST, burstiness=burstiness, seed=1,
        )  # fmt: skip
        share = simulate(found, options, calibrated.cost(size)).busy
        rate *= busy / share if share < 0.97 else 0.5
    return found


def _errors(latency: Latency, measured: Sequence[Served], predicted: Sequence[Served]) -> dict[str, float]:
    """Of each request, relative to its measurement; and of the means and the 99th percentiles."""
    pairs = [
        (ours, real)
        for a, b in zip(predicted, measured, strict=True)
        if (ours := latency(a)) is not None and (real := latency(b)) is not None
    ]
    off = sorted(abs(ours / real - 1) for ours, real in pairs)
    return {
        "measured_mean": statistics.mean(real for _, real in pairs),
        "predicted_mean": statistics.mean(ours for ours, _ in pairs),
        "median_error": statistics.median(off),
        "p99_error": percentile(off, 0.99),
        "error_of_p99": percentile((ours for ours, _ in pairs), 0.99) / percentile((real for _, real in pairs), 0.99)
        - 1,
    }


if __name__ == "__main__":
    main()
