"""The grid of one weight: its scales, and rounding onto the values that they allow.

Every scheme is seen as steps ``[rows, groups]`` over groups of neighbouring columns, so a rounding
method needs to know neither integers from floats nor groups from blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Grid:
    """Scales of one weight and the arithmetic that they define.

    Attributes:
        args: compressed-tensors' description of the numbers.
        scale: the scales exactly as they will be stored (values already rounded to the stored type).
        step: distance between neighbouring codes, float32 ``[rows, groups]``.
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
    def fit(cls, weight: Tensor, args: QuantizationArgs, stored: torch.dtype | None = None) -> Grid:
        """Scales from each group's extremes, as compressed-tensors' own observer computes them.

        Args:
            weight: ``[rows, columns]``.
            args: the number format.
            stored: the dtype that scales are stored in, ``weight``'s own by default; rounding uses the stored values.
        """
        stored = stored or weight.dtype
        low, high, width = _extremes(weight.float(), args)
        global_scale = None
        if args.strategy == "tensor_group":
            global_scale = generate_gparam(low.amin(), high.amax())
        scale, zero = calculate_qparams(low, high, args, global_scale=global_scale)
        if args.scale_dtype is None:
            scale = scale.to(stored)
            # A group of tiny weights can have a scale below the stored type's smallest number.
            scale = torch.where(scale == 0, torch.finfo(stored).tiny, scale)
        return cls.of_scale(args, scale, None if args.symmetric else zero, weight.shape, width, global_scale)

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
        """A grid of given scales; ``shape`` is the weight's."""
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
    """Round real-valued codes to those the number format has; halves go to even, as in compressed-tensors."""
    if args.type == "int":
        half = 2 ** (args.num_bits - 1)
        return codes.round().clamp_(-half, half - 1)
    if args.num_bits == 8:
        return codes.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(codes.dtype)
    magnitude = codes.abs()
    values = torch.tensor(_E2M1, dtype=codes.dtype)
    # Ties go to the even code: at limits 1, 3 and 5 that is the upper neighbour.
    index = torch.zeros_like(magnitude, dtype=torch.int64)
    for place, limit in enumerate(_E2M1_LIMITS):
        index += magnitude >= limit if place % 2 else magnitude > limit
    return values[index] * codes.sign()


def _extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor, int]:
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
