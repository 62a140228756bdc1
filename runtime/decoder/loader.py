"""Builds a decoder's parts from a checkpoint: all of them, or a rank's share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ...system.errors import RuntimeProblem
from ...system.hardware.pages import in_large_pages
from ..heads import Heads
from ..parallel.ranks import Ranks
from ..weights.checkpoint import Checkpoint
from ..weights.cut_tensors import aligned
from ..weights.layout import Cut, Layout, Ranges
from ..weights.live_weights import LiveWeights
from ..weights.matrix import Matrix, see_the_same, stacked
from .architectures import DecoderSpec
from .linears.linear import Linear, SideBySide
from .linears.token_table import TokenTable
from .parallel.context_parallel import ContextAttention
from .parallel.sharded import DividedTable, JoinedLinear, SummedLinear
from .parts.operators import Attention, Operators, Rowwise

# Outputs that kernels multiply together, at most.
_KERNELS_UNIT = 64


class DecoderLoader:
    """Builds a decoder's parts from a checkpoint.

    Args:
        checkpoint: the weights.
        spec: the architecture.
        operators: its implementation.
        ranks: that have a share of each part.
        context: the ring of ranks that divide sequences; None for none.
        divides_experts: whether each has whole experts, instead of a share of all.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | LiveWeights,
        spec: DecoderSpec,
        operators: Operators,
        ranks: Ranks,
        *,
        context: Ranks | None = None,
        divides_experts: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self.spec = spec
        self.operators = operators
        self.dtype = operators.dtype
        self.ranks = ranks
        self._context = context or Ranks()
        self.divides_experts = divides_experts and ranks.count > 1

    def undivided(self) -> DecoderLoader:
        """The same for parts that this rank has alone."""
        return DecoderLoader(self.checkpoint, self.spec, self.operators, Ranks())

    def attention(self, heads: Heads) -> Attention:
        """The attention of a layer."""
        if self._context.count > 1:
            return ContextAttention(heads, self._context)
        return self.operators.attention(heads)

    def tensor(self, name: str, shape: tuple[int | None, ...] | None) -> Tensor:
        """A dense tensor, in the compute dtype."""
        found = self.checkpoint.tensor(name)
        if shape is not None:
            self.check(name, found.shape, shape)
        return found.to(self.operators.device, self.dtype)

    def table(self, name: str, rows: int) -> TokenTable | DividedTable:
        """The input embedding."""
        tokens = self._vocabulary(name, "Embedding")
        found = self.matrix(name, None if tokens is None else [tokens], kind="Embedding")
        self.check(f"{name}.weight", found.shape, (rows if tokens is None else len(tokens), None))
        shared = found.scale is None and (self.spec.tied or not self.checkpoint.has_matrix(self.spec.names.head))
        if shared and self.operators.device.type == "cpu":
            # So that lm_head need not copy it.
            found = Matrix.plain(in_large_pages(found.values.to(self.dtype)))
        table = TokenTable(found, self.dtype, self.operators.device)
        return table if tokens is None else DividedTable(table, tokens, self.ranks)

    def head(self, name: str, tied: Matrix | None) -> Linear:
        """The lm_head.

        Args:
            name: its own, or the embedding's.
            tied: the embedding's rows, if they are its weight.
        """
        kind = "Linear" if tied is None else "Embedding"
        tokens = self._vocabulary(name, kind)
        if tied is not None:
            part = self.operators.linear(tied, None)
        else:
            part = self.linear(name, outputs=None if tokens is None else [[tokens]])
        if tokens is None:
            return part
        begins = self.ranks.bounds(self.layout(name, kind).rows, self._vocabulary_unit(name, kind))
        return JoinedLinear(part, self.ranks, widths(begins))

    def _vocabulary(self, name: str, kind: str) -> range | None:
        """This rank's tokens; None for all of them."""
        if self.ranks.count == 1:
            return None
        return self.ranks.part(self.layout(name, kind).rows, self._vocabulary_unit(name, kind))

    def _vocabulary_unit(self, name: str, kind: str) -> int:
        return _unit(self.layout(name, kind).rows, self.layout(name, kind).row_unit, self.ranks.count)

    def layout(self, name: str, kind: str = "Linear") -> Layout:
        """Where a matrix' outputs and inputs are."""
        if isinstance(self.checkpoint, LiveWeights):
            raise RuntimeProblem("weights in memory cannot be divided between ranks")
        return self.checkpoint.layout(name, kind, transposed=self.spec.names.is_transposed(name) and kind == "Linear")

    def check(self, name: str, found: tuple[int, ...], wanted: tuple[int | None, ...]) -> None:
        """Compare a shape with what the config says, None for any length.

        Raises:
            RuntimeProblem: it is another one.
        """
        if any(want not in (None, have) for want, have in zip(wanted, found, strict=False)):
            raise RuntimeProblem(
                f"{self.checkpoint.path}: {name} has the shape {list(found)}, the config says {list(wanted)}"
            )

    def matrix(
        self, name: str, outputs: Ranges | None = None, inputs: range | None = None, kind: str = "Linear"
    ) -> Matrix:
        """A matrix, or only some of its outputs or inputs."""
        transposed = self.spec.names.is_transposed(name) and kind == "Linear"
        if outputs is None and inputs is None:
            found, chosen = self.checkpoint.matrix(name, kind), None
        else:
            assert isinstance(self.checkpoint, Checkpoint)
            layout = self.layout(name, kind)
            # Outputs that are stored in units are chosen after they are read.
            fits = outputs is None or aligned(layout.row_unit, layout.rows, outputs)
            chosen = None if fits else outputs
            found = self.checkpoint.matrix(name, kind, Cut(outputs if fits else None, inputs), transposed=transposed)
        if transposed:
            found = Matrix.plain(found.dense(self.dtype).T.contiguous(), found.inputs)
        if chosen is not None:
            found = found.rows(torch.tensor([row for each in chosen for row in each]))
        return found

    def linear(
        self,
        *names: str,
        rows: Tensor | None = None,
        shape: tuple[int, int] | None = None,
        outputs: Sequence[Ranges] | None = None,
    ) -> Linear:
        """One linear of several matrices: stacked, or computed separately where necessary."""
        found = self.stack(*names, rows=rows, shape=shape, outputs=outputs)
        return self.side_by_side(names, outputs) if found is None else self.operators.linear(*found)

    def side_by_side(self, names: tuple[str, ...], outputs: Sequence[Ranges] | None = None) -> Linear:
        """Several linears of the same inputs, computed separately."""
        return SideBySide(
            [self.linear(name, outputs=None if outputs is None else [outputs[i]]) for i, name in enumerate(names)]
        )

    def divided_inputs(
        self, name: str, begins: Sequence[int], *, sums: bool = True, shape: tuple[int, int] | None = None
    ) -> Linear:
        """A linear whose inputs come divided between the ranks.

        Args:
            name: of the linear.
            begins: where each rank's inputs begin, and the last one's end.
            sums: whether to sum over the ranks; otherwise each has its part of the sum.
            shape: of all of it.
        """
        ranks = self.ranks
        if ranks.count == 1:
            return self.linear(name, shape=shape)
        layout = self.layout(name)
        if shape is not None:
            self.check(name, (layout.rows, layout.columns), shape)
        parts = [range(*pair) for pair in pairwise(begins)]
        if aligned(layout.column_unit, layout.columns, parts):
            bias = self.checkpoint.optional(f"{name}.bias") if ranks.rank == 0 else None
            self._check_bias(name, bias, layout.rows)
            linear = self.operators.linear(self.matrix(name, inputs=parts[ranks.rank]), bias)
            return SummedLinear(linear, ranks) if sums else linear
        if not sums:
            raise RuntimeProblem(
                f"{self.checkpoint.path}: the inputs of {name} cannot be divided between {ranks.count} ranks, as its groups are"
                " of inputs that are not neighbours, or too large; use fewer ranks, or enable_expert_parallel"
            )
        outputs = ranks.bounds(layout.rows, _unit(layout.rows, layout.row_unit, ranks.count))
        mine = range(outputs[ranks.rank], outputs[ranks.rank + 1])
        return JoinedLinear(self.linear(name, outputs=[[mine]]), ranks, widths(outputs), widths(begins))

    def inner(self, up: Sequence[str], down: str) -> list[int]:
        """Where each rank's part of a feed-forward part's inner values begins, and where the last one's ends.

        Args:
            up: the matrices that compute them.
            down: the one that reads them.
        """
        if self.ranks.count == 1:
            return []
        below = self.layout(down)
        stored = math.lcm(*(self.layout(name).row_unit for name in up))
        for unit in (math.lcm(stored, below.column_unit or 1), stored):
            if -(-below.columns // unit) >= self.ranks.count:
                return self.ranks.bounds(below.columns, _unit(below.columns, unit, self.ranks.count))
        return self.ranks.bounds(below.columns)

    def own(self, inner: Sequence[int], up: Sequence[str] = ("",)) -> list[Ranges] | None:
        """This rank's outputs of the matrices that compute the inner values; None for all.

        Args:
            inner: where each rank's part begins, and the last one's ends.
            up: the matrices: gate and up, one with both, or one without a gate.
        """
        if self.ranks.count == 1:
            return None
        mine = range(inner[self.ranks.rank], inner[self.ranks.rank + 1])
        if len(up) == 2:
            return [[mine], [mine]]
        return [[mine, shifted(mine, inner[-1])]] if self.spec.gated else [[mine]]

    def stack(
        self,
        *names: str,
        rows: Tensor | None = None,
        shape: tuple[int, int] | None = None,
        outputs: Sequence[Ranges] | None = None,
    ) -> tuple[Matrix, Tensor | None] | None:
        """Several matrices stacked, and their biases; None if their inputs are not rounded alike.

        Args:
            names: of the linears.
            rows: how the outputs are ordered; None for as stored.
            shape: of the result, as the config says.
            outputs: those of each that are wanted; None for all.
        """
        chosen: Sequence[Ranges | None] = outputs or [None] * len(names)
        if outputs is None:
            self.checkpoint.place_together(names)
        parts = [self.matrix(name, mine) for name, mine in zip(names, chosen, strict=True)]
        found = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        if shape is not None and found != shape:
            raise RuntimeProblem(
                f"{self.checkpoint.path}: {' + '.join(names)} has the shape {list(found)}, the config says {list(shape)}"
            )
        if not see_the_same(parts):
            return None
        sizes = [part.shape[0] for part in parts]
        matrix = stacked(parts, self.dtype)
        biases = [self._bias(name, mine) for name, mine in zip(names, chosen, strict=True)]
        for name, found_bias, size in zip(names, biases, sizes, strict=True):
            self._check_bias(name, found_bias, size)
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([torch.zeros(sizes[i]) if b is None else b for i, b in enumerate(biases)])
        if rows is not None:
            matrix, bias = matrix.rows(rows), None if bias is None else bias[rows]
        return matrix, bias

    def _check_bias(self, name: str, bias: Tensor | None, size: int) -> None:
        """Kernels read as many values as there are outputs."""
        if bias is not None and bias.shape != (size,):
            raise RuntimeProblem(
                f"{self.checkpoint.path}: {name}.bias has the shape {list(bias.shape)}, and its weight {size} outputs; download it again"
            )

    def _bias(self, name: str, outputs: Ranges | None) -> Tensor | None:
        found = self.checkpoint.optional(f"{name}.bias")
        if found is None or outputs is None:
            return found
        return torch.cat([found[each.start : each.stop] for each in outputs])

    def norm(self, name: str | None) -> Rowwise:
        """A norm; None without a name."""
        if name is None:
            return lambda hidden: hidden
        eps = self.spec.eps
        weight = self.checkpoint.optional(f"{name}.weight")
        if self.spec.norm == "layer":
            device = self.operators.device
            shift = self.checkpoint.optional(f"{name}.bias")
            return self.operators.layer_norm(
                None if weight is None else weight.to(device, self.dtype),
                None if shift is None else shift.to(device, self.dtype),
                eps,
            )
        if weight is None:
            raise RuntimeProblem(f"{self.checkpoint.path}: the checkpoint lacks {name}.weight")
        wide = weight.to(self.operators.device).float()
        if self.spec.norm == "rms+1":
            return self.operators.rms_norm(1.0 + wide, eps, rounds_first=False)
        # OLMo 2 multiplies before it rounds.
        return self.operators.rms_norm(wide, eps, rounds_first=self.spec.names.after_mlp is None)

    def check_removed(self, *names: str) -> None:
        """Check that the output matrices of a part that the config marks as removed are zero, as other tools still compute it."""
        for name in names:
            if self.checkpoint.has_matrix(name) and self.checkpoint.matrix(name).dense(self.dtype).any():
                raise RuntimeProblem(
                    f"{self.checkpoint.path}: {name} is not zero, but layer_parts in config.json marks it as removed;"
                    " the two do not match"
                )

    def first_of(self, names: tuple[str, ...]) -> str:
        """The spelling that the checkpoint uses."""
        for name in names:
            if self.checkpoint.has_matrix(name):
                return name
        raise RuntimeProblem(f"{self.checkpoint.path}: the checkpoint lacks {names[0]}")


def widths(begins: Sequence[int]) -> list[int]:
    """How much each rank has."""
    return [end - begin for begin, end in pairwise(begins)]


def _unit(total: int, stored: int, count: int) -> int:
    """How many outputs stay together: at least as stored; more, for the kernels' sake, where there are many."""
    wide = math.lcm(stored, _KERNELS_UNIT)
    return wide if total >= 4 * count * wide else stored


def shifted(some: range, by: int) -> range:
    """The same, further on."""
    return range(some.start + by, some.stop + by)
