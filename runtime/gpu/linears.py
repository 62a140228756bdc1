"""Linears on the Triton kernels; the kernel is chosen by a step's number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from ...quant.activations import is_int8_by_token
from ..decoder.linears.linear import Linear, restored_from
from ..kernels.base.workspace import workspace
from ..kernels.linear import linear_bytes, linear_codes
from ..kernels.linear.codes_weight import CodesWeight
from ..kernels.linear.codes_weight import of_experts as codes_of_experts
from ..kernels.linear.codes_weight import prepare as prepare_codes
from ..kernels.linear.finish import is_gated
from ..kernels.linear.gate_rows import gate_rows
from ..kernels.linear.linear_bytes import CHUNK, BytesWeight
from ..kernels.linear.linear_bytes import of_experts as bytes_of_experts
from ..kernels.linear.linear_bytes import prepare as prepare_bytes
from ..kernels.linear.linear_dense import BLOCK as DENSE_BLOCK
from ..kernels.linear.linear_dense import DenseWeight, linear_dense
from ..kernels.linear.linear_dense import of_experts as dense_of_experts
from ..kernels.linear.linear_dense import prepare as prepare_dense
from ..kernels.linear.packing import FORMATS, is_two_of_four, kernel_group
from ..kernels.linear.restore_codes import restore_codes
from ..kernels.linear.routing import Routing
from ..kernels.rows.quantize_rows import NAMES
from ..kernels.tiles.tile import LinearShape, Tile, Tiles
from ..weights.matrix import FloatCodes, Matrix
from ..weights.rounding import rounding_explanation
from .input_rounding import InputRounding, is_e4m3

HALVES = (torch.float16, torch.bfloat16)
DENSE_ROWS = 64


class Rounded(NamedTuple):
    """Inputs that are already rounded to 8 bits.

    Attributes:
        codes: ``[rows, columns]``.
        scales: float32, by row or by 128 columns.
        dtype: their dtype before rounding.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


Inputs = Tensor | Rounded


class GpuLinear(Linear, Protocol):
    """A linear that may fuse the residual addition, and may require rounded inputs."""

    def __call__(self, x: Inputs, residual: Tensor | None = None) -> Tensor:
        """``x [rows, columns]`` to ``[rows, outputs]``; plus ``residual``, which is overwritten."""
        ...

    def wants(self, rows: int) -> tuple[torch.dtype, bool] | None:
        """The dtype to which inputs of this many rows must be rounded before, and whether by 128 columns; None for no rounding."""
        ...

    def adds(self, rows: int) -> bool:
        """Whether a residual of this many rows is added in the same launch."""
        ...


