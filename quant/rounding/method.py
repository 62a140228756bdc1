"""What a rounding method is, for the table that names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from ..quantized_weight import QuantizedWeight


class RoundingOptions(BaseModel):
    """Base of every method's options: strict, and refusing what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def reads_unrounded(self) -> bool:
        """Whether the method also asks what its layer reads in the unrounded model (``stats.shift``)."""
        return False

    @property
    def groups_wanted(self) -> bool:
        """Whether the options make sense only for formats whose scales are those of groups."""
        return False

    @property
    def columns_together(self) -> int:
        """Input columns are treated in groups of so many neighbours, which must divide their number."""
        return 1


@dataclass(frozen=True)
class Method:
    """A rounding method.

    Attributes:
        function: ``(weight, args, stats, options, grid) -> QuantizedWeight``; for methods by block, what the output
            head is rounded with, which belongs to none.
        options: the pydantic model of its options.
        needs_hessian: whether ``stats.hessian`` must be gathered for it.
        by_block: whether it rounds a block's linears together, as :func:`signround` does.
    """

    function: Callable[..., QuantizedWeight]
    options: type[RoundingOptions]
    needs_hessian: bool
    by_block: bool = False
