"""The quantization grid of one weight: its scales, and rounding to the values on it.

Every scheme is represented as steps ``[rows, groups]`` over groups of neighbouring columns, so a rounding
method need not distinguish integers from floats or groups from blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

_E2M1_MAX, _E2M1_MANTISSA, _E2M1_LEAST = 6.0, 1, 1.0
_E4M3_MAX, _E4M3_MANTISSA, _E4M3_LEAST = 448.0, 3, 2.0**-6
_EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True)
class Grid:
    """The scales of one weight and rounding with them.

    Attributes:
        args: compressed-tensors' description of the number format.
        scale: the scales exactly as stored (already rounded to the stored dtype).
        step: distance between adjacent codes, float32 ``[rows, groups]``.
        zero: code that stands for 0.0, float32 ``[rows, groups]``, or None when symmetric.
        width: columns that share a step.
        global_scale: NVFP4's one float32 per tensor, else None.
    """

    args: QuantizationArgs
    scale: Tensor
    step: Tensor
    zero: Tensor | None
    width: int
    global_scale: Tensor | None = None

    @classmethod
    def fit(
        cls,
        weight: Tensor,
        args: QuantizationArgs,
        stored: torch.dtype | None = None,
        shared: Tensor | None = None,
    ) -> Grid:
        """Scales from each group's extremes, as compressed-tensors' own observer computes them.

        Args:
            weight: ``[rows, columns]``.
            args: the number format.
            stored: the dtype that scales are stored in, by default that of ``weight``; rounding uses the stored values.
            shared: NVFP4's global scale, if the weight shares it with others.
        """
        low, high, width = extremes(weight.float(), args)
        global_scale = shared_scale([weight], args) if shared is None else shared
        return cls.between(low, high, args, stored or weight.dtype, weight.shape, width, global_scale)

    @classmethod
    def between(
        cls,
        low: Tensor,
        high: Tensor,
        args: QuantizationArgs,
        stored: torch.dtype,
        shape: torch.Size,
        width: int,
        global_scale: Tensor | None = None,
    ) -> Grid:
        """A grid whose groups range from ``low`` to ``high``; scales are stored as ``stored`` unless the format fixes their dtype."""
        scale, zero = calculate_qparams(low, high, args, global_scale=global_scale)
        if args.scale_dtype is None:
            scale = scale.to(stored)
            # A group of tiny weights can have a scale below the stored dtype's smallest value.
            scale = torch.where(scale == 0, torch.finfo(stored).tiny, scale)
        return cls.of_scale(args, scale, None if args.symmetric else zero, shape, width, global_scale)

    @classmethod
    def of_scale(
        cls,
        args: QuantizationArgs,
        scale: Tensor,
        zero: Tensor | None,
        shape: torch.Size,
        width: int,
        global_scale: Tensor | None = None,
    ) -> Grid:
        """A grid with given scales; ``shape`` is the weight's."""
        step = scale.float()
        if args.strategy == "block":
            assert args.block_structure is not None
            step = step.repeat_interleave(args.block_structure[0], dim=0)[: shape[0]]
        if global_scale is not None:
            step = step / global_scale
        return cls(args, scale, step, None if zero is None else zero.float(), width, global_scale)

    def columns(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Step and zero of columns ``start`` to ``stop``, expanded to ``[rows, stop - start]``."""
        group = torch.arange(start, stop) // self.width
        return self.step[:, group], None if self.zero is None else self.zero[:, group]

    def round(self, weight: Tensor) -> Tensor:
        """The nearest value on the grid to each element of a float32 weight ``[rows, columns]``."""
        rows, columns = weight.shape
        grouped = torch.nn.functional.pad(weight, (0, -columns % self.width)).view(rows, -1, self.width)
        zero = None if self.zero is None else self.zero.unsqueeze(-1)
        return round_to(grouped, self.step.unsqueeze(-1), zero, self.args).reshape(rows, -1)[:, :columns]


def round_to(weight: Tensor, step: Tensor, zero: Tensor | None, args: QuantizationArgs) -> Tensor:
    """Nearest representable value to ``weight`` given broadcastable steps and zeros (float32)."""
    codes = weight / step
    if zero is not None:
        codes = codes + zero
    codes = round_codes(codes, args)
    return (codes if zero is None else codes - zero) * step


def round_codes(codes: Tensor, args: QuantizationArgs) -> Tensor:
    """Round real-valued codes to those of the number format, half to even, as in compressed-tensors."""
    if args.type == "int":
        half = 2 ** (args.num_bits - 1)
        return codes.round().clamp_(-half, half - 1)
    if args.num_bits == 8:
        return codes.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(codes.dtype)
    # Halves of the local spacing go to the even multiple of it, which is the even code.
    local = spacing(codes, args)
    return (codes / local).round_().mul_(local).clamp_(-_E2M1_MAX, _E2M1_MAX)


def largest_code(args: QuantizationArgs) -> float:
    """The largest code of a number format."""
    if args.type == "int":
        return 2 ** (args.num_bits - 1) - 1
    return _E4M3_MAX if args.num_bits == 8 else _E2M1_MAX


def spacing(codes: Tensor, args: QuantizationArgs) -> Tensor:
    """Distance between the float codes around each of ``codes`` (float32): that of its power of two."""
    mantissa, least = (_E4M3_MANTISSA, _E4M3_LEAST) if args.num_bits == 8 else (_E2M1_MANTISSA, _E2M1_LEAST)
    power = (codes.contiguous().view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return power.clamp_min_(least).mul_(2.0**-mantissa)


def shared_scale(weights: Sequence[Tensor], args: QuantizationArgs) -> Tensor | None:
    """NVFP4's global scale for weights that servers fuse and that must share it; None for other formats."""
    if args.strategy != "tensor_group":
        return None
    low = torch.stack([weight.amin() for weight in weights]).amin().float()
    high = torch.stack([weight.amax() for weight in weights]).amax().float()
    return generate_gparam(low, high)


def extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor, int]:
    """Smallest and largest element of each group of a float32 weight, and how many columns a group has."""
    rows, columns = weight.shape
    if args.strategy == "block":
        assert args.block_structure is not None
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
        return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3)), width
    if args.strategy in ("group", "tensor_group"):
        assert args.group_size is not None
        groups = weight.view(rows, columns // args.group_size, args.group_size)
        return groups.amin(dim=-1), groups.amax(dim=-1), args.group_size
    return weight.amin(dim=-1, keepdim=True), weight.amax(dim=-1, keepdim=True), columns
