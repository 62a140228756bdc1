"""Coordinate descent on a rounded weight: each code and scale in turn takes the value with the least error of the layer.

GPTQ chooses a code once, before it knows what becomes of those after it. Choosing all of them again lowers the error
further: codes as in QuantEase (Behdin et al., 2023, arXiv:2309.01885), scales in closed form (Kim et al., 2026,
arXiv:2602.02126).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..grid import Grid, round_codes, round_to
from .columns import Final, damp, settle_block

# Rows do not depend on each other: so many elements are descended together.
_ELEMENTS = 1 << 24
# Columns between two updates of a group's gradient.
_BLOCK = 256


def descend(
    values: Tensor,
    errors: Tensor,
    grid: Grid,
    hessian: Tensor,
    damping: float,
    sweeps: int,
    stays: Tensor | None = None,
) -> Grid:
    """Lower ``tr(E H E^T)`` of a rounded weight, where ``E`` is the wanted weight less ``values``; no step raises it.

    Scales of blocks of rows, of whole tensors, and those that are powers of two stay as they are.

    Args:
        values: ``[rows, columns]``, on the grid; replaced by better ones.
        errors: ``E``, of the same shape.
        grid: that of ``values``.
        hessian: ``H``, ``[columns, columns]``.
        damping: the share of the mean diagonal that is added to it.
        sweeps: how often each code and each scale is visited.
        stays: ``[rows, columns]``, which values may differ from 0; None for all.

    Returns:
        The grid of the new values.
    """
    feedback, diagonal = normalized(hessian, damping)
    fits = grid.args.strategy in ("group", "channel", "tensor_group") and grid.args.scale_dtype != torch.uint8
    scale = grid.scale.clone()
    height = max(1, _ELEMENTS // values.shape[1])
    for start in range(0, values.shape[0], height):
        part = slice(start, start + height)
        kept = None if stays is None else stays[part].T.contiguous()
        rows = _Rows(values[part], errors[part], grid, part, feedback, diagonal, kept)
        for _ in range(sweeps):
            if not rows.sweep(fits=fits):
                break
        values[part] = rows.values.T
        if fits:
            scale[part] = rows.scales.T.to(scale.dtype)
    return Grid.of_scale(grid.args, scale, grid.zero, values.shape, grid.width, grid.global_scale) if fits else grid


def normalized(hessian: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """A damped Hessian whose rows are divided by its diagonal, and the diagonal."""
    feedback = hessian.clone()
    damp(feedback.diagonal(), damping)
    diagonal = feedback.diagonal().clone()
    return feedback.div_(diagonal[:, None]), diagonal


def descend_codes(values: Tensor, errors: Tensor, feedback: Tensor, final: Final, sweeps: int) -> None:
    """The same for codes alone, whatever they may be.

    Args:
        values: ``[columns, rows]``; replaced by better ones.
        errors: the wanted weight less ``values``.
        feedback: as :func:`normalized` gives it.
        final: what a column becomes.
        sweeps: how often each code is visited.
    """
    pull = feedback @ errors
    for _ in range(sweeps):
        before = values.clone()
        _choose_again(values, pull, feedback, final)
        if torch.equal(values, before):
            break


def _choose_again(values: Tensor, pull: Tensor, feedback: Tensor, final: Final) -> None:
    """Choose columns' codes one after another, from the last to the first.

    Args:
        values, feedback, final: as above, of some columns.
        pull: by how much each value should change if no other did; kept up with what changes.
    """
    moved = values.clone()
    for stop in range(len(values), 0, -_BLOCK):
        block = slice(max(0, stop - _BLOCK), stop)
        values[block] = settle_block(moved, values[block] + pull[block], feedback, final, block)
        pull.addmm_(feedback[:, block], moved[block])


class _Rows:
    """Some rows of a weight, transposed so that a column is contiguous."""

    def __init__(
        self,
        values: Tensor,
        errors: Tensor,
        grid: Grid,
        part: slice,
        feedback: Tensor,
        diagonal: Tensor,
        stays: Tensor | None,
    ) -> None:
        self.values = values.T.contiguous()
        self._grid, self._feedback, self._diagonal, self._stays = grid, feedback, diagonal[:, None], stays
        by_row = len(grid.step) > 1
        self._steps = (grid.step[part] if by_row else grid.step).T.contiguous()
        self.scales = (grid.scale[part] if by_row else grid.scale).float().T.contiguous()
        zeros = grid.zero if grid.zero is None or not by_row else grid.zero[part]
        self._zeros = None if zeros is None else zeros.T.contiguous()
        # By how much each value should change if no other did.
        self._pull = feedback @ errors.T

    def sweep(self, *, fits: bool) -> bool:
        """Visit every scale, if they are fitted, and every code; whether anything changed."""
        columns, width = len(self.values), self._grid.width
        changed = False
        for start in range(0, columns, width):
            part = slice(start, min(columns, start + width))
            before = self.values[part].clone()
            pull = self._pull[part]
            if fits:
                self._fit(part, pull)
            self._choose(part, pull)
            before -= self.values[part]
            changed = changed or bool(before.any())
            for others in (slice(0, part.start), slice(part.stop, columns)):
                self._pull[others].addmm_(self._feedback[others, part], before)
        return changed

    def _fit(self, part: slice, pull: Tensor) -> None:
        """Give a group the scale that is best for its codes."""
        group = part.start // self._grid.width
        step, zero = self._of(group)
        codes, args = self.values[part] / step, self._grid.args
        # Without the division's error.
        codes = round_codes(codes, args) if zero is None else round_codes(codes + zero, args) - zero
        against = self._feedback[part, part] @ codes
        weighted = codes * self._diagonal[part]
        gain, cost = (weighted * pull).sum(0), (weighted * against).sum(0)
        scale, shared = self._as_stored(step + gain / cost), self._grid.global_scale
        fitted = scale if shared is None else scale / shared
        move = fitted - step
        better = (scale != 0) & (move * (move * cost - 2 * gain) < 0)  # false if there are no codes but 0
        fitted = torch.where(better, fitted, step)
        pull.sub_(against.mul_(fitted - step))
        self.values[part] = codes * fitted
        self._steps[group] = fitted
        self.scales[group] = torch.where(better, scale, self.scales[group])

    def _of(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Step and zero of a group."""
        return self._steps[group], None if self._zeros is None else self._zeros[group]

    def _as_stored(self, step: Tensor) -> Tensor:
        """The nearest scale to the one of a step that can be stored."""
        grid = self._grid
        scale = step if grid.global_scale is None else step * grid.global_scale
        return scale.to(grid.args.scale_dtype or grid.scale.dtype).float()

    def _choose(self, part: slice, pull: Tensor) -> None:
        """Choose a group's codes one after another."""
        stays = None if self._stays is None else self._stays[part]
        group = part.start // self._grid.width
        step, zero = self._of(group)

        def final(column: int, wanted: Tensor) -> Tensor:
            rounded = round_to(wanted, step, zero, self._grid.args)
            return rounded if stays is None else rounded * stays[column]

        _choose_again(self.values[part], pull, self._feedback[part, part], final)
