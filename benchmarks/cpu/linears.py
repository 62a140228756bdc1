"""How long the compiled kernels take for a linear, beside a plain read of as much memory as its weight has.

    python -m benchmarks.cpu.linears [--turns 21] [--rows 1 2 3 4 5 6 8 16] [--results NAME]

Weights of 67 million values, which no cache holds, with rows of 2048 and 8192, in random order, and torch's product by those of bfloat16. Each measurement stands between two reads of other memory by
torch's sum of integers, since the speed of a machine's memory may change.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from smelt.runtime.native import library
from smelt.runtime.native.linears import CodesLinear, NativeDenseLinear
from smelt.runtime.weights.matrix import Matrix
from smelt.system.hardware.pages import in_large_pages
from torch import Tensor
from torch.nn import functional

from ..common import parser, save

VALUES = 1 << 26
COLUMNS = (2048, 8192)
GROUP = 128
ROWS = (1, 2, 3, 4, 5, 6, 8, 16)
Linear = Callable[[Tensor], Tensor]


def linears(kernels: ModuleType, columns: int) -> dict[str, tuple[int, Linear]]:
    """Each kind, with the bytes that it reads."""
    outputs = VALUES // columns
    generator = torch.Generator().manual_seed(0)

    def codes(bits: int) -> Matrix:
        half = 1 << (bits - 1)
        values = torch.randint(-half, half, (outputs, columns), generator=generator, dtype=torch.int8)
        scale = torch.rand(outputs, columns // GROUP, generator=generator).bfloat16()
        return Matrix(values, f"int{bits}", bits, scale, None)

    weight = in_large_pages(torch.randn(outputs, columns, generator=generator).bfloat16())
    dense = NativeDenseLinear(kernels, weight, None, "", any_rows=True)
    planes = CodesLinear(kernels, codes(8), None, exact=False, few_exact=False, planes=True)
    upper = planes.upper()
    assert upper is not None
    kinds: dict[str, Any] = {
        "bfloat16": dense,
        "W4A16": CodesLinear(kernels, codes(4), None, exact=False),
        "W8A16": CodesLinear(kernels, codes(8), None, exact=False),
        "W4in8 that drafts": planes,
        "its upper bits": upper,
    }
    found: dict[str, tuple[int, Linear]] = {name: (linear.nbytes, linear) for name, linear in kinds.items()}
    return found | {"bfloat16, by torch": (weight.nbytes, partial(functional.linear, weight=weight))}


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@torch.inference_mode()
def measured(kernels: ModuleType, columns: int, turns: int, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Of each kind and number of rows its time beside a read's, in turns."""
    kinds = linears(kernels, columns)
    memory = in_large_pages(torch.ones(VALUES // 4, dtype=torch.int64))
    inputs = {count: torch.randn(count, columns).bfloat16() for count in rows}
    ratios: dict[tuple[str, int], list[float]] = {(name, count): [] for name in kinds for count in rows}
    reads = []
    order = random.Random(0)
    for _ in range(turns):
        before = seconds(memory.sum)
        for name, count in order.sample(list(ratios), len(ratios)):
            size, linear = kinds[name]
            taken = seconds(lambda linear=linear, count=count: linear(inputs[count]))
            after = seconds(memory.sum)
            ratios[name, count].append(taken / size / ((before + after) / 2 / memory.nbytes))
            reads.append(after)
            before = after
    speeds = sorted(memory.nbytes / each / 1e9 for each in reads)
    middle = {"columns": columns, "read_gb_s": [round(speeds[len(speeds) * i // 4], 1) for i in (1, 2, 3)]}
    return [
        {**middle, "kind": name, "beside_read": {str(n): round(statistics.median(ratios[name, n]), 3) for n in rows}}
        for name in kinds
    ]


def main() -> None:
    """Measure, print, and keep."""
    options = parser(__doc__)
    options.add_argument("--turns", type=int, default=21)
    options.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options.add_argument("--results", default="cpu_linears", help="file of the results, %(default)s by default")
    given = options.parse_args()
    kernels = library.kernels(print)
    if kernels is None:
        raise SystemExit("this machine cannot run the compiled kernels")
    rows = []
    for columns in COLUMNS:
        for row in measured(kernels, columns, given.turns, given.rows):
            print(row, flush=True)
            rows.append(row)
    counts = "" if given.rows == list(ROWS) else f" --rows {' '.join(map(str, given.rows))}"
    results = "" if given.results == "cpu_linears" else f" --results {given.results}"
    command = f"python -m benchmarks.cpu.linears --turns {given.turns}{counts}{results}"
    save(given.results, command, {"turns": given.turns, "rows": rows})


if __name__ == "__main__":
    main()
