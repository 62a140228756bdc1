"""Decode-step time on this machine with every choice of format, using the runtime's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...models.structure.open_model import OpenModel
from ...quant.mixed.costs import unit_bytes
from ...quant.mixed.format_units import Unit
from ...quant.scheme import Scheme
from ...runtime.decoder.architectures import spec_of
from ...runtime.measure.step_time import linear_seconds, step_seconds
from ...system.errors import RuntimeProblem, SmeltError
from ...system.hardware.machine import available_memory
from ...system.progress import Progress
from ...system.storage.measurement_cache import Kept
from ...system.versions import versions
from ..results.this_machine import this_machine

# Weights may be kept wider than they are stored; a cache and libraries add to it.
_IN_MEMORY = 2.5
_NOISE = 0.05


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a decode step at batch size 1.

    Attributes:
        whole: of the original.
        around: of everything but the units.
        units: by unit and option.
        estimated: whether ``around`` omits attention and norms, because the original does not fit in memory.
    """

    whole: float
    around: float
    units: list[list[float]]
    estimated: bool


def step_times(
    model: OpenModel,
    units: list[Unit],
    options: list[list[Scheme | None]],
    fixed: list[tuple[Unit, Scheme]],
    progress: Progress,
) -> StepTimes:
    """Time every unit with every option; earlier timings on this machine are reused.

    Args:
        model: the stored model.
        units: the units that get a choice.
        options: by unit, its possible formats.
        fixed: units with a fixed scheme.
        progress: shows progress.

    Raises:
        SmeltError: the runtime does not serve the model.
    """
    try:
        spec = spec_of(model.config)
    except RuntimeProblem as problem:
        raise SmeltError(f"target.speedup: {problem}; give a target of bits or bytes instead") from None
    share = spec.experts_per_token / spec.experts if spec.experts else 1.0
    wanted = [(unit, option) for unit, each in zip(units, options, strict=True) for option in each]
    wanted += [(unit, option) for unit, scheme in fixed for option in (None, scheme)]
    numel = {unit: sum(model.linears[n].numel for n in unit.linears) for unit in [*units, *(u for u, _ in fixed)]}
    step = int(sum(count * (share if unit.is_experts else 1.0) for unit, count in numel.items()))
    timed = _linear_times(model, wanted, step, progress)

    def seconds(unit: Unit, option: Scheme | None) -> float:
        parts = (timed[_shape(model, stack)][_name(option)] for stack in unit.stacks)
        return sum(parts) * (share if unit.is_experts else 1.0)

    estimated = _IN_MEMORY * model.stored.nbytes > available_memory()
    head = model.head
    now = sum(seconds(unit, None) for unit in [*units, *(unit for unit, _ in fixed)])
    if estimated:
        heads = any(head.name in unit.linears for unit in units)
        whole = now + (0.0 if heads else linear_seconds(head.rows, head.columns, [None], model.dtype, step)[0])
        progress.say("the original does not fit in memory: its step is estimated from its linears alone")
    else:
        trust = model.directory.trust_remote_code
        about = {"model": model.stored.fingerprint()}
        (whole,) = _once(
            model, "step", about, lambda: [step_seconds(model.directory.path, progress.say, trust_remote_code=trust)]
        )
    around = max(0.0, whole - now) + sum(seconds(unit, scheme) for unit, scheme in fixed)
    by_unit = []
    for unit, each in zip(units, options, strict=True):
        stored = [unit_bytes(model, unit, option) for option in each]
        by_unit.append(beyond_noise([seconds(unit, option) for option in each], stored))
    return StepTimes(whole, around, by_unit, estimated)


def _linear_times(
    model: OpenModel, wanted: list[tuple[Unit, Scheme | None]], step: int, progress: Progress
) -> dict[tuple[int, int], dict[str, float]]:
    """Seconds of a linear of each shape, by the name of its scheme."""
    by_shape: dict[tuple[int, int], dict[str, Scheme | None]] = {}
    for unit, option in wanted:
        for stack in unit.stacks:
            by_shape.setdefault(_shape(model, stack), {})[_name(option)] = option
    timed: dict[tuple[int, int], dict[str, float]] = {}
    for (rows, columns), by_name in progress.track(list(by_shape.items()), "timing linears", len(by_shape)):
        each = list(by_name.values())

        def time_them(rows: int = rows, columns: int = columns, each: list[Scheme | None] = each) -> list[float]:
            return linear_seconds(rows, columns, each, model.dtype, step)

        about = {"rows": rows, "columns": columns, "schemes": [_data(option) for option in each], "step": step}
        timed[rows, columns] = dict(zip(by_name, _once(model, "linear", about, time_them), strict=True))
    return timed


def beyond_noise(seconds: list[float], stored: list[int]) -> list[float]:
    """Times in which a smaller format is faster than a larger one only if by more than timing noise.

    Kernels may store two formats alike, such as 3 bits in 4: the smaller one then loses accuracy for no speedup.

    Args:
        seconds: by option.
        stored: its bytes.
    """
    found = list(seconds)
    best = float("inf")
    for place in sorted(range(len(stored)), key=lambda place: -stored[place]):
        if (1 - _NOISE) * best < found[place] < best:
            found[place] = best
        best = min(best, found[place])
    return found


def _once(model: OpenModel, kind: str, about: dict[str, Any], measure: Callable[[], list[float]]) -> list[float]:
    machine = this_machine().model_dump(include={"processor", "cores", "threads", "system"})
    kept = Kept(f"seconds-{kind}", {**about, "dtype": str(model.dtype), "machine": machine, "versions": versions()})
    found = kept.read()
    if found is None:
        found = measure()
        kept.write(found)
    return [float(seconds) for seconds in found]


def _shape(model: OpenModel, stack: tuple[str, ...]) -> tuple[int, int]:
    """The shape of a stack's linears as one."""
    return sum(model.linears[name].rows for name in stack), model.linears[stack[0]].columns


def _name(scheme: Scheme | None) -> str:
    return "" if scheme is None else scheme.label


def _data(scheme: Scheme | None) -> Any:
    return None if scheme is None else [scheme.label, scheme.args.model_dump(mode="json")]
