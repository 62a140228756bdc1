"""Parts of a model of which each rank has a share (Megatron-LM's tensor parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...parallel.ranks import Ranks
from ..linears.linear import Linear
from ..linears.token_table import TokenTable
from ..parts.operators import FeedForward


class _Divided:
    """A linear of several ranks, as a GPU's layers see it: a residual is added to the outputs of all.

    Args:
        part: this rank's.
        ranks: that have the others.
    """

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part: Any = part
        self._ranks = ranks
        self.nbytes, self.numel, self.columns, self.waits = part.nbytes, part.numel, part.columns, part.waits

    def __call__(self, x: Any, residual: Tensor | None = None) -> Tensor:
        found = self._whole(x)
        return found if residual is None else residual.add_(found)

    def _whole(self, x: Any) -> Tensor:
        raise NotImplementedError

    def wants(self, rows: int) -> tuple[torch.dtype, bool] | None:
        """What a GPU's kernels want of this rank's inputs."""
        return self._part.wants(rows)

    def adds(self, rows: int) -> bool:
        """Not in the same launch."""
        return False


class SummedLinear(_Divided):
    """A linear whose inputs are divided ("row parallel"): each rank's outputs are a part of the sum."""

    def _whole(self, x: Any) -> Tensor:
        return self._ranks.all_reduce(self._part(x))

    def explain(self) -> str:
        return f"{self._part.explain()}, summed over {self._ranks.count} ranks"


class JoinedLinear(_Divided):
    """A linear whose outputs are divided, and are put together.

    Args:
        part: this rank's outputs.
        ranks: that have the others.
        widths: outputs by rank.
        inputs: if inputs come divided, too, their widths by rank; None if each rank has all of them.
    """

    def __init__(self, part: Linear, ranks: Ranks, widths: Sequence[int], inputs: Sequence[int] | None = None) -> None:
        super().__init__(part, ranks)
        self._widths, self._inputs = widths, inputs
        self.columns = part.columns if inputs is None else inputs[ranks.rank]

    def _whole(self, x: Any) -> Tensor:
        if self._inputs is not None:
            x = self._ranks.all_gather(x, self._inputs)
        return self._ranks.all_gather(self._part(x), self._widths)

    def wants(self, rows: int) -> tuple[torch.dtype, bool] | None:
        """None if inputs come divided: they are gathered before they are rounded."""
        return super().wants(rows) if self._inputs is None else None

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
