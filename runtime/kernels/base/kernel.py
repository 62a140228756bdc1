"""What every kernel brings along to be checked: cases with references, and what of it is compiled for whom."""

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
        compute: launches the kernel, into outputs that were not numbers before.
        expected: in float64.
        reads: bytes of weights that a launch must read.
    """

    compute: Callable[[], Tensor]
    expected: Tensor
    reads: int


@dataclass(frozen=True)
class Case:
    """One way to call a kernel.

    Attributes:
        name: for people.
        prepare: draws inputs.
        tolerance: how far outputs may be from float64, relative to their size.
        large: only for a GPU; the interpreter would take minutes.
        targets: names of those that it is for; empty for all.
        launch: the same on ``meta``, to be compiled before.
    """

    name: str
    prepare: Callable[[torch.device, torch.Generator], PreparedCase]
    tolerance: float
    large: bool = False
    targets: tuple[str, ...] = ()
    launch: Callable[[Target], Launch] | None = None


@dataclass(frozen=True)
class Build:
    """One compilation of a kernel, with what its machine code must show.

    Attributes:
        name: for people.
        launch: for a target's shipped tiles.
        matrix: whether it must use tensor cores.
        wide: whether they must be those of the target's own generation.
        streamed: arguments that must be read 16 bytes a thread.
        targets: names of those that it is for; empty for all.
        rare: whether other builds show the same format, tile and options, only not together.
        overlapped: whether its loops must compute while what they read next is on its way, and may not gather bytes.
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
_KEPT = 4 << 30  # bytes of outputs that wait to be compared


def poisoned(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Outputs that show whether each was written."""
    return torch.full((rows, columns), float("nan"), dtype=dtype, device=device)


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a dictionary's tensors, on a device."""
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def problem(case: Case, device: torch.device, seed: int, runs: int = 2) -> str | None:
    """Run a case back to back, and compare with float64; say what is wrong, or None.

    Args:
        case: which.
        device: where.
        seed: of its inputs.
        runs: how often, all with the same bits: programs that race meet in another order each time.
    """
    trial = case.prepare(device, torch.Generator(device).manual_seed(seed))
    first, others = trial.compute(), runs - 1
    # Launched without looking in between, as many as little memory holds.
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
    # An error in few places hides in the norm of all.
    worst = float((apart.abs() / (trial.expected.abs() + size)).max())
    if whole > case.tolerance:
        return f"outputs are {whole:.1e} away from float64, {case.tolerance:.1e} allowed"
    if worst > 4 * case.tolerance:
        return f"one output is {worst:.1e} away from float64, {4 * case.tolerance:.1e} allowed"
    return None
