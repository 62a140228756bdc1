"""Linears on the Triton kernels; the kernel is chosen by a step's number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from ...quant.activations import is_int8_by_token
from ..decoder.linears.linear import Linear, restored_from
from ..kernels.linear import linear_bytes, linear_codes
from ..kernels.linear.codes_weight import CodesWeight
from ..kernels.linear.codes_weight import prepare as prepare_codes
from ..kernels.linear.finish import is_gated
from ..kernels.linear.gate_rows import gate_rows
from ..kernels.linear.linear_bytes import CHUNK, BytesWeight
from ..kernels.linear.linear_bytes import prepare as prepare_bytes
from ..kernels.linear.linear_dense import BLOCK as DENSE_BLOCK
from ..kernels.linear.linear_dense import DenseWeight, linear_dense
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


class KernelLinear:
    """A linear on one of the kernels, or for many rows on torch's product.

    Args:
        weight: prepared for the kernel, on the device.
        rounding: of its inputs.
        kernel: what computes it, for messages.
        tiles: of the device.

    Attributes:
        weight, kernel: as given.
        waits: whether rounding inputs synchronizes with the device (see input_rounding.py).
        groups: whether experts of this kind can be computed in one launch.
    """

    product: Callable[..., Tensor]

    def __init__(self, weight: Any, rounding: InputRounding, kernel: str, tiles: Tiles) -> None:
        self.weight, self._rounding, self.kernel, self._tiles = weight, rounding, kernel, tiles
        self.numel, self.columns, self.nbytes = weight.rows * weight.columns, weight.columns, weight.nbytes
        self.waits = rounding.waits
        self.groups = not self.waits
        self._explanation = f"{kernel} (tiles for {tiles.description})"
        self._by_rows: dict[tuple[int, int], Tile] = {}

    def wants(self, rows: int) -> tuple[torch.dtype, bool] | None:
        """Nothing."""
        return None

    def adds(self, rows: int) -> bool:
        """By the kernel, or by torch's product without a bias."""
        return self._takes(rows) or self._is_plain

    def explain(self) -> str:
        """A description of the kernel that computes it."""
        return self._explanation

    def tile(self, rows: int, row_tiles: int = 0) -> Tile:
        """The tile for a step of this many rows; ``row_tiles`` are those of all experts."""
        if (rows, row_tiles) not in self._by_rows:
            self._by_rows[rows, row_tiles] = self._tiles.find(*self._tile_key(rows), row_tiles)
        return self._by_rows[rows, row_tiles]

    def join(self, weights: Sequence[Any]) -> None:
        """Use all experts' weights, in one copy, instead of its own."""
        self.weight = self.weight.joined(weights)

    def routed(self, x: Tensor, tile: Tile, routing: Routing) -> Tensor:
        """Each row times its expert's weight."""
        return self.product(self._rounding(x), self.weight, tile, routing=routing)

    def _takes(self, rows: int) -> bool:
        """Whether the kernel computes this many rows."""
        return True

    def _tile_key(self, rows: int) -> tuple[str, str, LinearShape, int]:
        """What tiles are found by: kernel, form, shape and the fewest columns of an iteration."""
        raise NotImplementedError

    @property
    def _is_plain(self) -> bool:
        return self.weight.bias is None and self.weight.gate == "none"

    def _by_torch(self, x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
        if residual is not None and self._is_plain:
            return residual.addmm_(x, weight.T)
        found = functional.linear(x, weight, self.weight.bias)
        if self.weight.gate != "none":
            found = gate_rows(found, self.weight.gate)
        return found if residual is None else residual.add_(found)


class DenseGpuLinear(KernelLinear):
    """Unquantized weights, or formats without a kernel: a kernel for few rows, torch's product for many.

    Args:
        matrix: the weight.
        bias: its bias.
        dtype: of inputs and outputs.
        device: where.
        tiles: of the device.
        gate: the fused gate or activation (see finish.py).
    """

    product = staticmethod(linear_dense)

    def __init__(
        self,
        matrix: Matrix,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        tiles: Tiles,
        gate: str = "none",
    ) -> None:
        dense = matrix.dense(dtype).to(device).contiguous()
        bias = None if bias is None else bias.to(device, dtype)
        weight = (
            prepare_dense(dense, bias, gate)
            if dtype in HALVES
            else DenseWeight(dense.shape[0], dense.shape[1], dense, bias, gate)
        )
        name = str(dtype).removeprefix("torch.")
        suffix = f"{restored_from(matrix, dtype)}{rounding_explanation(matrix.inputs)}{_gate_explanation(gate)}"
        rounding = InputRounding(matrix.inputs, dtype, device)
        super().__init__(weight, rounding, f"Triton linear_dense, {name}{suffix}", tiles)
        self.nbytes = weight.weight.nbytes
        # If the columns are not a multiple of 16, elements are read one at a time.
        self._few = DENSE_ROWS if dtype in HALVES and self.columns % 16 == 0 else 0
        self.groups = self._few > 0 and not self.waits
        few = f"{self.kernel}; more than {DENSE_ROWS} rows by F.linear (tiles for {tiles.description})"
        self._explanation = few if self._few else f"{name} F.linear{suffix}"

    def __call__(self, x: Inputs, residual: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        x = self._rounding(x)
        if x.shape[0] and self._takes(x.shape[0]):
            return linear_dense(x.contiguous(), self.weight, self.tile(x.shape[0]), out=residual, residual=residual)
        return self._by_torch(x, self.weight.weight, residual)

    def _takes(self, rows: int) -> bool:
        return rows <= self._few

    def _tile_key(self, rows: int) -> tuple[str, str, LinearShape, int]:
        shape = LinearShape(rows, self.weight.rows, self.columns, self.columns, 16)
        return "linear_dense", "experts" if self.weight.experts else "half", shape, DENSE_BLOCK


class PackedLinear(KernelLinear):
    """Codes of 2 to 8 bits or small floats, multiplied by 16-bit inputs. They are not grouped if they reorder inputs.

    Args:
        weight: packed, on the device.
        matrix: its source.
        dtype: of inputs and outputs.
        tiles: of the device.
    """

    product = staticmethod(linear_codes.linear_codes)

    def __init__(self, weight: CodesWeight, matrix: Matrix, dtype: torch.dtype, tiles: Tiles) -> None:
        name = str(dtype).removeprefix("torch.")
        kind = {"sparse4": ", 2:4 sparse", "nested8": " in two planes"}.get(weight.form, "")
        suffix = f"{rounding_explanation(matrix.inputs)}{_gate_explanation(weight.gate)}"
        kernel = f"Triton linear_codes, {matrix.format} weights{kind}, {name} inputs{suffix}"
        super().__init__(weight, InputRounding(matrix.inputs, dtype, weight.codes.device), kernel, tiles)
        many = f"; from {tiles.restore_rows} rows on restored, then F.linear" if tiles.restore_rows else ""
        self._explanation = f"{kernel}{many} (tiles for {tiles.description})"
        self._dtype = dtype
        self.groups = matrix.order is None and not self.waits
        self._order = None if matrix.order is None else matrix.order.to(weight.codes.device)

    def __call__(self, x: Inputs, residual: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        if not x.shape[0]:
            return x.new_empty(0, self.weight.outputs)
        if self._order is not None:
            x = x.index_select(1, self._order)
        x = self._rounding(x).contiguous()
        if not self._takes(x.shape[0]):
            return self._by_torch(x, restore_codes(self.weight, self._dtype), residual)
        return linear_codes.linear_codes(x, self.weight, self.tile(x.shape[0]), out=residual, residual=residual)

    def _takes(self, rows: int) -> bool:
        return not self._tiles.restore_rows or rows < self._tiles.restore_rows

    def _tile_key(self, rows: int) -> tuple[str, str, LinearShape, int]:
        form, weight = FORMATS[self.weight.form], self.weight
        group = weight.group if weight.kind != "none" else weight.columns
        return "linear_codes", form.name, LinearShape(rows, weight.rows, weight.columns, group, form.bits), form.block

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


class BytesLinear(KernelLinear):
    """8-bit weights by inputs that are already rounded to 8 bits.

    Args:
        weight: packed, on the device.
        matrix: its source.
        tiles: of the device.
    """

    product = staticmethod(linear_bytes.linear_bytes)

    def __init__(self, weight: BytesWeight, matrix: Matrix, tiles: Tiles) -> None:
        each = "128 of them" if weight.block_scales is not None else "token"
        inputs = f"{NAMES[weight.codes.dtype]} inputs by {each}{_gate_explanation(weight.gate)}"
        kernel = f"Triton linear_bytes, {matrix.format} weights, {inputs}"
        super().__init__(weight, InputRounding(None, torch.float32, weight.codes.device), kernel, tiles)

    def __call__(self, x: Inputs, residual: Tensor | None = None) -> Tensor:
        if isinstance(x, Rounded):
            rows = x.codes.shape[0]
            return linear_bytes.multiply(x.codes, x.scales, self.weight, self.tile(rows), x.dtype, residual)
        rows = x.shape[0]
        if not rows:
            return x.new_empty(0, self.weight.outputs)
        return linear_bytes.linear_bytes(x.contiguous(), self.weight, self.tile(rows), out=residual, residual=residual)

    def wants(self, rows: int) -> tuple[torch.dtype, bool] | None:
        """Its dtype, for any number of rows."""
        return self.weight.codes.dtype, self.weight.block_scales is not None

    def _tile_key(self, rows: int) -> tuple[str, str, LinearShape, int]:
        weight = self.weight
        group = CHUNK if weight.block_scales is not None else weight.columns
        return (
            "linear_bytes",
            NAMES[weight.codes.dtype],
            LinearShape(rows, weight.rows, weight.columns, group, 8),
            CHUNK,
        )


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
