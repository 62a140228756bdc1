"""Schemes: which numbers are stored. Names, fields and bytes are compressed-tensors' own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy, QuantizationType
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from .cache_types import BY_NAME
from .scheme_names import SCHEMES, STORED_AS, check

_NOT_FUSED = (CompressionFormat.int_quantized.value, CompressionFormat.nvfp4_pack_quantized.value)


@dataclass(frozen=True)
class Scheme:
    """A named scheme with its fields settled.

    Attributes:
        name: the preset's name, such as ``W4A16``.
        args: how weights are quantized (compressed-tensors' ``QuantizationArgs``).
        activations: how inputs are quantized at run time, or None.
        format: compressed-tensors' name of the layout on disk.
    """

    name: str
    args: QuantizationArgs
    activations: QuantizationArgs | None
    format: str

    @classmethod
    def of_group(cls, group: QuantizationScheme) -> Scheme:
        """The scheme that one ``config_groups`` entry of a checkpoint describes; it is named by its bits."""
        args, inputs = group.weights, group.input_activations
        assert args is not None
        name = f"W{args.num_bits}A{16 if inputs is None else inputs.num_bits}"
        layout = group.format or infer_module_format(torch.nn.Linear, group)
        return cls(name, args, inputs, CompressionFormat(layout).value)

    @property
    def label(self) -> str:
        """The name with the group size, which together identify a scheme."""
        size = self.args.group_size if self.args.strategy == "group" else None
        fixed = self.activations is not None and self.activations.dynamic is False and self.name != "FP8"
        inputs = (
            "" if not fixed else " static" if self.activations and self.activations.symmetric else " static asymmetric"
        )
        if self.name == "FP8" and self.activations is not None and self.activations.dynamic is True:
            inputs = " dynamic"  # those of this name are fixed otherwise
        return f"{self.name}{'' if size is None else f' g{size}'}{inputs}"

    @property
    def reads_inputs(self) -> bool:
        """Whether its inputs have a scale that is fixed beforehand, on a calibration text."""
        return self.activations is not None and self.activations.dynamic is not True

    def config_group(self, targets: list[str]) -> QuantizationScheme:
        """This scheme as one ``config_groups`` entry of a checkpoint's ``quantization_config``."""
        return QuantizationScheme(
            targets=targets,
            weights=self.args,
            input_activations=self.activations,
            format=CompressionFormat(self.format),
        )

    @property
    def experts_reload(self) -> bool:
        """Whether transformers, which fuses a mixture's experts as it loads them, restores those stored like this without Smelt's plug-in.

        Tested with 5.23: it has no conversion of int8 with rounded inputs, of blocks and of zero-points, and reads NVFP4 wrongly.
        """
        return self.args.symmetric and self.format not in _NOT_FUSED and self.args.strategy != "block"

    @property
    def accepts_group_size(self) -> bool:
        return self.name in SCHEMES and SCHEMES[self.name].group is not None

    def shape_problem(self, rows: int, columns: int) -> str | None:
        """Say why a weight of this shape cannot carry the scheme, or None if it can."""
        if self.args.strategy in ("group", "tensor_group"):
            size = self.args.group_size or 0
            if columns % size:
                wider = [g for g in (128, 64, 32, 16) if columns % g == 0]
                if not self.accepts_group_size:
                    return f"its {columns} input columns are not divisible by {self.name}'s fixed group of {size}"
                hint = f"use group_size: {wider[0]}" if wider else "use group_size: -1 (one scale per output channel)"
                return f"its {columns} input columns are not divisible by group_size {size}; {hint}"
        if self.args.strategy == "block":
            _, width = self.args.block_structure or (1, 1)
            if columns % width:
                return f"its {columns} input columns are not divisible by {self.name}'s block width of {width}"
        if self.activations is not None and self.activations.strategy == "group":
            width = self.activations.group_size or 1
            if columns % width:
                return f"its {columns} input columns are not divisible by {self.name}'s activation group of {width}"
        return None

    def stored_bytes(self, rows: int, columns: int, scale_bytes: int = 2) -> int:
        """Bytes that a weight of this shape takes on disk, scales included."""
        return self._weight_bytes(rows, columns, scale_bytes) + self._input_bytes(scale_bytes)

    def _input_bytes(self, scale_bytes: int) -> int:
        inputs = self.activations
        if inputs is None or inputs.dynamic is True:
            return 0
        return 4 if inputs.strategy == "tensor_group" else scale_bytes + (0 if inputs.symmetric else 1)

    def _weight_bytes(self, rows: int, columns: int, scale_bytes: int) -> int:
        bits = self.args.num_bits
        if self.format == "pack-quantized":
            zeros = 0 if self.args.symmetric else math.ceil(rows * bits / 32) * 4 * self._groups(columns)
            return rows * math.ceil(columns * bits / 32) * 4 + rows * self._groups(columns) * scale_bytes + zeros + 16
        body = rows * columns * bits // 8
        if self.args.strategy == "block":
            height, width = self.args.block_structure or (1, 1)
            return body + math.ceil(rows / height) * math.ceil(columns / width) * scale_bytes
        if self.args.type == "float" and bits == 4:
            return body + rows * self._groups(columns) + (4 if self.args.strategy == "tensor_group" else 0)
        return body + rows * scale_bytes

    def _groups(self, columns: int) -> int:
        return columns // self.args.group_size if self.args.group_size else 1


def resolve(name: str, group_size: int | None = None, inputs: str | None = None) -> Scheme:
    """Build the scheme called ``name``, with ``group_size`` in place of the preset's own.

    Args:
        name: one of :data:`.scheme_names.SCHEMES`.
        group_size: columns that share a scale; -1 for one scale per output channel; None keeps the preset's.
        inputs: ``dynamic``, ``static`` or ``static_asymmetric`` scales of 8-bit inputs; None keeps the preset's.

    Raises:
        ValueError: the name is not supported, or the scheme has no such choice.
    """
    check(name, group_size, inputs)
    preset = preset_name_to_scheme(STORED_AS.get(name.upper(), name.upper()), ["Linear"])
    args, activations = preset.weights, preset.input_activations
    assert args is not None
    if args.strategy == "tensor":
        # FP8's preset has one scale per weight; one per output is never worse, and loaders read both.
        args = preset.weights = args.model_copy(update={"strategy": QuantizationStrategy.CHANNEL})
    if group_size is not None:
        args = QuantizationArgs(
            num_bits=args.num_bits,
            type=args.type,
            symmetric=args.symmetric,
            strategy=QuantizationStrategy.CHANNEL if group_size == -1 else QuantizationStrategy.GROUP,
            group_size=None if group_size == -1 else group_size,
        )
    preset.weights = args
    if inputs is not None:
        activations = preset.input_activations = _input_args(activations, inputs)
    # Left to itself, compressed-tensors stores 4-bit weights with rounded inputs as int8.
    packed = args.type == "int" and args.num_bits < 8
    layout = CompressionFormat.pack_quantized if packed else infer_module_format(torch.nn.Linear, preset)
    return Scheme(name.upper(), args, activations, layout.value)


def cache_args(dtype: str, scales: str | None, head_width: int) -> QuantizationArgs:
    """How keys and values are cached, as compressed-tensors' ``kv_cache_scheme``.

    Args:
        dtype: one of :data:`.cache_types.CHOICES`.
        scales: ``tensor``, ``head`` or ``token``; None for what suits the dtype.
        head_width: channels of a head.
    """
    kept = BY_NAME[dtype]
    scales = scales or kept.scales
    strategies = {
        "tensor": QuantizationStrategy.TENSOR,
        "head": QuantizationStrategy.ATTN_HEAD,
        "token": QuantizationStrategy.GROUP,  # groups of a head's width: one scale for each token and head
    }
    return QuantizationArgs(
        num_bits=kept.bits,
        type=QuantizationType(kept.type),
        symmetric=True,
        strategy=strategies[scales],
        group_size=head_width if scales == "token" else None,
        dynamic=scales == "token",
    )


def _input_args(preset: QuantizationArgs | None, inputs: str) -> QuantizationArgs:
    assert preset is not None
    dynamic = inputs == "dynamic"
    return QuantizationArgs(
        num_bits=8,
        type=preset.type,
        symmetric=inputs != "static_asymmetric",
        strategy=QuantizationStrategy.TOKEN if dynamic else QuantizationStrategy.TENSOR,
        dynamic=dynamic,
    )
