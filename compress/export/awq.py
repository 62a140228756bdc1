"""Export to AWQ; :mod:`smelt.quant.stored.awq` has the layout."""

from __future__ import annotations

from typing import Any

import torch

from ...models.checkpoint.writer import Entry
from ...quant.stored import awq
from ...system.errors import Problem
from ...system.storage.tensor_files import TensorInfo
from .dynamic import patterns
from .source import Source, StoredLinear, for_each, in_block, scale_problems

_GROUPS = (-1, 32, 64, 128)


def awq_problems(source: Source) -> list[Problem]:
    """What in a checkpoint AWQ does not support."""
    found = [
        (linear.name, sentence) for linear in source.linears.values() if (sentence := _why_not(linear)) is not None
    ]
    problems = for_each(found) + scale_problems(source)
    sizes = sorted({linear.group for linear in source.linears.values()})
    if not problems and len(sizes) > 1:
        shown = " and ".join("one per row" if size == -1 else str(size) for size in sizes)
        problems.append(
            Problem("group_size", f"layers have groups of {shown}, but AWQ has one size for all layers; use --to gptq")
        )
    return problems


def awq_entries(source: Source, linear: StoredLinear) -> list[Entry]:
    """The tensors that store one linear."""
    groups = 1 if linear.group == -1 else linear.columns // linear.group
    infos = {
        "qweight": TensorInfo(torch.int32, (linear.columns, linear.rows // 8)),
        "qzeros": TensorInfo(torch.int32, (groups, linear.rows // 8)),
        "scales": TensorInfo(torch.float16, (groups, linear.rows)),
    }
    return [
        (f"{linear.name}.{part}", info, lambda part=part: awq.pack(source.codes(linear.name), part))
        for part, info in infos.items()
    ]


def awq_config(source: Source) -> dict[str, Any]:
    """The ``quantization_config`` of config.json."""
    (group,) = {linear.group for linear in source.linears.values()}
    plain = source.plain_matrices()
    kinds = dict.fromkeys(source.linears, "") | dict.fromkeys(filter(in_block, plain), "plain")
    config: dict[str, Any] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": plain or None,
    }
    if "plain" in kinds.values():  # GPTQModel does not look at the field above
        config["dynamic"] = {f"-:{pattern}": {} for pattern, _ in patterns(kinds)}
    return config


def _why_not(linear: StoredLinear) -> str | None:
    if linear.rounds_inputs or not linear.coded:
        inputs = " with quantized activations" if linear.rounds_inputs else ""
        return f"is stored as {linear.label}{inputs}, but AWQ supports only 4-bit codes with 16-bit activations; use --to dense"
    if linear.bits != 4:
        return f"has codes of {linear.bits} bits, but AWQ has only 4; use --to gptq"
    if linear.group not in _GROUPS:
        sizes = ", ".join(map(str, _GROUPS[1:]))
        return f"has groups of {linear.group} columns, but AWQ kernels support {sizes} or one per row; use --to gptq"
    if linear.reordered:
        return "has its columns in activation order, which AWQ does not support; use --to gptq"
    if linear.high_zero:
        return "has a zero-point above the highest code, which AWQ cannot store; use --to gptq"
    if linear.rows % 8:
        return f"has {linear.rows} rows, but AWQ packs them by eight; use --to dense"
    if not in_block(linear.name):
        return "is quantized, but AWQ loaders support quantized layers only in blocks; use --to gptq, or quantize again with it in ignore"
    return None
