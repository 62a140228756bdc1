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
        by_block: whether it rounds a block's linears together, as :func:`signround` does.
        by_row: whether without inputs a row's codes depend only on the row and on a scale that the format shares.
    """

    function: Callable[..., QuantizedWeight]
    options: type[RoundingOptions] = RoundingOptions
    needs_hessian: bool = False
    by_block: bool = False
    by_row: bool = False
