"""Gates and activations of many rows, after torch's product; for few rows they are fused with the product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.kernel import TOLERANCE, Build, Case, Kernel, PreparedCase, poisoned
from ..base.launch import Launch
from ..base.overlap import wait_and_launch
from ..base.targets import Target
from .finish import activated, activation, is_gated
from .packing import interleaved

_TILE = 2048  # outputs of a program: two 16-byte accesses per thread of four warps of 32, one for warps of 64


@triton.jit
def _gate_rows(
    x, out, OUTPUTS, x_stride, GATE: tl.constexpr, GATED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    wait_and_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < OUTPUTS
    if GATED:
        # Eight of the gate lie before eight of its inputs.
        gates = x + row * x_stride + (columns // 8 * 16 + columns % 8)
        gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        values = activation(gate, GATE) * tl.load(gates + 8, mask=inside, other=0.0).to(tl.float32)
    else:
        values = activation(tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32), GATE)
    tl.store(out + row * OUTPUTS + columns, values.to(out.dtype.element_ty), mask=inside)


def launch(x: Tensor, out: Tensor, gate: str) -> Launch:
    """One pass, ready to run."""
    gated, (rows, outputs) = is_gated(gate), out.shape
    if (
        gate == "none"
        or x.shape != (rows, outputs * (2 if gated else 1))
        or x.stride(1) != 1
        or (gated and outputs % 8)
    ):
        raise ValueError(f"inputs are {list(x.shape)} for outputs of {list(out.shape)} and gate {gate!r}")
    arguments: dict[str, Tensor | int | None] = {"x": x, "out": out, "OUTPUTS": outputs, "x_stride": x.stride(0)}
    constants = {"GATE": gate, "GATED": gated, "TILE": _TILE}
    return Launch(_gate_rows, arguments, constants, (rows, -(-outputs // _TILE)), 4, 1)


def gate_rows(x: Tensor, gate: str, *, out: Tensor | None = None) -> Tensor:
    """Activated gates times their up projections, or plain activations.

    Args:
        x: float16 or bfloat16, with contiguous rows: ``[rows, 2 outputs]``, a gate and its inputs 8 by 8; or
            ``[rows, outputs]``.
        gate: one of :data:`GATES` of :mod:`finish`, except ``none``.
        out: the output, allocated by default. Plain activations may be written to ``x``.

    Returns:
        ``[rows, outputs]``.
    """
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1] // 2 if is_gated(gate) else x.shape[1])
    if x.shape[0]:
        launch(x, out, gate).run()
    return out


@dataclass(frozen=True)
class _GateCase:
    rows: int
    outputs: int
    dtype: torch.dtype
    gate: str
    apart: int = 0  # padding elements between rows
    in_place: bool = False

    @property
    def name(self) -> str:
        options = [f"{self.apart} apart"] if self.apart else []
        options += ["in place"] if self.in_place else []
        return " ".join([f"{self.gate} {self.rows}x{self.outputs} {self.dtype}", *options]).replace("torch.", "")

    @property
    def columns(self) -> int:
        return self.outputs * (2 if is_gated(self.gate) else 1)

    def trial(self, device: torch.device, draw: torch.Generator) -> PreparedCase:
        """The reference has a gate before its inputs; :func:`interleaved` says where each goes."""
        plain = 3 * torch.randn(self.rows, self.columns, generator=draw, device=draw.device)
        plain = plain.to(self.dtype).to(device)
        x = poisoned(self.rows, self.columns + self.apart, self.dtype, device)[:, : self.columns]
        x.copy_(plain[:, interleaved(self.columns).to(device)] if is_gated(self.gate) else plain)
        expected = activated(plain.double(), self.gate)

        def compute() -> Tensor:
            if self.in_place:
                out = x.clone()
                return gate_rows(out, self.gate, out=out)
            return gate_rows(x, self.gate, out=poisoned(self.rows, self.outputs, self.dtype, device))

        return PreparedCase(compute, expected, x.nbytes)

    def launch(self, target: Target) -> Launch:
        """On ``meta``, for compilation."""
        x = torch.empty(self.rows, self.columns, dtype=self.dtype, device="meta")
        return launch(x, torch.empty(self.rows, self.outputs, dtype=self.dtype, device="meta"), self.gate)

    def case(self, large: bool = False) -> Case:
        return Case(self.name, self.trial, TOLERANCE[self.dtype], large, launch=self.launch)

    def build(self, rare: bool = False) -> Build:
        return Build(self.name, self.launch, matrix=False, streamed=("x",), rare=rare)


_F, _B = torch.float16, torch.bfloat16
_SMALL = [
    _GateCase(3, 2056, _F, "silu"),
    _GateCase(1, 104, _B, "gelu_tanh", apart=8),
    _GateCase(3, 1301, _F, "alone_relu", apart=3),
    _GateCase(2, 2500, _B, "alone_silu"),
    _GateCase(3, 300, _F, "alone_gelu", in_place=True),
    _GateCase(2, 256, _B, "alone_gelu_tanh"),
]
_LLAMA = _GateCase(512, 14336, _B, "silu")
_LARGE = [_LLAMA, _GateCase(512, 16384, _F, "alone_gelu")]
_BUILDS = [_LLAMA.build(), _LARGE[1].build(), _GateCase(512, 14336, _B, "gelu_tanh").build(rare=True)]
KERNEL = Kernel("gate_rows", [*(case.case() for case in _SMALL), *(case.case(large=True) for case in _LARGE)], _BUILDS)
