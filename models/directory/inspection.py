"""What a checkpoint is made of: how many bits each kind of tensor takes."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...system.errors import SmeltError
from ...system.hardware.machine import human_bytes
from ...system.storage.new_directory import RECORD
from ..checkpoint.stored_shapes import METHODS, PARTS, WORDS
from ..checkpoint.weights import CheckpointWeights
from .agreement import numberless
from .directory import ModelDirectory
from .find import find_checkpoint


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that play the same part in every block.

    Attributes:
        name: the name with block numbers as ``*``.
        count: how many weights it holds.
        scheme: how they are stored: compressed-tensors' format, or a plain dtype.
        numel: elements, as unquantized tensors would have.
        bytes: on disk, scales included.
    """

    name: str
    count: int
    scheme: str
    numel: int
    bytes: int

    @property
    def bits(self) -> float:
        return 8 * self.bytes / self.numel if self.numel else 0.0


@dataclass(frozen=True)
class Inspection:
    """A checkpoint's contents.

    Attributes:
        path: the directory.
        groups: largest first.
        bytes: of all tensors.
        original_bytes: of the model it was made from; an estimate if ``original_is_estimate``.
    """

    path: str
    groups: list[TensorGroup]
    bytes: int
    original_bytes: int
    original_is_estimate: bool

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        groups = [{**asdict(group), "bits_per_weight": group.bits} for group in self.groups]
        ratio = self.original_bytes / self.bytes if self.bytes else 0.0
        return {**asdict(self), "groups": groups, "ratio": ratio}


