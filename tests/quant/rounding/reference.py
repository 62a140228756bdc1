"""Float64 transcriptions of published algorithms, written from the papers and kept apart from the code they check."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gptq_by_elimination(
    weight: Tensor,
    hessian: Tensor,
    scale: Tensor | Callable[[Tensor], Tensor],
    group: int,
    bits: int,
    damping: float,
    order: Tensor,
) -> Tensor:
    """GPTQ as optimal brain quantization in a fixed order (Frantar et al. 2022, 2023; equations 2 and 3).

    After each column is rounded, the others move by -err / [H^-1]_qq * [H^-1]_{q,:} and the column is
    eliminated from the inverse Hessian by one step of Gaussian elimination. No Cholesky factor, no
    blocks: the textbook form that the fast one must equal.

    Where ``scale`` is a function, it is asked for a group's scales when the first of its columns is reached,
    with the group's weights as they then are.
    """
    scales: dict[int, Tensor] = {}
    w = weight.double().clone()
    h = hessian.double().clone()
    dead = h.diagonal() == 0
    h[dead, dead] = 1
    h += torch.eye(len(h), dtype=torch.float64) * damping * h.diagonal().mean()
    inverse = torch.linalg.inv(h)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for q in order.tolist():
        if callable(scale) and q // group not in scales:
            scales[q // group] = scale(w[:, q // group * group : (q // group + 1) * group])
        s = (scales[q // group] if callable(scale) else scale[:, q // group]).double()
        rounded = (w[:, q] / s).round().clamp(low, high) * s
        error = (w[:, q] - rounded) / inverse[q, q]
        w -= error[:, None] * inverse[q][None, :] * _remaining(order, q)
        w[:, q] = rounded
        inverse = inverse - torch.outer(inverse[:, q], inverse[q]) / inverse[q, q]
        inverse[q, q] = 1.0  # eliminated; never read again
    return w


def gptaq(
    weight: Tensor, plain: Tensor, inputs: Tensor, scale: Tensor, group: int, bits: int, damping: float
) -> Tensor:
    """GPTAQ's algorithm 1 (Li et al. 2025) in the stored order of columns; ``plain`` are the unrounded model's inputs.

    Every column's rounding error, and what the difference of its inputs does, move the columns that are still to come.
    """
    w, x, f = weight.double().clone(), inputs.double().T, plain.double().T
    hessian = x @ x.T / x.shape[1]
    hessian += torch.eye(len(hessian), dtype=torch.float64) * damping * hessian.diagonal().mean()
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    asymmetry = ((f - x) @ x.T / x.shape[1] @ upper.T).triu(1) @ upper
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    rounded = torch.empty_like(w)
    for q in range(w.shape[1]):
        s = scale[:, q // group].double()
        rounded[:, q] = (w[:, q] / s).round().clamp(low, high) * s
        column = w[:, q].clone()
        error = (column - rounded[:, q]) / upper[q, q]
        w[:, q + 1 :] += torch.outer(column, asymmetry[q, q + 1 :]) - torch.outer(error, upper[q, q + 1 :])
    return rounded


def _remaining(order: Tensor, column: int) -> Tensor:
    place = int((order == column).nonzero())
    mask = torch.zeros(len(order), dtype=torch.float64)
    mask[order[place + 1 :]] = 1
    return mask


def hqq_zero_point(
    weight: Tensor, scale: Tensor, zero: Tensor, bits: int, p: float, beta: float, kappa: float, steps: int
) -> Tensor:
    """HQQ's half-quadratic solver for the zero-point (Badri & Shaji 2023), on groups ``[groups, size]``.

    Codes here are signed; the paper's are unsigned, which shifts the zero-point by a constant.
    """
    w, s, z = weight.double(), scale.double(), zero.double()
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    best, best_error = z, float("inf")
    for _ in range(steps):
        codes = (w / s + z).round().clamp(low, high)
        difference = w - s * (codes - z)
        error = difference.abs().mean().item()
        if error >= best_error:
            break
        best, best_error = z, error
        magnitude = difference.abs()
        kept = (magnitude - magnitude.pow(p - 1) / beta).clamp_min(0)
        e = torch.where(magnitude > 0, difference.sign() * kept, torch.zeros_like(difference))
        z = (codes - (w - e) / s).mean(dim=1, keepdim=True)
        beta *= kappa
    return best


class SignRoundReference:
    """SignRound's equations (Cheng et al. 2023, equations 2 to 4) in float64, left to autograd.

    Integers only. Symmetric scales are compressed-tensors' (the larger extreme over half the range) and
    keep one factor; asymmetric ones are the paper's, with one factor for each end.
    """

    def __init__(self, weight: Tensor, bits: int, group: int, *, symmetric: bool) -> None:
        self.low_code, self.high_code, self.symmetric = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, symmetric
        self.weight = weight.double().view(weight.shape[0], -1, group)
        self.low = self.weight.amin(-1, keepdim=True).clamp(max=0)
        self.high = self.weight.amax(-1, keepdim=True).clamp(min=0)
        self.offset = torch.zeros_like(self.weight, requires_grad=True)
        count = 1 if symmetric else 2
        self.factors = [torch.ones_like(self.low, requires_grad=True) for _ in range(count)]

    def quantized(self) -> Tensor:
        steps = self.high_code - self.low_code
        if self.symmetric:
            scale = torch.maximum(-self.low, self.high) * self.factors[0] / (steps / 2)
            zero = torch.zeros_like(scale)
        else:
            scale = (self.high * self.factors[0] - self.low * self.factors[1]) / steps
            zero = _straight_through(self.low_code - self.low * self.factors[1] / scale)
        codes = _straight_through(self.weight / scale + zero + self.offset).clamp(self.low_code, self.high_code)
        return ((codes - zero) * scale).flatten(1)

    def descend(self, loss: Tensor, rate: float) -> None:
        variables = [self.offset, *self.factors]
        for variable, slope in zip(variables, torch.autograd.grad(loss, variables), strict=True):
            variable.data -= rate * slope.sign()
        for factor in self.factors:
            factor.data.clamp_(0, 1)


def _straight_through(values: Tensor) -> Tensor:
    return values + (values.round() - values).detach()
