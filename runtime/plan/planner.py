"""The plan: every candidate's figures, and the least compressed one that meets the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ...system.errors import RuntimeProblem
from ...system.hardware.machine import human_bytes
from ...system.progress import Log
from ..costs.device_cost import DeviceCost, device_cost
from ..costs.model_size import ModelSize, model_size
from ..measure.this_machine import rates_of_this_machine
from .candidates import PlanCandidate, find_candidates
from .figures import Figures, PlanLoad, figures
from .targets import PlanTarget

if TYPE_CHECKING:
    from ...models.directory.directory import ModelDirectory

_CONTEXT = 4096
# Less of a difference is none.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned.

    Attributes:
        device: a shipped one's name, a file, or ``cpu``: this machine.
        devices: that share every layer.
        context: tokens of a sequence; the lesser of 4,096 and the model's maximum if None.
        batch: sequences that are decoded together.
        max_num_batched_tokens: tokens of a prompt that a step computes.
        targets: what must be reached.
        schemes: to choose from; all if empty.
    """

    device: str = "cpu"
    devices: int = 1
    context: int | None = None
    batch: int = 8
    max_num_batched_tokens: int = 512
    targets: Sequence[PlanTarget] = ()
    schemes: Sequence[str] = ()


@dataclass(frozen=True)
class MeasuredSpeed:
    """What a model of random weights did on this machine.

    Attributes:
        prompt: its tokens.
        prefill_rate: prompt tokens a second.
        tokens_per_second: of one sequence, after the prompt.
        layers: that were built; more are extrapolated.
    """

    prompt: int
    prefill_rate: float
    tokens_per_second: float
    layers: int


@dataclass(frozen=True)
class PlanEntry:
    """A candidate with what is known of it.

    Attributes:
        candidate: what it is.
        figures: calibrated or predicted.
        misses: a sentence for each target that it misses.
        shortfall: the largest of the misses, relative to their targets.
        no_gain_over: the less compressed candidate that is at least as good in every figure, if there is one.
        outside: why its figures are outside the calibrated range.
        measured: on this machine, if it was.
    """

    candidate: PlanCandidate
    figures: Figures
    misses: list[str]
    shortfall: float
    no_gain_over: str | None = None
    outside: tuple[str, ...] = ()
    measured: MeasuredSpeed | None = None

    @property
    def meets(self) -> bool:
        """Whether it fits and meets all targets."""
        return self.figures.fits and not self.misses

    def as_data(self) -> dict[str, Any]:
        """As JSON."""
        candidate = self.candidate
        return {
            "label": candidate.label,
            "scheme": None if candidate.scheme is None else candidate.scheme.label,
            "head_quantized": candidate.head is not None,
            "kv_cache_dtype": candidate.kv_cache_dtype,
            "blocks_dropped": candidate.dropped,
            "order": candidate.loss,
            **asdict(self.figures),
            "meets": self.meets,
            "misses": self.misses,
            "no_gain_over": self.no_gain_over,
            "outside_calibrated_range": list(self.outside),
            "notes": list(candidate.notes),
            "measured": None if self.measured is None else asdict(self.measured),
        }


@dataclass(frozen=True)
class ServingPlan:
    """What was found.

    Attributes:
        model: the sizes of the model as it is.
        device: its cost model.
        load: what is served.
        targets: as given.
        planned: all candidates, best first.
        recommended: the least compressed candidate that gains something and meets the targets; None if none does.
    """

    model: ModelSize
    device: DeviceCost
    load: PlanLoad
    targets: Sequence[PlanTarget]
    planned: list[PlanEntry]
    recommended: PlanEntry | None

    @property
    def problem(self) -> str | None:
        """Why nothing is recommended, as a sentence; None if something is."""
        if self.recommended is not None:
            return None
        fitting = [each for each in self.planned if each.figures.fits]
        if not fitting:
            least = min(self.planned, key=lambda each: each.figures.memory_bytes)
            return (
                f"no candidate fits into {human_bytes(self.load.memory_bytes)}: the smallest, {least.candidate.label}, needs"
                f" {human_bytes(least.figures.memory_bytes)} with a sequence of {self.load.context:,} tokens; give more --devices,"
                " a lower --context or a smaller model"
            )
        closest = min(fitting, key=lambda each: (each.shortfall, each.candidate.loss))
        return f"no candidate meets the targets; {closest.candidate.label} comes closest: {'; '.join(closest.misses)}"

    @property
    def doubts(self) -> list[str]:
        """Targets that the recommended candidate misses if times are as much longer as they may be."""
        if self.recommended is None:
            return []
        slower = 1 + self.device.spread
        found = self.recommended.figures
        worse = replace(
            found,
            tokens_per_second=found.tokens_per_second / slower,
            throughput=None if found.throughput is None else found.throughput / slower,
            first_token=found.first_token * slower,
        )
        return [each.missed(worse) for each in self.targets if each.shortfall(worse)]

    def as_data(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": {
                "name": self.model.name,
                "schemes": self.model.schemes,
                "weight_bytes": self.model.weight_bytes,
                "kv_bytes_per_position": self.model.kv_bytes,
            },
            "device": {
                "name": self.device.name,
                "count": self.load.devices,
                "memory_bytes": self.device.memory_bytes,
                "times": self.device.kind,
                "spread": self.device.spread,
            },
            "context": self.load.context,
            "batch": self.load.batch,
            "max_num_batched_tokens": self.load.max_num_batched_tokens,
            "targets": {each.name: each.value for each in self.targets},
            "recommended": None if self.recommended is None else self.recommended.as_data(),
            "problem": self.problem,
            "doubts": self.doubts,
            "candidates": [each.as_data() for each in self.planned],
        }


