"""Requests drawn at random: lengths from named distributions, arrivals at a rate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from ...system.errors import RuntimeProblem
from .trace import Arrival

_FORMS = "fixed:N, uniform:LOW,HIGH, exponential:MEAN, lognormal:MEAN,SIGMA or pareto:MEAN,SHAPE"
_SHAPELESS = 1.0  # a Pareto distribution has no mean at or below this shape


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of numbers of tokens.

    Attributes:
        text: as it was written.
        draw: one of its numbers, at least 1.
    """

    text: str
    draw: Callable[[random.Random], int]

    @classmethod
    def parse(cls, text: str, option: str) -> LengthDistribution:
        """A distribution from its text, such as ``lognormal:300,0.9``.

        Args:
            text: one of the forms that the message lists.
            option: what asks for it, for the message.

        Raises:
            RuntimeProblem: it is none of them.
        """
        name, _, rest = text.partition(":")
        try:
            values = [float(each) for each in rest.split(",")]
            found = _drawing(name, values)
        except (ValueError, OverflowError):
            found = None
        if found is None:
            raise RuntimeProblem(f"{option}: {text!r} is not a distribution of lengths; give {_FORMS}")
        return cls(text, lambda draw: max(1, round(min(found(draw), 1e9))))


def _drawing(name: str, values: list[float]) -> Callable[[random.Random], float] | None:
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    match name, values:
        case "fixed", [length]:
            return lambda draw: length
        case "uniform", [low, high] if low <= high:
            return lambda draw: draw.uniform(low, high)
        case "exponential", [mean]:
            return lambda draw: draw.expovariate(1 / mean)
        case "lognormal", [mean, sigma]:
            return lambda draw: draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        case "pareto", [mean, shape] if shape > _SHAPELESS:
            return lambda draw: mean * (shape - 1) / shape * draw.paretovariate(shape)
        case _:
            return None


def synthetic(
    prompts: LengthDistribution,
    outputs: LengthDistribution,
    *,
    count: int,
    rate: float,
    longest: int,
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[Arrival]:
    """Requests at random times.

    Args:
        prompts, outputs: their lengths.
        count: how many.
        rate: arrivals a second, on average.
        longest: the most tokens of a request, prompt and output; longer ones are cut.
        burstiness: the coefficient of variation of the pauses: 1 for a Poisson process, 0 for equal pauses.
        seed: of the draws.
    """
    draw = random.Random(seed)
    found, now = [], 0.0
    for _ in range(count):
        prompt = min(prompts.draw(draw), longest - 1)
        found.append(Arrival(now, prompt, min(outputs.draw(draw), longest - prompt)))
        shape = 1 / max(burstiness, 1e-3) ** 2
        now += draw.gammavariate(shape, 1 / (shape * rate))
    return found
