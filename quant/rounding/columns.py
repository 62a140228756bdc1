"""Settling a weight's columns one after another: later columns compensate for each column's change.

This is the elimination at the heart of GPTQ and SparseGPT (Frantar and others, arXiv:2210.17323 and 2301.00774). What
a column becomes, codes or zeros, is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_STRIP = 16

# From a column's index and its compensated values, ``[rows]``, to its final values.
Final = Callable[[int, Tensor], Tensor]
# Called with the next columns and their compensated values, ``[columns, rows]``.
Next = Callable[[slice, Tensor], None]


def column_factor(hessian: Tensor, backwards: Tensor, damping: float, most: float = 1.0) -> tuple[Tensor | None, float]:
    """The Cholesky factor of the damped Hessian with its columns reversed, and the damping used.

    The papers read how much of the earlier columns' errors each column compensates off the inverse
    Hessian's factor. The same values are in the unit triangular ``U`` of ``H = U D U^T``, which needs no
    inverse (Chee et al., 2023, arXiv:2307.13304, theorem 6): a quarter of the operations, and better
    conditioned. With the column that is settled first placed last, ``U`` is this factor with each row divided by its
    diagonal; ``D``, the squares of the diagonal, is the cost of an error in a column after compensation.

    Args:
        hessian: ``[columns, columns]``.
        backwards: the columns' indices, with the one that is settled first placed last.
        damping: the share of the mean diagonal that is added to it; it grows tenfold until the matrix is positive definite.
        most: the largest damping; beyond it there is no factor.
    """
    while damping <= most:
        # Transposed it is the same matrix in LAPACK's layout, so it is factored in place.
        permuted = hessian[backwards[:, None], backwards].T
        diagonal = permuted.diagonal()
        damp(diagonal, damping)
        failed = torch.empty((), dtype=torch.int32)
        torch.linalg.cholesky_ex(permuted, upper=True, out=(permuted, failed))
        if not failed and torch.isfinite(diagonal).all():
            return permuted, damping
        damping *= 10
    return None, damping / 10


def damp(diagonal: Tensor, damping: float) -> None:
    """Raise a Hessian's diagonal by a share of its mean.

    Columns that no input reaches become as any other, or they would damp those of small inputs.
    """
    dead = diagonal == 0
    usual = diagonal.sum() / max(1, len(diagonal) - int(dead.sum()))
    diagonal[dead] = usual if usual > 0 else 1.0
    diagonal += damping * diagonal.mean()


def settle_columns(
    columns: Tensor, feedback: Tensor, final: Final, block: int, coming: Next | None = None, together: int = 1
) -> Tensor:
    """Settle ``columns`` (one column of the weight per row) from the last to the first.

    Args:
        columns: the weight's; they are replaced by their errors.
        feedback: unit triangular: the weights with which each compensates for the errors of those after it.
        final: what a column becomes.
        block: columns between two updates of the whole weight; speed only, unless ``together`` is as many.
        coming: called before columns are settled, for ``together`` at a time.
        together: how many; a divisor of 16, or ``block``.
    """
    settled = torch.empty_like(columns)
    for stop in range(columns.shape[0], 0, -block):
        part = slice(max(0, stop - block), stop)
        wanted = torch.addmm(columns[part], feedback[part, stop:], columns[stop:])
        settled[part] = settle_block(columns, wanted, feedback, final, part, coming, together)
    return settled


def settle_block(
    columns: Tensor,
    wanted: Tensor,
    feedback: Tensor,
    final: Final,
    part: slice,
    coming: Next | None = None,
    together: int = 1,
) -> Tensor:
    """Settle some columns from the last to the first; see :func:`settle_columns`.

    Args:
        columns, feedback: of the whole weight.
        wanted: these columns, moved by the errors of all settled before them; overwritten.
        part: which.
    """
    columns, feedback, start = columns[part], feedback[part, part], part.start
    settled = torch.empty_like(columns)
    if coming is not None and together > _STRIP:
        coming(part, by_now(columns, wanted - columns, feedback))
        coming = None
    # Three levels: all errors so far correct a block, a strip the rest of its block, a column the rest
    # of its strip. Each level's data fits in a cache level.
    for last in range(len(columns), 0, -_STRIP):
        first = max(0, last - _STRIP)
        for i in reversed(range(first, last)):
            if coming is not None and (last - 1 - i) % together == 0:
                group = slice(max(first, i + 1 - together), i + 1)
                moved = by_now(columns[group], wanted[group] - columns[group], feedback[group, group])
                coming(slice(start + group.start, start + group.stop), moved)
            settled[i] = final(start + i, wanted[i])
            error = columns[i].sub_(settled[i])
            if i > first:
                wanted[first:i].addr_(feedback[first:i, i], error)
        if first > 0:
            wanted[:first].addmm_(feedback[:first, first:last], columns[first:last])
    return settled


def by_now(columns: Tensor, passed_on: Tensor, feedback: Tensor) -> Tensor:
    """The compensated values of columns if none of them were changed any further.

    A column also passes on what it compensates, as long as it is real-valued: so ``passed_on``, from the settled
    columns, is not yet all.

    Args:
        columns: the weight's.
        passed_on: by all that are settled.
        feedback: among these columns.
    """
    return columns + torch.linalg.solve_triangular(feedback, passed_on, upper=True, unitriangular=True)