class DenseGpuLinear:
    """Unquantized weights, or formats without a kernel: a kernel for few rows, torch's product for many.

    Args:
        matrix: the weight.
        bias: its bias.
        dtype: of inputs and outputs.
        device: where.
        tiles: of the device.
        gate: the fused gate or activation (see finish.py).

    Attributes:
        weight: on the device.
        kernel: the name of the kernel for few rows.
        waits: whether rounding inputs synchronizes with the device (see input_rounding.py).
        groups: whether experts of this kind can be computed in one launch.
    """

    def __init__(
        self,
        matrix: Matrix,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        tiles: Tiles,
        gate: str = "none",
    ) -> None:
        weight = matrix.dense(dtype).to(device).contiguous()
        bias = None if bias is None else bias.to(device, dtype)
        self._rounding, self._tiles = InputRounding(matrix.inputs, dtype, device), tiles
        self.waits = self._rounding.waits
        self.numel, (rows, self.columns) = weight.numel(), weight.shape
        # If the columns are not a multiple of 16, elements are read one at a time.
        self._few = DENSE_ROWS if dtype in HALVES and self.columns % 16 == 0 else 0
        self.groups = self._few > 0 and not self.waits
        if dtype in HALVES:
            self.weight = prepare_dense(weight, bias, gate)
        else:
            self.weight = DenseWeight(rows, self.columns, weight, bias, gate)
        self.nbytes = self.weight.weight.nbytes
        name = str(dtype).removeprefix("torch.")
        suffix = f"{restored_from(matrix, dtype)}{rounding_explanation(matrix.inputs)}{_gate_explanation(gate)}"
        self.kernel = f"Triton linear_dense, {name}{suffix}"
        self._explanation = f"{name} F.linear{suffix}"
        if self._few:
            self._explanation = (
                f"{self.kernel}; more than {DENSE_ROWS} rows by F.linear (tiles for {tiles.description})"
            )
        self._by_rows: dict[tuple[int, int], Tile] = {}

    def __call__(self, x: Inputs, residual: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        x = self._rounding(x)
        if 0 < x.shape[0] <= self._few:
            return linear_dense(x.contiguous(), self.weight, self.tile(x.shape[0]), out=residual, residual=residual)
        if residual is not None and self.adds(x.shape[0]):
            return residual.addmm_(x, self.weight.weight.T)
        found = functional.linear(x, self.weight.weight, self.weight.bias)
        if self.weight.gate != "none":
            found = gate_rows(found, self.weight.gate)
        return found if residual is None else residual.add_(found)

    def adds(self, rows: int) -> bool:
        """By the kernel, or by torch's product without a bias."""
        return rows <= self._few or (self.weight.bias is None and self.weight.gate == "none")

    def wants(self, rows: int) -> tuple[torch.dtype, bool] | None:
        """Nothing."""
        return None

    def explain(self) -> str:
        """A description of the kernel that computes it."""
        return self._explanation

    def tile(self, rows: int, row_tiles: int = 0) -> Tile:
        """The tile for a step of this many rows; ``row_tiles`` are those of all experts."""
        if (rows, row_tiles) not in self._by_rows:
            shape = LinearShape(rows, self.weight.rows, self.columns, self.columns, 16)
            form = "experts" if self.weight.experts else "half"
            found = self._tiles.find("linear_dense", form, shape, DENSE_BLOCK, row_tiles)
            self._by_rows[rows, row_tiles] = found
        return self._by_rows[rows, row_tiles]

    def join(self, weights: Sequence[Any]) -> None:
        """Use all experts' weights, in one copy, instead of its own."""
        self.weight = dense_of_experts(list(weights))

    def routed(self, x: Tensor, tile: Tile, routing: Routing) -> Tensor:
        """Each row times its expert's weight."""
        return linear_dense(self._rounding(x), self.weight, tile, routing=routing)


class PackedLinear:
    """Codes of 2 to 8 bits or small floats, multiplied by 16-bit inputs.

    Args:
        weight: packed, on the device.
        matrix: its source.
        dtype: of inputs and outputs.
        tiles: of the device.

    Attributes:
        weight: packed.
        kernel: the name of its kernel.
        waits: whether rounding inputs synchronizes with the device (see input_rounding.py).
        groups: whether experts of this kind can be computed in one launch: not if they reorder inputs or synchronize.
    """

    def __init__(self, weight: CodesWeight, matrix: Matrix, dtype: torch.dtype, tiles: Tiles) -> None:
        self.weight = weight
        self._rounding = InputRounding(matrix.inputs, dtype, weight.codes.device)
        self._dtype, self._tiles = dtype, tiles
        self.waits = self._rounding.waits
        self.groups = matrix.order is None and not self.waits
        self._order = None if matrix.order is None else matrix.order.to(weight.codes.device)
        self._by_rows: dict[tuple[int, int], Tile] = {}
        self.numel = weight.rows * weight.columns
        self.nbytes = weight.nbytes
        self.columns = weight.columns
        gated = _gate_explanation(weight.gate)
        many = f"; from {tiles.restore_rows} rows on restored, then F.linear" if tiles.restore_rows else ""
        name = str(dtype).removeprefix("torch.")
        kind = {"sparse4": ", 2:4 sparse", "nested8": " in two planes"}.get(weight.form, "")
        self.kernel = f"Triton linear_codes, {matrix.format} weights{kind}, {name} inputs{rounding_explanation(matrix.inputs)}{gated}"
        self._explanation = f"{self.kernel}{many} (tiles for {tiles.description})"

    def __call__(self, x: Inputs, residual: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        if not x.shape[0]:
            return x.new_empty(0, self.weight.outputs)
        if self._order is not None:
            x = x.index_select(1, self._order)
        x = self._rounding(x).contiguous()
        if self._tiles.restore_rows and x.shape[0] >= self._tiles.restore_rows:
            return self._restored(x, residual)
        return linear_codes.linear_codes(x, self.weight, self.tile(x.shape[0]), out=residual, residual=residual)

    def wants(self, rows: int) -> tuple[torch.dtype, bool] | None:
        """Nothing."""
        return None

    def adds(self, rows: int) -> bool:
        """By the kernel, or by torch's product without a bias."""
        restored = self._tiles.restore_rows and rows >= self._tiles.restore_rows
        return not restored or (self.weight.bias is None and self.weight.gate == "none")

    def tile(self, rows: int, row_tiles: int = 0) -> Tile:
        """The tile for a step of this many rows; ``row_tiles`` are those of all experts."""
        if (rows, row_tiles) not in self._by_rows:
            form, weight = FORMATS[self.weight.form], self.weight
            group = weight.group if weight.kind != "none" else weight.columns
            shape = LinearShape(rows, weight.rows, weight.columns, group, form.bits)
            found = self._tiles.find("linear_codes", form.name, shape, form.block, row_tiles)
            self._by_rows[rows, row_tiles] = found
        return self._by_rows[rows, row_tiles]

    def explain(self) -> str:
        return self._explanation

    def join(self, weights: Sequence[Any]) -> None:
        """Use all experts' weights, in one copy, instead of its own."""
        self.weight = codes_of_experts(list(weights))

    def routed(self, x: Tensor, tile: Tile, routing: Routing) -> Tensor:
        """Each row times its expert's weight."""
        return linear_codes.linear_codes(self._rounding(x), self.weight, tile, routing=routing)

    def upper(self) -> Self | None:
        """The linear of the upper four of 8 bits, in the same memory; None if they are not a plane of their own."""
        if self.weight.form != "nested8":
            return None
        found = copy(self)
        found.weight, found._by_rows = self.weight.upper(), {}
        found.nbytes = found.weight.nbytes
        found.kernel, found._explanation = (
            text.replace(" weights in two planes", " weights' upper 4 bits")
            for text in (self.kernel, self._explanation)
        )
        return found

    def _restored(self, x: Tensor, residual: Tensor | None) -> Tensor:
        weight = restore_codes(self.weight, self._dtype)
        if residual is not None and self.adds(x.shape[0]):
            return residual.addmm_(x, weight.T)
        found = functional.linear(x, weight, self.weight.bias)
        if self.weight.gate != "none":
            found = gate_rows(found, self.weight.gate)
        return found if residual is None else residual.add_(found)


class BytesLinear:
    """8-bit weights by inputs that are already rounded to 8 bits.

    Args:
        weight: packed, on the device.
        matrix: its source.
        tiles: of the device.

    Attributes:
        weight: packed.
        kernel: the name of its kernel.
        groups: whether experts of this kind can be computed in one launch.
    """

    groups = True
    waits = False

    def __init__(self, weight: BytesWeight, matrix: Matrix, tiles: Tiles) -> None:
        self.weight = weight
        self._tiles = tiles
        self._by_rows: dict[tuple[int, int], Tile] = {}
        self.numel = weight.rows * weight.columns
        self.nbytes = weight.nbytes
        self.columns = weight.columns
        each = "128 of them" if weight.block_scales is not None else "token"
        gated = _gate_explanation(weight.gate)
        self.kernel = (
            f"Triton linear_bytes, {matrix.format} weights, {NAMES[weight.codes.dtype]} inputs by {each}{gated}"
        )
        self._explanation = f"{self.kernel} (tiles for {tiles.description})"

    def __call__(self, x: Inputs, residual: Tensor | None = None) -> Tensor:
        if isinstance(x, Rounded):
            rows = x.codes.shape[0]
            out = residual
            if out is None:
                out = torch.empty(rows, self.weight.outputs, dtype=x.dtype, device=x.codes.device)
            if rows:
                space = workspace(x.codes.device)
                one = linear_bytes.launch(
                    x.codes, x.scales, self.weight, self.tile(rows), out, space, residual=residual
                )
                one.run()
            return out
        rows = x.shape[0]
        if not rows:
            return x.new_empty(0, self.weight.outputs)
        return linear_bytes.linear_bytes(x.contiguous(), self.weight, self.tile(rows), out=residual, residual=residual)

    def wants(self, rows: int) -> tuple[torch.dtype, bool] | None:
        """Its dtype, for any number of rows."""
        return self.weight.codes.dtype, self.weight.block_scales is not None

    def adds(self, rows: int) -> bool:
        """Always."""
        return True

    def tile(self, rows: int, row_tiles: int = 0) -> Tile:
        """The tile for a step of this many rows; ``row_tiles`` are those of all experts."""
        if (rows, row_tiles) not in self._by_rows:
            weight = self.weight
            group = CHUNK if weight.block_scales is not None else weight.columns
            shape = LinearShape(rows, weight.rows, weight.columns, group, 8)
            found = self._tiles.find("linear_bytes", NAMES[weight.codes.dtype], shape, CHUNK, row_tiles)
            self._by_rows[rows, row_tiles] = found
        return self._by_rows[rows, row_tiles]

    def join(self, weights: Sequence[Any]) -> None:
        """Use all experts' weights, in one copy, instead of its own."""
        self.weight = bytes_of_experts(list(weights))

    def routed(self, x: Tensor, tile: Tile, routing: Routing) -> Tensor:
        """Each row times its expert's weight."""
        return linear_bytes.linear_bytes(x, self.weight, tile, routing=routing)

    def explain(self) -> str:
        return self._explanation


def _gate_explanation(gate: str) -> str:
    if gate == "none":
        return ""
    return f", then {gate.removeprefix('alone_')}{' of the gate' if is_gated(gate) else ''}"


def on_kernels(
    matrix: Matrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    tiles: Tiles,
    gate: str = "none",
    *,
    planes: bool = False,
) -> PackedLinear | BytesLinear | None:
    """A linear on the kernels, or None if no kernel supports it.

    Args:
        matrix: the weight.
        bias: its bias.
        dtype: of inputs and outputs.
        device: where it is computed.
        tiles: of the device.
        gate: the activation of a gate whose rows come first; returns None where that cannot be fused.
        planes: whether codes of 8 bits are kept in two planes, of which :meth:`PackedLinear.upper` reads one.
    """
    if dtype not in HALVES or (is_gated(gate) and matrix.shape[0] % 16):
        return None
    if is_gated(gate) and matrix.inputs is not None and matrix.inputs.args.strategy == "group":
        return None  # rows of a gate and of its up projection do not share a block's scale
    bias = None if bias is None else bias.to(device, dtype)
    eight = _bytes_weight(matrix, bias, device, tiles, gate)
    if eight is not None:
        return BytesLinear(eight, matrix, tiles)
    codes = _codes_weight(matrix, bias, dtype, device, gate, planes)
    return None if codes is None else PackedLinear(codes, matrix, dtype, tiles)


def _bytes_weight(
    matrix: Matrix, bias: Tensor | None, device: torch.device, tiles: Tiles, gate: str
) -> BytesWeight | None:
    """For 8-bit weights and inputs that the device multiplies natively."""
    floats = matrix.floats
    if matrix.inputs is None or matrix.order is not None:
        return None
    inputs = matrix.inputs.args
    if matrix.scale is not None:
        if matrix.bits != 8 or matrix.scale.shape[1] != 1 or matrix.zero is not None or not is_int8_by_token(inputs):
            return None
        return prepare_bytes(matrix.values.to(device), row_scale=matrix.scale.to(device), bias=bias, gate=gate)
    code = tiles.target.float8
    if floats is None or floats.codes.dtype != torch.float8_e4m3fn or code is None or not is_e4m3(inputs):
        return None
    codes, twice = floats.codes.to(device), 1.0
    if code == torch.float8_e4m3fnuz:
        # The same bits have half the value there, and the bits of -0 are NaN.
        bits = codes.view(torch.uint8)
        codes, twice = torch.where(bits == 128, 0, bits).to(torch.uint8).view(code), 2.0
    scale = floats.scale.to(device).float() * twice
    if inputs.strategy == "token" and floats.height == 1 and scale.shape[1] == 1:
        return prepare_bytes(codes, row_scale=scale, bias=bias, gate=gate)
    blocks = inputs.strategy == "group" and inputs.group_size == CHUNK and floats.height == CHUNK
    if blocks and not is_gated(gate) and scale.shape[1] == -(-matrix.shape[1] // CHUNK):
        return prepare_bytes(codes, block_scale=scale, bias=bias, gate=gate)
    return None


def _codes_weight(
    matrix: Matrix, bias: Tensor | None, dtype: torch.dtype, device: torch.device, gate: str, planes: bool
) -> CodesWeight | None:
    """For weights that are multiplied by 16-bit inputs."""
    if matrix.floats is not None:
        return _of_floats(matrix.floats, bias, dtype, device, gate)
    scale, zero = matrix.scale, matrix.zero
    if scale is None or not 2 <= matrix.bits <= 8:
        return None
    form = f"int{matrix.bits if matrix.bits <= 4 else 8}"
    codes = matrix.values.to(device)
    if form == "int4" and zero is None and (scale.shape[1] == 1 or matrix.group % 64 == 0) and is_two_of_four(codes):
        form = "sparse4"
    if planes and matrix.bits == 8 and zero is None and matrix.inputs is None:
        form = "nested8"
    if scale.shape[1] == 1 and zero is None:
        return prepare_codes(codes, form, row_scale=scale.to(device), bias=bias, gate=gate)
    if kernel_group(matrix.group) is None or (zero is not None and scale.dtype not in HALVES):
        return None
    return prepare_codes(
        codes, form, scale=scale.to(device), zero=None if zero is None else zero.to(device), bias=bias, gate=gate
    )


def _of_floats(
    floats: FloatCodes, bias: Tensor | None, dtype: torch.dtype, device: torch.device, gate: str
) -> CodesWeight | None:
    floats = floats.by_row()
    scale, factor = floats.scale.to(device), floats.factor
    factor = None if factor is None else factor.to(device)
    if floats.codes.dtype == torch.float8_e4m3fn:
        codes = floats.codes.to(device)
        columns, bits = codes.shape[1], codes.view(torch.uint8)
        if scale.shape[1] == 1:
            return prepare_codes(bits, "float8", row_scale=scale, bias=bias, gate=gate)
        if kernel_group(columns // scale.shape[1]) is None:
            return None
        return prepare_codes(bits, "float8", scale=scale, row_scale=factor, bias=bias, gate=gate)
    if dtype == torch.float16 and scale.dtype == torch.uint8:
        # float16 has fewer exponents than e8m0.
        least, most = int(scale.min()) - 127, int(scale.max()) - 127
        if least < -14 or most > 12:
            return None
    packed = floats.codes.to(device)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    if kernel_group(codes.shape[1] // scale.shape[1]) is None:
        return None
    return prepare_codes(codes, "float4", scale=scale, row_scale=factor, bias=bias, gate=gate)
