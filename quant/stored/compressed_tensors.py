"""compressed-tensors' layouts, which that library writes and restores; codes are also read as they are, for kernels."""

from __future__ import annotations

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from ..grid import Grid
from ..scheme import Scheme
from .codes import Codes

PARTS = (
    "weight_packed",
    "weight",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_global_scale",
    "weight_g_idx",
)


def pack(values: Tensor, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
    """The tensors that store a weight on a grid, by local name."""
    state: dict[str, Tensor | None] = {"weight": values, "weight_scale": grid.scale}
    if grid.global_scale is not None:
        state["weight_global_scale"] = grid.global_scale
    if grid.zero is not None:
        state["weight_zero_point"] = grid.zero.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    packed = compressor.compress(state, scheme.config_group(["Linear"]))
    return {name: tensor.contiguous() for name, tensor in packed.items() if tensor is not None}


def join_rows(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The stored tensors of a weight, joined from those of consecutive parts of its rows.

    Args:
        parts: as :func:`pack` gives them, each of a multiple of 128 rows except the last.
    """
    joined: dict[str, Tensor] = {}
    for name, first in parts[0].items():
        each = [part[name] for part in parts]
        if name == "weight_global_scale":
            joined[name] = first
        elif name == "weight_shape":
            joined[name] = torch.stack([torch.stack(each)[:, 0].sum(), first[1]]).to(first.dtype)
        else:
            joined[name] = torch.cat(each)
    return joined


def restore(stored: dict[str, Tensor], scheme: Scheme) -> Tensor:
    """The dense weight that compressed-tensors restores from stored tensors (and transformers computes with)."""
    weights = {name: tensor for name, tensor in stored.items() if name.startswith("weight")}
    return restored_as(weights, scheme.config_group(["Linear"]), scheme.format)


def restored_as(stored: dict[str, Tensor], group: QuantizationScheme, form: str) -> Tensor:
    """The dense weight of stored tensors that a group of ``quantization_config`` describes.

    Args:
        stored: tensors by :data:`PARTS`.
        group: the group.
        form: the name of its layout.
    """
    weight = BaseCompressor.get_value_from_registry(form).decompress(dict(stored), group)["weight"]
    assert weight is not None
    return weight


def unpack(stored: dict[str, Tensor], args: QuantizationArgs) -> Codes | None:
    """The integer codes that stored tensors, by :data:`PARTS`, hold; None for other numbers."""
    scale, zero, bits = stored["weight_scale"], stored.get("weight_zero_point"), args.num_bits
    if args.type == "int" and "weight_packed" in stored:
        rows, columns = stored["weight_shape"].tolist()
        codes = unpack_from_int32(stored["weight_packed"], bits, torch.Size((rows, columns)))
        if zero is not None and zero.dtype == torch.int32:
            zero = unpack_from_int32(zero, bits, torch.Size((rows, scale.shape[1])), packed_dim=0)
        places = stored.get("weight_g_idx")
        unset = places is None or int(places.min()) < 0
        return Codes(codes, bits, scale, zero, None if unset else places)
    if args.type == "int" and scale.dim() == 2 and stored["weight"].dtype == torch.int8:
        return Codes(stored["weight"], bits, scale, zero)
    return None