def inspect(checkpoint: str | Path) -> Inspection:
    """Look into a checkpoint: a directory, a hub name or a builtin. Reads headers only."""
    directory = find_checkpoint(str(checkpoint))
    config = directory.config_data()
    directory.check_generation()
    weights = CheckpointWeights(directory.path)
    quantization = config.get("quantization_config") or {}
    _check(directory, config, weights)
    scheme = _scheme_label(quantization)
    gathered: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
    of_module: dict[str, list[str]] = defaultdict(list)
    for tensor in weights.names():
        of_module[tensor.rpartition(".")[0]].append(tensor)
    dense_names = [n for n in weights.names() if n.rpartition(".")[2] not in (*PARTS, *WORDS)]
    packed = {n.removesuffix("weight_scale") for n in weights.names() if n.endswith(".weight_scale")}
    for prefix in sorted(packed):
        beside = of_module[prefix.removesuffix(".")]
        parts = [n for n in beside if n.startswith(prefix + "weight")]
        inputs = [n for n in beside if n.startswith(prefix + "input_")]
        size = sum(weights.info(n).nbytes for n in (*parts, *inputs))
        label = _label_of(prefix.removesuffix("."), quantization) or scheme
        gathered[numberless(prefix + "weight"), label].append([_numel(weights, prefix, parts), size])
    for prefix in sorted(n.removesuffix("qweight") for n in weights.names() if n.endswith(".qweight")):
        parts = [prefix + part for part in WORDS if weights.has(prefix + part)]
        size = sum(weights.info(n).nbytes for n in parts)
        gathered[numberless(prefix + "weight"), scheme].append([_numel_of_words(weights, prefix, parts), size])
    for tensor in dense_names:
        if tensor.removesuffix("weight") in packed or (
            tensor.rpartition(".")[0] + "." in packed and ".input_" in tensor
        ):
            continue
        info = weights.info(tensor)
        label = str(info.dtype).removeprefix("torch.")
        gathered[numberless(tensor), label].append([info.nbytes // info.dtype.itemsize, info.nbytes])
    groups = [
        TensorGroup(pattern, len(sizes), label, sum(n for n, _ in sizes), sum(b for _, b in sizes))
        for (pattern, label), sizes in gathered.items()
    ]
    groups.sort(key=lambda g: -g.bytes)
    original, estimated = _original_bytes(directory, groups, scheme)
    return Inspection(str(directory.path), groups, weights.nbytes, original, estimated)


def _check(directory: ModelDirectory, config: dict[str, Any], weights: CheckpointWeights) -> None:
    """Check that tensors and configuration agree, where transformers and Smelt know both."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    method = (config.get("quantization_config") or {}).get("quant_method", "compressed-tensors")
    names = config.get("architectures") or []
    known = set(names) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if config["model_type"] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and known and method in METHODS:
        directory.check_weights(directory.config(), weights)


def terminal(found: Inspection) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=found.path)
    for title, side in (
        ("tensors", "left"),
        ("count", "right"),
        ("stored as", "left"),
        ("bits/weight", "right"),
        ("bytes", "right"),
    ):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    for group in found.groups:
        table.add_row(group.name, str(group.count), group.scheme, f"{group.bits:.2f}", human_bytes(group.bytes))
    numel = sum(group.numel for group in found.groups)
    table.add_section()
    table.add_row(
        "total",
        str(sum(g.count for g in found.groups)),
        "",
        f"{8 * found.bytes / max(numel, 1):.2f}",
        human_bytes(found.bytes),
    )
    console = Console()
    console.print(table)
    about = "about " if found.original_is_estimate else ""
    console.print(
        f"{found.original_bytes / max(found.bytes, 1):.2f}x smaller than the original ({about}{human_bytes(found.original_bytes)})"
    )


def _numel(weights: CheckpointWeights, prefix: str, parts: list[str]) -> int:
    if prefix + "weight_shape" in parts:
        rows, columns = weights.load(prefix + "weight_shape").tolist()
        return int(rows * columns)
    stored = weights.info(prefix + ("weight_packed" if prefix + "weight_packed" in parts else "weight"))
    per_element = 2 if prefix + "weight_packed" in parts else 1  # fp4 keeps two numbers a byte
    return stored.nbytes // stored.dtype.itemsize * per_element


def _numel_of_words(weights: CheckpointWeights, prefix: str, parts: list[str]) -> int:
    rows = weights.info(prefix + "scales").shape[1]
    words = weights.info(prefix + "qweight").shape
    if words[1] == rows:  # GPTQ packs columns, of which g_idx has one number each
        return rows * (weights.info(prefix + "g_idx").shape[0] if prefix + "g_idx" in parts else words[0] * 8)
    return rows * words[0]


def _scheme_label(quantization: dict[str, Any]) -> str:
    if not quantization:
        return ""
    groups = quantization.get("config_groups") or {}
    first = _group(next(iter(groups.values()), {}))
    if not first.get("weights"):
        method, bits, size = (quantization.get(key) for key in ("quant_method", "bits", "group_size"))
        return f"{method} W{bits}A16 {'channel' if size == -1 else f'g{size}'}" if bits else str(method or "quantized")
    return _group_label(first)


def _label_of(name: str, quantization: dict[str, Any]) -> str | None:
    """How a module is stored by the group that names it, or else by that of all linears; None without one."""
    usual = None
    for group in (quantization.get("config_groups") or {}).values():
        group = _group(group)
        for target in group.get("targets") or ():
            if target == name or (target.startswith("re:") and re.match(target[3:], name)):
                return _group_label(group)
            if target == "Linear":
                usual = _group_label(group)
    return usual


def _group(given: dict[str, Any] | list[str]) -> dict[str, Any]:
    """A group of ``config_groups``; a list is a scheme's targets, and the scheme is not written out."""
    return given if isinstance(given, dict) else {"targets": given}


def _group_label(group: dict[str, Any]) -> str:
    args = group.get("weights") or {}
    size = args.get("group_size")
    grain = f"g{size}" if size and size > 0 else str(args.get("strategy"))
    inputs = group.get("input_activations")
    acts = f"A{inputs['num_bits']}" if inputs else "A16"
    zeros = "" if args.get("symmetric", True) else " asymmetric"
    return f"{args.get('type')} W{args.get('num_bits')}{acts} {grain}{zeros}"


def _original_bytes(directory: ModelDirectory, groups: list[TensorGroup], scheme: str) -> tuple[int, bool]:
    made = directory.record()
    if "model" in made:  # an export of another's checkpoint does not know
        try:
            return int(made["model"]["bytes"]), False
        except (ValueError, KeyError, TypeError):
            raise SmeltError(
                f"{directory.path / RECORD}: cannot be understood; the checkpoint was changed after it was made"
            ) from None
    quantized = [g for g in groups if scheme and g.scheme == scheme]
    rest = sum(g.bytes for g in groups) - sum(g.bytes for g in quantized)
    return rest + 2 * sum(g.numel for g in quantized), bool(quantized)
