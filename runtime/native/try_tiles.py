"""Products on AMX tiles compared with those on vector instructions: ``python -m smelt.runtime.native.try_tiles LIBRARY``.

Exits with a :class:`~.library.Verdict`. It runs in a separate process, since an instruction that the operating system refuses
kills the process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch

from ..weights.matrix import Matrix
from .library import Verdict, imported
from .linears import CodesLinear

_SHAPES = ((48, 256, 32), (80, 384, 128), (33, 512, 512))


def tried(kernels: ModuleType) -> Verdict:
    """Whether all products of some random weights agree bitwise; afterwards tiles are in use, if available."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for bits in (4, 8):
        for outputs, columns, group in _SHAPES:
            half = 1 << (bits - 1)
            codes = torch.randint(-half, half, (outputs, columns), generator=generator, dtype=torch.int8)
            scale = torch.rand(outputs, columns // group, generator=generator)
            matrix = Matrix(codes, f"int{bits} g{group}", bits, scale)
            linears = [CodesLinear(kernels, matrix, None, exact=False)]
            if CodesLinear.nests(matrix):
                linears.append(CodesLinear(kernels, matrix, None, exact=False, planes=True))
            inputs = [torch.randn(rows, columns, generator=generator).bfloat16() for rows in (16, 33, 64)]
            cases += [(linear, x) for linear in linears for x in inputs]
    expected = [linear(x) for linear, x in cases]
    if not kernels.use_tiles():
        return Verdict.REFUSED
    alike = all(torch.equal(linear(x), found) for (linear, x), found in zip(cases, expected, strict=True))
    return Verdict.RIGHT if alike else Verdict.WRONG


if __name__ == "__main__":
    sys.exit(tried(imported(Path(sys.argv[1]))))