def plan(directory: ModelDirectory, request: PlanRequest, log: Log = lambda _: None) -> ServingPlan:
    """Plan a model on a device.

    Args:
        directory: of the model; only its ``config.json`` is read.
        request: what is to be planned.
        log: gets messages for the user.

    Raises:
        SmeltError: the model cannot be sized, an option is wrong, or a constant that is needed is not known.
    """
    device = device_cost(request.device, measure=rates_of_this_machine(log))
    model = model_size(directory)
    context = min(_CONTEXT, model.max_length) if request.context is None else request.context
    if context > model.max_length:
        raise RuntimeProblem(
            f"--context is {context:,}, but {model.name} has at most {model.max_length:,} positions; lower it"
        )
    try:
        model.cache_share(request.devices)
    except RuntimeProblem as problem:
        raise RuntimeProblem(f"--devices: {problem}") from None
    limit = min([request.devices * device.memory_bytes, *(t.value for t in request.targets if t.name == "memory")])
    load = PlanLoad(context, request.batch, request.max_num_batched_tokens, request.devices, limit)
    constants = device.device
    candidates = find_candidates(
        directory,
        on_cpu=constants is None or constants.kind == "cpu",
        constants=[] if constants is None else [name for name, each in constants.constants.items() if each.value],
        schemes=request.schemes,
    )
    planned: list[PlanEntry] = []
    for candidate in candidates:
        found = figures(candidate.size, device, load)
        outside = device.outside(
            candidate.size, sequences=load.batch, tokens=load.max_num_batched_tokens, context=context
        )
        missed = [each for each in request.targets if each.shortfall(found)]
        # If it does not fit into a memory that is the target, the target says so.
        planned.append(
            PlanEntry(
                candidate,
                found,
                [each.missed(found) for each in missed],
                max((each.shortfall(found) for each in missed), default=0.0),
                next((each.candidate.label for each in planned if _as_good(each.figures, found)), None),
                tuple(outside),
            )
        )
    recommended = next((each for each in planned if each.meets and each.no_gain_over is None), None)
    return ServingPlan(model, device, load, request.targets, _ordered(planned, recommended), recommended)


def _as_good(one: Figures, other: Figures) -> bool:
    """Whether one is at least as good as the other in every figure."""
    pairs = [
        (other.memory_bytes, one.memory_bytes),
        (one.tokens_per_second, other.tokens_per_second),
        (one.throughput or 0.0, other.throughput or 0.0),
        (other.first_token, one.first_token),
        (float(one.sequences), float(other.sequences)),
    ]
    return all(better >= worse * (1 - _TOLERANCE) for better, worse in pairs)


def _ordered(planned: list[PlanEntry], recommended: PlanEntry | None) -> list[PlanEntry]:
    """Best first: what meets the targets, the least compressed first; then what is closest; then what does not fit.

    Without targets all that fit meet them, so each format's plainest candidate comes before its variants.
    """
    has_targets = any(each.misses for each in planned)

    def key(each: PlanEntry) -> tuple[float, ...]:
        candidate = each.candidate
        variant = candidate.kv_cache_dtype != "auto" or candidate.dropped > 0
        plainest = 0.0 if has_targets or not variant else 1.0
        by_memory = 0.0 if each.figures.fits else each.figures.memory_bytes
        gains = each.no_gain_over is None
        return (
            each is not recommended, not each.figures.fits, not gains, plainest, by_memory, each.shortfall, candidate.loss
        )  # fmt: skip

    return sorted(planned, key=key)
