"""Targets: what a plan must reach, and how far a candidate is from it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...system.errors import RuntimeProblem, nearest_name
from ...system.hardware.machine import human_bytes
from .figures import Figures

_LEAST_MEMORY = 1e6  # bytes: whoever asks for fewer has left out a unit
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True)
class TargetKind:
    """A figure that can have a target.

    Attributes:
        figure: its value; None if the batch does not fit.
        at_least: whether more is better.
        example: for messages.
        show: its value in words.
        what: what it is.
    """

    figure: Callable[[Figures], float | None]
    at_least: bool
    example: str
    show: Callable[[float], str]
    what: str


def show_seconds(seconds: float) -> str:
    """``0.0123`` as ``12.3 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def show_rate(value: float) -> str:
    """``12.34`` as ``12.3``, and ``1234.5`` as ``1,234``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


TARGETS: dict[str, TargetKind] = {
    "tokens_per_second": TargetKind(lambda f: f.tokens_per_second, True, "50", show_rate, "of one sequence"),
    "throughput": TargetKind(lambda f: f.throughput, True, "2000", show_rate, "tokens a second at --batch"),
    "ttft": TargetKind(lambda f: f.first_token, False, "0.5", show_seconds, "seconds to the first token of --context"),
    "memory": TargetKind(lambda f: f.memory_bytes, False, "24GB", human_bytes, "of all devices"),
    "batch": TargetKind(lambda f: float(f.sequences), True, "16", show_rate, "sequences of --context that fit"),
}


@dataclass(frozen=True)
class PlanTarget:
    """A figure and the value that it must reach."""

    name: str
    value: float

    @classmethod
    def parse(cls, text: str) -> PlanTarget:
        """A target from its text, such as ``ttft=0.5``.

        Raises:
            RuntimeProblem: it is none.
        """
        name, separator, given = text.partition("=")
        name = name.strip()
        if not separator or name not in TARGETS:
            forms = ", ".join(f"{each}={kind.example}" for each, kind in TARGETS.items())
            raise RuntimeProblem(f"--target: {text!r} is none; known: {forms}{nearest_name(name, list(TARGETS))}")
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)(?:[eE]([+-]?\d{1,2}))?\s*([A-Za-z]*)\s*", given)
        unit = found[3].upper() if found else ""
        allowed = _UNITS if name == "memory" else {"": 1}
        value = float(f"{found[1]}e{found[2] or 0}") * allowed[unit] if found and unit in allowed else math.nan
        if name == "memory" and value < _LEAST_MEMORY:
            raise RuntimeProblem(
                f"--target: memory is {given!r}, which is {value:g} bytes; give a unit, such as memory=24GB"
            )
        if not (math.isfinite(value) and value > 0):
            units = ", with or without B, MB, GB, MiB or GiB" if name == "memory" else ""
            raise RuntimeProblem(
                f"--target: {name} is {given!r}; it must be a number above 0{units}, such as {name}={TARGETS[name].example}"
            )
        return cls(name, value)

    def __str__(self) -> str:
        return f"{self.name}={TARGETS[self.name].show(self.value)}"

    def shortfall(self, found: Figures) -> float:
        """By how much figures miss it, relative to it; 0 if they meet it."""
        kind = TARGETS[self.name]
        value = kind.figure(found)
        if value is None:
            return 1.0
        return max(0.0, 1 - value / self.value if kind.at_least else value / self.value - 1)

    def missed(self, found: Figures) -> str:
        """By how much figures miss it, in words."""
        kind = TARGETS[self.name]
        value = kind.figure(found)
        if value is None:
            return f"{self.name}: the batch does not fit"
        side = "below" if kind.at_least else "above"
        return f"{self.name} is {kind.show(value)}, {self.shortfall(found):.0%} {side} the target of {kind.show(self.value)}"


def parse_targets(texts: Sequence[str]) -> list[PlanTarget]:
    """Targets, each figure once.

    Raises:
        RuntimeProblem: one is none, or a figure has two.
    """
    found = [PlanTarget.parse(text) for text in texts]
    names = [each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RuntimeProblem(f"--target: {twice} is given twice; give it once")
    return found
