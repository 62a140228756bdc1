"""Export to GPTQ; :mod:`smelt.quant.stored.gptq` has the layout."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch

from ...models.checkpoint.writer import Entry
from ...quant.stored import gptq
from ...system.errors import Problem
from ...system.storage.tensor_files import TensorInfo
from ...system.versions import versions
from .dynamic import any_number, patterns
from .source import Source, StoredLinear, for_each, in_block, scale_problems

_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)


def gptq_problems(source: Source, version: int) -> list[Problem]:
    """What in a checkpoint GPTQ does not support."""
    found = [
        (linear.name, sentence)
        for linear in source.linears.values()
        if (sentence := _why_not(linear, version)) is not None
    ]
    return for_each(found) + scale_problems(source)


def gptq_entries(source: Source, linear: StoredLinear, version: int) -> list[Entry]:
    """The tensors that store one linear."""
    groups = 1 if linear.group == -1 else linear.columns // linear.group
    words = linear.bits * linear.columns // 32, linear.bits * linear.rows // 32
    infos = {
        "qweight": TensorInfo(torch.int32, (words[0], linear.rows)),
        "qzeros": TensorInfo(torch.int32, (groups, words[1])),
        "scales": TensorInfo(torch.float16, (groups, linear.rows)),
        "g_idx": TensorInfo(torch.int32, (linear.columns,)),
    }
    return [
        (f"{linear.name}.{part}", info, lambda part=part: gptq.pack(source.codes(linear.name), part, version))
        for part, info in infos.items()
    ]


def gptq_config(source: Source, version: int) -> dict[str, Any]:
    """``quantize_config.json``, also the ``quantization_config`` of config.json.

    Layers that differ from most, or are unquantized, are listed in GPTQModel's ``dynamic``, which vLLM reads too.
    """
    settings = {name: _settings(linear) for name, linear in source.linears.items()}
    usual = Counter(tuple(each.items()) for each in settings.values()).most_common(1)[0][0]
    plain = [name for name in source.plain_matrices() if in_block(name)]
    kinds = {
        name: "" if tuple(each.items()) == usual else repr(each) for name, each in settings.items() if in_block(name)
    }
    kinds |= dict.fromkeys(plain, "plain")
    dynamic = {
        f"+:{pattern}": settings[example] for pattern, example in patterns(kinds) if kinds[example] not in ("", "plain")
    } | {f"-:{pattern}": {} for pattern, example in patterns(kinds) if kinds[example] == "plain"}
    config: dict[str, Any] = {
        **dict(usual),
        "lm_head": "lm_head" in source.linears,
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"smelt:{versions()['smelt']}"]},
    }
    if dynamic:
        config["dynamic"] = dynamic
    inside = _alike_in_all_blocks(source, plain)
    if inside is not None:
        config["modules_in_block_to_quantize"] = [inside]
    return config


def gptq_notes(source: Source, version: int) -> list[str]:
    """Notes for the user on how other programs load it."""
    settings = {tuple(_settings(linear).items()) for linear in source.linears.values()}
    plain = [name for name in source.plain_matrices() if in_block(name)]
    notes = []
    if len(settings) > 1 or (plain and _alike_in_all_blocks(source, plain) is None):
        notes.append("layers differ, which the field `dynamic` says; GPTQModel and vLLM read it, transformers does not")
    if version == 1 and not all(linear.symmetric for linear in source.linears.values()):
        notes.append("GPTQModel loads zero-points of its own version 1 only; for that program use --to gptq-v2")
    return notes


def _why_not(linear: StoredLinear, version: int) -> str | None:
    if linear.rounds_inputs or not linear.coded:
        inputs = " with quantized activations" if linear.rounds_inputs else ""
        return f"is stored as {linear.label}{inputs}, but GPTQ supports only integer codes with 16-bit activations; use --to dense"
    if linear.bits not in gptq.BITS:
        return f"has codes of {linear.bits} bits, but GPTQ has 2, 3, 4 and 8; use --to dense"
    if linear.group not in _GROUPS:
        sizes = ", ".join(map(str, _GROUPS[1:]))
        return f"has groups of {linear.group} columns, but GPTQ loaders support {sizes} or one per row; quantize again"
    if linear.columns * linear.bits % 32 or linear.rows * linear.bits % 32:
        return (
            f"is {linear.rows} x {linear.columns}, which does not fill whole words of 32 bits in GPTQ; use --to dense"
        )
    if version == 2 and linear.high_zero:
        return "has a zero-point above the highest code, which version 2 cannot store; use --to gptq"
    if version == 1 and linear.lowest_zero:
        return "has a zero-point at the lowest code, which version 1 cannot store, as it stores zero-points minus one; use --to gptq-v2"
    if not in_block(linear.name) and linear.name != "lm_head":
        return "is quantized, but GPTQ supports quantized layers only in blocks and as lm_head; quantize again with it in ignore"
    return None


def _settings(linear: StoredLinear) -> dict[str, Any]:
    return {"bits": linear.bits, "group_size": linear.group, "desc_act": linear.reordered, "sym": linear.symmetric}


def _alike_in_all_blocks(source: Source, plain: list[str]) -> list[str] | None:
    """Linears that transformers must be given if not all of a block is quantized; None if unneeded or inexpressible."""
    if not plain or any(re.search(r"\.experts\.", name) for name in source.linears):
        return None
    quantized = {any_number(name) for name in source.linears if in_block(name)}
    if quantized & {any_number(name) for name in plain}:
        return None
    inside = (re.sub(r"^.*?\.\d+\.", "", name) for name in source.linears if in_block(name))
    return list(dict.fromkeys(inside))
