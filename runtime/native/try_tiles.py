"""Products on AMX tiles compared with those on vector instructions, or emulated: ``python -m smelt.runtime.native.try_tiles LIBRARY``.

Exits with a :class:`~.library.Verdict`. It runs in a separate process, since an instruction that the operating system refuses
kills the process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..weights.matrix import Matrix
from .library import Verdict, imported
from .linears import CodesLinear, NativeDenseLinear

_SHAPES = ((48, 256, 32), (80, 384, 128), (33, 512, 512))


def tried(kernels: ModuleType) -> Verdict:
    """Whether all products of some random weights agree bitwise; afterwards tiles are in use, if available."""
    codes, dense = _codes(kernels), _dense(kernels)

    def computed() -> tuple[list[Tensor], list[Tensor]]:
        return [linear(x) for linear, x in codes], [linear.on_tiles(x) for linear, x in dense]

    expected = computed()
    if not kernels.use_tiles(dense=True):
        return Verdict.REFUSED
    codes_right, dense_right = (all(map(torch.equal, *both)) for both in zip(computed(), expected, strict=True))
    if not codes_right:
        return Verdict.WRONG
    return Verdict.RIGHT if dense_right else Verdict.ONLY_CODES


def _codes(kernels: ModuleType) -> list[tuple[CodesLinear, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    cases: list[tuple[CodesLinear, Tensor]] = []
    for bits in (4, 8):
        for outputs, columns, group in _SHAPES:
            half = 1 << (bits - 1)
            codes = torch.randint(-half, half, (outputs, columns), generator=generator, dtype=torch.int8)
            scale = torch.rand(outputs, columns // group, generator=generator)
            matrix = Matrix(codes, f"int{bits} g{group}", bits, scale)
            linears = [CodesLinear(kernels, matrix, None, exact=False)]
            if CodesLinear.nests(matrix):
                linears.append(CodesLinear(kernels, matrix, None, exact=False, planes=True))
            inputs = [torch.randn(rows, columns, generator=generator).bfloat16() for rows in (25, 33, 64)]
            cases += [(linear, x) for linear in linears for x in inputs]
    return cases


def _dense(kernels: ModuleType) -> list[tuple[NativeDenseLinear, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    cases = []
    for outputs, columns, _ in _SHAPES:
        weight = torch.randn(outputs, columns, generator=generator).bfloat16()
        linear = NativeDenseLinear(kernels, weight, None, "", any_rows=True)
        cases += [(linear, torch.randn(rows, columns, generator=generator).bfloat16()) for rows in (1, 17, 33)]
    return cases


if __name__ == "__main__":
    sys.exit(tried(imported(Path(sys.argv[1]))))
