"""Parts of a model of which each rank has a share (Megatron-LM's tensor parallelism)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..parallel.ranks import Ranks
from .linears.linear import Linear
from .linears.token_table import TokenTable
from .operators import FeedForward


class SummedLinear:
    """A linear whose inputs are divided ("row parallel"): each rank's outputs are a part of the sum.

    Args:
        part: this rank's inputs.
        ranks: that have the others.
    """

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks
        self.nbytes, self.numel, self.columns, self.waits = part.nbytes, part.numel, part.columns, part.waits

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.all_reduce(self._part(x))

    def explain(self) -> str:
        return f"{self._part.explain()}, summed over {self._ranks.count} ranks"


class JoinedLinear:
    """A linear whose outputs are divided, and are put together.

    Args:
        part: this rank's outputs.
        ranks: that have the others.
        widths: outputs by rank.
        inputs: if inputs come divided, too, their widths by rank; None if each rank has all of them.
    """

    def __init__(self, part: Linear, ranks: Ranks, widths: Sequence[int], inputs: Sequence[int] | None = None) -> None:
        self._part, self._ranks, self._widths, self._inputs = part, ranks, widths, inputs
        self.nbytes, self.numel, self.waits = part.nbytes, part.numel, part.waits
        self.columns = part.columns if inputs is None else inputs[ranks.rank]

    def __call__(self, x: Tensor) -> Tensor:
        if self._inputs is not None:
            x = self._ranks.all_gather(x, self._inputs)
        return self._ranks.all_gather(self._part(x), self._widths)

    def explain(self) -> str:
        return f"{self._part.explain()}, joined from {self._ranks.count} ranks"


class SummedFeedForward:
    """A mixture of experts each of which is divided.

    Args:
        part: this rank's parts of all experts.
        ranks: that have the others.
    """

    def __init__(self, part: FeedForward, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._ranks.all_reduce(self._part(hidden))

    def linears(self) -> dict[str, Linear]:
        """This rank's parts, by role."""
        return self._part.linears()


class DividedTable:
    """An input embedding of which each rank has some tokens.

    Args:
        part: this rank's rows.
        tokens: that they are for.
        ranks: that have the others.
    """

    def __init__(self, part: TokenTable, tokens: range, ranks: Ranks) -> None:
        self._part, self._tokens, self._ranks = part, tokens, ranks
        self.matrix, self.nbytes, self.columns = part.matrix, part.nbytes, part.columns

    def __call__(self, tokens: Tensor) -> Tensor:
        """The rows of some tokens."""
        elsewhere = (tokens < self._tokens.start) | (tokens >= self._tokens.stop)
        rows = self._part((tokens - self._tokens.start).masked_fill(elsewhere, 0))
        return self._ranks.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))
