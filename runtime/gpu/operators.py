"""A decoder's parts on a GPU: linears on the Triton kernels; unsupported parts are left to torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from ...system.errors import RuntimeProblem
from ..decoder.linears.linear import Linear
from ..decoder.parts.kv_cache import KeysValues, Rules
from ..decoder.parts.operators import Experts, LayerParts, Operators, Rowwise, Stack
from ..fusions import Fusions
from ..kernels.linear.routing import most_blocks, route
from ..kernels.rows.normalize_rows import Norm
from ..kernels.tiles.tile import tiles_of
from ..weights.matrix import Matrix, see_the_same
from .cache import GpuKeysValues
from .layers import GpuLayers
from .linears import HALVES, BytesLinear, DenseGpuLinear, PackedLinear, on_kernels
from .norms import GpuNorm

# Models' and kernels' names of gates and of plain activations.
GATES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
ALONE = {**GATES, "gelu": "gelu", "gelu_python": "gelu", "gelu_fast": "gelu_tanh", "relu": "relu"}
_GpuLinear = PackedLinear | BytesLinear | DenseGpuLinear


class GpuOperators(Operators):
    """Like :class:`Operators`, with linears, norms and attention on the kernels.

    Args:
        dtype: the compute dtype.
        device: the GPU; a CPU with Triton's interpreter.
        fusions: the fused launches.
    """

    name = "gpu"
    block_multiple = 16
    takes_adapters = False

    def __init__(self, dtype: torch.dtype, device: torch.device, fusions: Fusions | None = None) -> None:
        super().__init__(dtype, device)
        self._tiles = tiles_of(device)
        self._fusions = self.fusions = fusions or Fusions()
        if self._fusions.sampling and self._fusions.attention:  # plain attention reads a step's lists
            self.executor = "gpu"

    def linear(self, matrix: Matrix, bias: Tensor | None) -> Linear:
        return self._linear(matrix, bias, "none")

    def gated(self, matrix: Matrix, bias: Tensor | None, activation: str) -> Linear | None:
        if activation not in GATES or not self._fusions.activation:
            return None
        found = self._on_kernels(matrix, bias, GATES[activation])
        if found is None and matrix.is_plain and matrix.shape[0] % 16 == 0 and self.dtype in HALVES:
            return self._linear(matrix, bias, GATES[activation])
        return found

    def activated(self, matrix: Matrix, bias: Tensor | None, activation: str) -> Linear | None:
        if activation not in ALONE or not self._fusions.activation or self.dtype not in HALVES:
            return None
        return self._linear(matrix, bias, f"alone_{ALONE[activation]}")

    def _linear(self, matrix: Matrix, bias: Tensor | None, gate: str) -> _GpuLinear:
        found = self._on_kernels(matrix, bias, gate)
        return found or DenseGpuLinear(matrix, bias, self.dtype, self.device, self._tiles, gate)

    def _on_kernels(self, matrix: Matrix, bias: Tensor | None, gate: str) -> PackedLinear | BytesLinear | None:
        return on_kernels(matrix, bias, self.dtype, self.device, self._tiles, gate)

    def rms_norm(self, weight: Tensor, eps: float, rounds_first: bool) -> Rowwise:
        plain = super().rms_norm(weight, eps, rounds_first)
        return GpuNorm(Norm("rms", weight, None, eps, rounds_first), plain)

    def layer_norm(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> Rowwise:
        plain = super().layer_norm(weight, bias, eps)
        return GpuNorm(Norm("layer", weight, bias, eps, False), plain)

    def stack(self, layers: list[LayerParts], reach: Callable[[int], None] | None = None) -> Stack | None:
        return GpuLayers(layers, self.dtype, self._tiles, self._fusions, reach)

    def keys_values(
        self,
        heads: Sequence[int],
        size: int,
        blocks: int,
        block_size: int,
        kept: torch.dtype,
        rules: Rules | None = None,
    ) -> KeysValues:
        return GpuKeysValues(heads, size, blocks, block_size, self._kept(kept), self.device, rules)

    def keeps(self, codes: torch.dtype) -> bool:
        return codes != torch.float8_e4m3fn or self._tiles.target.float8 == codes

    def block_bytes(self, heads: Sequence[int], size: int, block_size: int, kept: torch.dtype) -> int:
        return GpuKeysValues.block_bytes(heads, size, block_size, self._kept(kept))

    def _kept(self, kept: torch.dtype) -> torch.dtype:
        """The cache dtype with the device's 8-bit floats."""
        own = self._tiles.target.float8
        if kept != torch.float8_e4m3fn:
            return kept
        if own is None:
            raise RuntimeProblem("this GPU does not support 8-bit floats; use an int8 KV cache")
        return own

    def groups_experts(self, activation: str) -> bool:
        return activation in GATES and self.dtype in HALVES

    def experts(self, gate_up: Sequence[Matrix], down: Sequence[Matrix], activation: str) -> Experts | None:
        if gate_up[0].shape[0] % 16:
            return None
        inner = self._grouped(gate_up, GATES[activation])
        outer = None if inner is None else self._grouped(down, "none")
        return None if inner is None or outer is None else GpuExperts(inner, outer)

    def _grouped(self, matrices: Sequence[Matrix], gate: str) -> _Grouped | None:
        """None if some must be computed separately, or not all are alike."""
        if not see_the_same(matrices):
            return None
        parts: list[_GpuLinear] = []
        for matrix in matrices:
            parts.append(self._linear(matrix, None, gate))
            if not parts[-1].groups or type(parts[-1]) is not type(parts[0]):
                return None
        try:
            return _Grouped(parts)
        except ValueError:
            return None


