"""PTX routines, executed instruction by instruction as the PTX manual defines them, on tensors of 32-bit words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def execute(text: str, outputs: int, inputs: Sequence[Tensor], half: torch.dtype = torch.float16) -> list[Tensor]:
    """Run a routine for every word of its inputs at once.

    Args:
        text: the routine, with ``$0`` and so on for its operands, outputs first.
        outputs: how many it has.
        inputs: the words, as int64.
        half: what its 16-bit instructions compute in.

    Returns:
        The output registers, as int64.
    """
    registers = {f"${outputs + i}": words for i, words in enumerate(inputs)}
    suffix = f"{'bf16' if half == torch.bfloat16 else 'f16'}x2"
    for line in text.splitlines():
        found = re.fullmatch(r"([\w.]+) ([^;]+);", line.strip())
        if found is None or found[1].startswith(".reg"):
            continue
        operation, (to, *operands) = found[1], [part.strip() for part in found[2].split(",")]
        given = [registers[each] if each in registers else torch.tensor(int(each, 0)) for each in operands]
        if operation == "mov.b32":
            registers[to] = given[0]
        elif operation == "xor.b32":
            registers[to] = given[0] ^ given[1]
        elif operation == "shr.b32":
            registers[to] = given[0] >> given[1]
        elif operation == "shl.b32":
            registers[to] = (given[0] << given[1]) & 0xFFFFFFFF
        elif operation == "lop3.b32":
            registers[to] = _lop3(given)
        elif operation == "prmt.b32":
            registers[to] = _prmt(given)
        elif operation == f"sub.{suffix}":
            registers[to] = _lanes(given, half, lambda a, b: a - b)
        elif operation == f"fma.rn.{suffix}":
            # The product of two halves is exact in float64; callers choose terms whose sum is, too.
            registers[to] = _lanes(given, half, lambda a, b, c: a * b + c)
        else:
            raise AssertionError(f"unknown instruction {line}")
    return [registers[f"${i}"] for i in range(outputs)]


def halves(words: Tensor, half: torch.dtype = torch.float16) -> list[Tensor]:
    """The lower and the upper half of each word, as the numbers they stand for."""
    lanes = (words & 0xFFFF, words >> 16 & 0xFFFF)
    return [torch.where(lane >= 1 << 15, lane - (1 << 16), lane).to(torch.int16).view(half).double() for lane in lanes]


def _lanes(given: list[Tensor], half: torch.dtype, compute: Callable[..., Tensor]) -> Tensor:
    low, high = (
        compute(*(halves(word, half)[lane] for word in given)).to(half).view(torch.int16).long() & 0xFFFF
        for lane in range(2)
    )
    return low | high << 16


def _lop3(given: list[Tensor]) -> Tensor:
    a, b, c, table = given
    found = torch.zeros_like(a)
    for index in range(8):
        if int(table) >> index & 1:
            picked = [part if index >> place & 1 else ~part for part, place in ((a, 2), (b, 1), (c, 0))]
            found = found | (picked[0] & picked[1] & picked[2])
    return found & 0xFFFFFFFF


def _prmt(given: list[Tensor]) -> Tensor:
    sources = [part >> 8 * i & 0xFF for part in given[:2] for i in range(4)]
    selector = int(given[2])
    return sum((sources[selector >> 4 * i & 7] << 8 * i for i in range(4)), torch.zeros_like(given[0]))
