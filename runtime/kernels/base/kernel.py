"""What every kernel provides for its checks: test cases with references, and builds for each target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .launch import Launch
from .targets import Target


@dataclass(frozen=True)
class PreparedCase:
    """A case with its inputs.

    Attributes:
        compute: launches the kernel, with outputs filled with NaN before.
        expected: in float64.
        reads: bytes of weights that a launch must read.
    """

    compute: Callable[[], Tensor]
    expected: Tensor
    reads: int


@dataclass(frozen=True)
class Case:
    """A test case of a kernel.

    Attributes:
        name: for messages.
        prepare: draws inputs.
        tolerance: the largest error relative to float64.
        large: run only on a GPU, as the interpreter would take minutes.
        targets: names of its targets; empty for all.
        launch: the same on ``meta``, to compile it ahead.
    """

    name: str
    prepare: Callable[[torch.device, torch.Generator], PreparedCase]
    tolerance: float
    large: bool = False
    targets: tuple[str, ...] = ()
    launch: Callable[[Target], Launch] | None = None


@dataclass(frozen=True)
class Build:
    """One compilation of a kernel, with requirements on its machine code.

    Attributes:
        name: for messages.
        launch: for a target's shipped tiles.
        matrix: whether it must use tensor cores.
        wide: whether they must be of the target's generation.
        streamed: arguments that must be read with 16-byte loads per thread.
        targets: names of its targets; empty for all.
        rare: whether other builds cover the same format, tile and options, but not in this combination.
        overlapped: whether its loops must overlap computation with their next loads, and must not gather bytes.
    """

    name: str
    launch: Callable[[Target], Launch]
    matrix: bool
    streamed: tuple[str, ...]
    wide: bool = False
    targets: tuple[str, ...] = ()
    rare: bool = False
    overlapped: bool = False


@dataclass(frozen=True)
class Kernel:
    """Everything about one kernel."""

    name: str
    cases: Sequence[Case]
    builds: Sequence[Build]


TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
_KEPT = 4 << 30  # bytes of outputs held for comparison


def poisoned(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Outputs filled with values that show unwritten elements."""
    return torch.full((rows, columns), float("nan"), dtype=dtype, device=device)


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a dictionary's tensors, on a device."""
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def problem(case: Case, device: torch.device, seed: int, runs: int = 2) -> str | None:
    """Run a case repeatedly and compare with float64; returns what is wrong, or None.

    Args:
        case: which.
        device: where.
        seed: of its inputs.
        runs: number of runs, which must agree bitwise, to detect races between programs.
    """
    trial = case.prepare(device, torch.Generator(device).manual_seed(seed))
    first, others = trial.compute(), runs - 1
    # Launched back to back, as many as fit in little memory.
    together = max(1, min(others, _KEPT // max(1, first.nbytes)))
    while others > 0:
        for again in [trial.compute() for _ in range(min(together, others))]:
            others -= 1
            if not torch.equal(first.view(torch.uint8), again.view(torch.uint8)):
                return f"run {runs - others} differs bitwise from the first on the same inputs"
    got = first.double()
    if not bool(torch.isfinite(got).all()):
        return f"{int((~torch.isfinite(got)).sum())} of {got.numel()} outputs were not written, or are NaN or infinite"
    apart, size = got - trial.expected, trial.expected.square().mean().sqrt()
    whole = float(apart.norm() / trial.expected.norm())
    # An error in few elements is hidden in the norm of all.
    worst = float((apart.abs() / (trial.expected.abs() + size)).max())
    if whole > case.tolerance:
        return f"outputs are {whole:.1e} away from float64, {case.tolerance:.1e} allowed"
    if worst > 4 * case.tolerance:
        return f"one output is {worst:.1e} away from float64, {4 * case.tolerance:.1e} allowed"
    return None
