"""Orthogonal matrices that spread outliers over all channels, in a form that is quick to apply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .hadamard import hadamard

# A power of two is split into factors of this size: two products with 64 x 64 cost a 32nd of one with 4096 x 4096.
_FACTOR = 64


@dataclass(frozen=True)
class Rotation:
    """``diag(signs) (factor_1 x factor_2 x …)``, with x for Kronecker's product; every factor is orthogonal.

    Attributes:
        signs: float64 ``[size]`` of 1 and -1.
        factors: small orthogonal matrices, float64, whose sizes multiply to the rotation's.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]

    @classmethod
    def random(cls, size: int, generator: torch.Generator, *, keep_ones: bool = False) -> Rotation:
        """A random rotation: a Hadamard matrix with random signs where there is one of this size.

        Args:
            size: channels; any number.
            generator: where the signs come from.
            keep_ones: leave the direction in which all channels are equal as it is: a LayerNorm's subtraction of
                the mean commutes with no other rotation.
        """
        if keep_ones:
            return cls(torch.ones(size, dtype=torch.float64), (_around_ones(size, generator),))
        signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
        power = size & -size
        factors = []
        for left in range(power.bit_length()):  # give the odd part as many twos as it needs
            whole = hadamard(size // power * 2**left)
            if whole is not None:
                factors = [whole / len(whole) ** 0.5, *_sylvester(power // 2**left)]
                break
        else:
            factors = [_orthogonal(size // power, generator), *_sylvester(power)]
        return cls(signs, tuple(factor for factor in factors if len(factor) > 1) or (torch.eye(1).double(),))

    @classmethod
    def dense(cls, matrix: Tensor) -> Rotation:
        """A rotation given by its matrix, such as one that was learned."""
        return cls(torch.ones(len(matrix), dtype=torch.float64), (matrix.double(),))

    @property
    def size(self) -> int:
        return len(self.signs)

    def apply(self, rows: Tensor) -> Tensor:
        """``rows @ R`` along the last dimension, in float64."""
        out = rows.double() * self.signs
        shape = out.shape
        before, after = 1, self.size
        for factor in self.factors:
            after //= len(factor)
            # [before, factor, after] with the factor's own dimension in the middle
            out = torch.einsum("nbfa,fg->nbga", out.reshape(-1, before, len(factor), after), factor)
            before *= len(factor)
        return out.reshape(shape)

    def apply_to_parts(self, rows: Tensor) -> Tensor:
        """The same to every stretch of ``size`` columns, head by head."""
        return self.apply(rows.unflatten(-1, (-1, self.size))).flatten(-2)

    def matrix(self) -> Tensor:
        """R itself."""
        return self.apply(torch.eye(self.size, dtype=torch.float64))


def _sylvester(size: int) -> list[Tensor]:
    factors = []
    while size > 1:
        part = min(size, _FACTOR)
        matrix = hadamard(part)
        assert matrix is not None
        factors.append(matrix / part**0.5)
        size //= part
    return factors


def _orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """Uniformly random (Stewart, 1980)."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def _around_ones(size: int, generator: torch.Generator) -> Tensor:
    mirror = torch.ones(size, dtype=torch.float64) / size**0.5
    mirror[0] -= 1  # reflecting along it swaps the first axis and the direction of ones
    reflect = torch.eye(size, dtype=torch.float64)
    if size > 1:
        reflect -= 2 * torch.outer(mirror, mirror) / mirror.square().sum()
    inner = torch.eye(size, dtype=torch.float64)
    inner[1:, 1:] = _orthogonal(size - 1, generator)
    return reflect @ inner @ reflect