class _Grouped:
    """One linear of all experts."""

    def __init__(self, parts: Sequence[_GpuLinear]) -> None:
        self.parts = [_Expert(part.numel, part.nbytes, part.columns, part.kernel) for part in parts]
        # From here on all experts' weights are in one copy; the first one's tiles are used.
        self._all = parts[0]
        self._all.join([part.weight for part in parts])

    def upper(self) -> _Grouped | None:
        """That of the upper four of 8 bits; None if they are not a plane of their own."""
        all_upper = self._all.upper() if isinstance(self._all, PackedLinear) else None
        if all_upper is None:
            return None
        found = copy(self)
        found._all = all_upper
        found.parts = [_Expert(part.numel, all_upper.nbytes, part.columns, all_upper.kernel) for part in self.parts]
        return found

    def __call__(self, x: Tensor, chosen: Tensor, *, by_slot: bool, shares: Tensor | None = None) -> Tensor:
        """``x`` of each token, or of each slot, by each slot's expert."""
        experts, slots = len(self.parts), chosen.numel()
        # About the number of rows per expert.
        rows = max(1, slots // experts)
        height = self._all.tile(rows).rows
        tile = self._all.tile(rows, most_blocks(slots, experts, height))
        return self._all.routed(x, tile, route(chosen, experts, tile.rows, by_slot=by_slot, shares=shares))


class _Expert:
    """An expert's part in explanations."""

    waits = False

    def __init__(self, numel: int, nbytes: int, columns: int, explanation: str) -> None:
        self.numel, self.nbytes, self.columns = numel, nbytes, columns
        self._explanation = f"{explanation}, all experts in one launch"

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError("experts are computed together")

    def explain(self) -> str:
        return self._explanation


class GpuExperts:
    """Feed-forward parts of all experts in two launches."""

    def __init__(self, gate_up: _Grouped, down: _Grouped) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        inner = self._gate_up(hidden.contiguous(), chosen, by_slot=False)
        outer = self._down(inner, chosen, by_slot=True, shares=shares)
        return outer.view(*chosen.shape, outer.shape[-1]).sum(1)

    def upper(self) -> GpuExperts | None:
        """Those of the upper four of 8 bits; None if they are not a plane of their own."""
        inner, outer = self._gate_up.upper(), self._down.upper()
        if inner is None and outer is None:
            return None
        return GpuExperts(inner or self._gate_up, outer or self._down)

    def linears(self) -> dict[str, Linear]:
        parts = zip(self._gate_up.parts, self._down.parts, strict=True)
        return {
            f"expert {e} {role}": part
            for e, two in enumerate(parts)
            for role, part in zip(("gate, up", "down"), two, strict=True)
        }
