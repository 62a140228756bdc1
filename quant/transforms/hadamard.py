"""Hadamard matrices of any order that Sylvester's and Paley's constructions reach."""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor


def hadamard(order: int) -> Tensor | None:
    """A matrix of ones and minus ones with orthogonal rows, float64; None if no construction here gives that order.

    Orders 1 and 2, those of Paley (a prime power and 1, or twice that), and products of known ones.
    """
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order == 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    if order % 4:
        return None
    found = _paley(order)
    if found is not None:
        return found
    for factor in range(2, int(order**0.5) + 1):
        if order % factor == 0:
            left, right = hadamard(factor), hadamard(order // factor)
            if left is not None and right is not None:
                return torch.kron(left, right)
    return None


def _paley(order: int) -> Tensor | None:
    if (order - 1) % 4 == 3 and (field := _field(order - 1)) is not None:
        # The first kind: I + S with S skew.
        matrix = torch.ones(order, order, dtype=torch.float64)
        matrix[1:, 1:] = _jacobsthal(*field) + torch.eye(order - 1, dtype=torch.float64)
        matrix[1:, 0] = -1
        return matrix if _is_hadamard(matrix) else None
    half = order // 2
    if (half - 1) % 4 == 1 and (field := _field(half - 1)) is not None:
        # The second kind: a symmetric conference matrix, each entry of which becomes a 2 x 2 block.
        conference = torch.ones(half, half, dtype=torch.float64)
        conference[1:, 1:] = _jacobsthal(*field)
        conference[0, 0] = 0
        sign = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        zero = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        matrix = torch.kron(conference, sign) + torch.kron(torch.eye(half, dtype=torch.float64), zero)
        return matrix if _is_hadamard(matrix) else None
    return None


def _is_hadamard(matrix: Tensor) -> bool:
    return torch.equal(matrix @ matrix.T, len(matrix) * torch.eye(len(matrix), dtype=matrix.dtype))


def _jacobsthal(prime: int, degree: int) -> Tensor:
    """Whether the difference of two elements of a finite field is a square (1), no square (-1) or zero (0)."""
    elements = list(product(range(prime), repeat=degree))
    modulus = _irreducible(prime, degree)
    squares = {_times(a, a, modulus, prime) for a in elements if any(a)}
    quadratic = torch.tensor([0.0 if not any(a) else 1.0 if a in squares else -1.0 for a in elements])
    digits = torch.tensor(elements)
    differences = (digits[:, None] - digits[None]) % prime
    places = prime ** torch.arange(degree - 1, -1, -1)
    return quadratic[(differences * places).sum(-1)].double()


def _field(size: int) -> tuple[int, int] | None:
    """``size`` as a power of an odd prime: the prime and the exponent; None if it is none."""
    prime = next((p for p in range(3, size + 1, 2) if size % p == 0), 0)
    degree, power = 0, 1
    while prime and power < size:
        power, degree = power * prime, degree + 1
    return (prime, degree) if prime and power == size else None


@cache
def _irreducible(prime: int, degree: int) -> tuple[int, ...]:
    """The lower coefficients of a monic polynomial that has no factors over the integers modulo ``prime``."""
    for lower in product(range(prime), repeat=degree):
        if degree == 1 or not any(
            _divides(divisor, (*lower, 1), prime)
            for size in range(1, degree // 2 + 1)
            for divisor in product(range(prime), repeat=size)
        ):
            return lower
    raise AssertionError("there is an irreducible polynomial of every degree")


def _divides(lower: tuple[int, ...], polynomial: tuple[int, ...], prime: int) -> bool:
    rest = list(polynomial)
    while len(rest) > len(lower):
        leading = rest.pop()
        for i, coefficient in enumerate(lower):
            rest[len(rest) - len(lower) + i] = (rest[len(rest) - len(lower) + i] - leading * coefficient) % prime
    return not any(rest)


def _times(a: tuple[int, ...], b: tuple[int, ...], modulus: tuple[int, ...], prime: int) -> tuple[int, ...]:
    raw = [0] * (2 * len(a) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            raw[i + j] += x * y
    while len(raw) > len(a):
        leading = raw.pop()
        for i, coefficient in enumerate(modulus):
            raw[len(raw) - len(modulus) + i] -= leading * coefficient
    return tuple(value % prime for value in raw)
