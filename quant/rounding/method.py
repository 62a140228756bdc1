"""The description of a rounding method, for the table of methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .options.base import RoundingOptions

if TYPE_CHECKING:
    from ..stored.quantized_weight import QuantizedWeight


@dataclass(frozen=True)
class Method:
    """A rounding method.

    Attributes:
        function: ``(weight, args, stats, options, grid) -> QuantizedWeight``; for methods by block, the function for
            lm_head, which is in no block.
        options: the pydantic model of its options.
        needs_hessian: whether it needs ``stats.hessian``.
        block: rounds a block's linears together: ``(layers, run, inputs, targets, windows, options)``, as
            :func:`.signround.signround`; returns weights by name. None for methods that round one linear at a time.
        by_row: whether without inputs a row's codes depend only on the row and on a scale that the format shares.
    """

    function: Callable[..., QuantizedWeight]
    options: type[RoundingOptions] = RoundingOptions
    needs_hessian: bool = False
    block: Callable[..., dict[str, QuantizedWeight]] | None = None
    by_row: bool = False

    @property
    def by_block(self) -> bool:
        """Whether it rounds a block's linears together."""
        return self.block is not None
