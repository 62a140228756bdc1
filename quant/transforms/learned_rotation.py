"""Learned rotations: chosen so that what linears read has small peaks, since peaks set the steps it is rounded in.

SpinQuant (Liu et al., 2024, arXiv:2405.16406) learns rotations by Cayley's transform on the loss of the whole model.
Here, as in DartQuant (2025), the inputs' own distribution is the objective, so that a sample of them is all that is
needed, however large the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# Of the norm that stands for a row's largest magnitude: every large number has a gradient, not the largest alone.
_POWER = 8
_BATCH = 2048
_MOMENTUM = 0.9
# Length of the first step in the group of rotations, for each channel; it falls linearly to 0.
_RATE = 0.02
# The share of the rows that judge, how often they do, and how many there are at most.
_JUDGING_SHARE, _JUDGED, _MOST_JUDGES = 5, 10, 2048


def learn_rotation(
    start: Tensor,
    rows: Tensor,
    steps: int,
    seed: int,
    *,
    keep_ones: bool = False,
    track: Callable[[range], Iterable[int]] = iter,
) -> Tensor:
    """An orthogonal matrix that makes the peaks of rotated rows small: the mean of ``|x R|_8 ^ 2``.

    A fifth of the rows is kept apart; at the start, at the end and ten times between they judge, and the matrix they
    found best is returned. So the result is never worse on them than the start.

    Args:
        start: where to begin, ``[size, size]`` and orthogonal.
        rows: inputs ``[n, parts * size]``, each weighed by what its peak costs; every part is rotated by the same matrix.
        steps: of descent, each on 2,048 rows.
        seed: of the order in which rows are drawn.
        keep_ones: stay among the rotations that leave the direction in which all channels are equal; ``start`` must be one.
        track: wraps the steps' numbers, to show how far it is.

    Returns:
        float64, orthogonal up to float64's rounding.
    """
    size = len(start)
    rows = rows[rows.abs().amax(-1) > 0]  # a row of zeros, such as a padding token's, has no peak, and no gradient
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows), generator=generator)
    apart = min(len(rows) // _JUDGING_SHARE, _MOST_JUDGES)
    if apart == 0 or steps == 0:
        return start.double()
    judges, pupils = rows[order[:apart]], order[apart:]
    found = start.float()
    best, least = start.double(), _peaks(judges, found).item()
    identity, momentum = torch.eye(size), torch.zeros(size, size)
    often = max(1, steps // _JUDGED)
    for step in track(range(steps)):
        batch = rows[pupils[torch.randint(len(pupils), (min(_BATCH, len(pupils)),), generator=generator)]]
        with torch.enable_grad():
            variable = found.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(_peaks(batch, variable), variable)
        momentum = _MOMENTUM * momentum + _skew(found.T @ gradient, keep_ones=keep_ones)
        length = momentum.norm()
        if not length.isfinite() or length == 0:
            break  # nothing to follow
        # Cayley's transform of a skew matrix is orthogonal.
        half = momentum * (_RATE * (1 - step / steps) * size**0.5 / 2 / length)
        found = found @ torch.linalg.solve(identity + half, identity - half)
        if (step + 1) % often == 0 or step + 1 == steps:
            exact = _orthogonal(found, keep_ones=keep_ones)
            found = exact.float()
            judged = _peaks(judges, found).item()
            if judged < least:
                best, least = exact, judged
    return best


def _peaks(rows: Tensor, rotation: Tensor) -> Tensor:
    rotated = (rows.unflatten(-1, (-1, len(rotation))) @ rotation).flatten(-2)
    largest = rotated.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    return ((rotated / largest).pow(_POWER).sum(-1).pow(2 / _POWER) * largest.squeeze(-1).square()).mean()


def _skew(gradient: Tensor, *, keep_ones: bool) -> Tensor:
    """The part of a gradient along which a matrix stays orthogonal, and keeps the direction of ones if it must."""
    skew = (gradient - gradient.T) / 2
    return _without_ones(skew) if keep_ones else skew


def _without_ones(matrix: Tensor) -> Tensor:
    matrix = matrix - matrix.mean(0, keepdim=True)
    return matrix - matrix.mean(1, keepdim=True)


def _orthogonal(matrix: Tensor, *, keep_ones: bool) -> Tensor:
    """The orthogonal matrix next to one that is nearly so, in float64 (Newton and Schulz's iteration)."""
    exact = matrix.double()
    if keep_ones:
        exact = _without_ones(exact) + 1 / len(exact)
    identity = torch.eye(len(exact), dtype=torch.float64)
    for _ in range(4):  # the error is squared each time, and begins at float32's rounding
        exact = exact @ (3 * identity - exact.T @ exact) / 2
    return exact
