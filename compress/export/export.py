"""``smelt export``: a checked, complete directory (or file), or one sentence for each reason it cannot be made."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...models.checkpoint.writer import Entry, write_checkpoint
from ...models.directory.directory import ModelDirectory
from ...models.directory.find import find_checkpoint
from ...models.directory.layer_sizes import LAYER_SIZES
from ...quant.stored.dense_weights import CACHE_SCALES
from ...system.errors import SmeltError, nearest_name, raise_problems
from ...system.hardware.machine import human_bytes
from ...system.progress import Progress
from ...system.storage.files import write_text
from ...system.storage.new_directory import RECORD, appearing, check_output
from ...system.storage.paths import named_path
from .dense import dense_entries
from .formats import TARGETS, ExportResult, ExportTarget, FileTarget
from .source import Source


@dataclass(frozen=True)
class Exported:
    """A model directory that was written.

    Attributes:
        path: the directory.
        format: the name given to ``--to``.
        layers: number of quantized linears.
        bytes: of its tensors.
        notes: notes for the user, one sentence each.
    """

    path: str
    format: str
    layers: int
    bytes: int
    notes: list[str]

    def as_data(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """As text for the terminal."""
        size = f"{self.layers} quantized layers, {human_bytes(self.bytes)}"
        return "\n".join([f"{self.path}: {self.format}, {size}", *(f"note: {note}" for note in self.notes)])


def export(
    checkpoint: str | Path,
    to: str,
    output: str | Path,
    *,
    type: str | None = None,
    fresh: bool = False,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> ExportResult:
    """Convert a quantized checkpoint to another format, keeping its codes bit for bit.

    Args:
        checkpoint: a directory, a run's output directory or a hub name.
        to: a name of :data:`TARGETS`.
        output: the new directory, or file.
        type: of weights, for formats with types.
        fresh: overwrite an earlier export.
        trust_remote_code: run Python code that comes with the checkpoint.
        progress: show progress bars when standard error is a terminal.

    Raises:
        SmeltError: the format cannot hold this checkpoint, or the output cannot be written; nothing was changed.
    """
    output = named_path(output)
    if to not in TARGETS:
        raise SmeltError(f"to: unknown format {to!r}; known: {', '.join(TARGETS)}{nearest_name(to, list(TARGETS))}")
    target = TARGETS[to]
    as_file = isinstance(target, FileTarget)
    if type is not None and not (as_file and target.typed):
        typed = " and ".join(name for name, each in TARGETS.items() if isinstance(each, FileTarget) and each.typed)
        raise SmeltError(f"type: only {typed} has types, and the format is {to}; remove it")
    source = find_checkpoint(str(checkpoint), trust_remote_code=trust_remote_code)
    check_output(output, source.path, "export", fresh=fresh, made_file=target.written_by_smelt if as_file else None)
    if not target.uneven and LAYER_SIZES in source.config_data():
        raise SmeltError(
            f"{source.path}: its blocks differ in size ({LAYER_SIZES} in config.json), which no {to} loader supports;"
            " prune them evenly, or use --to dense"
        )
    show = Progress(progress)
    if as_file:
        found = target.write(source.path, output, kind=type, progress=show)
        found.notes.extend(_cache_notes(source))
        return found
    if not source.config_data().get("quantization_config"):
        raise SmeltError(
            f"{source.path}: its weights are not quantized, and export converts quantized ones; quantize it first, with `smelt run`"
        )
    opened = Source(source.path, trust_remote_code=trust_remote_code, progress=show)
    return _export_directory(opened, source, to, target, output, show)


def _export_directory(
    source: Source, original: ModelDirectory, to: str, target: ExportTarget, output: Path, show: Progress
) -> Exported:
    if not source.linears:
        raise SmeltError(
            f"{source.path}: its config.json describes quantized layers but its files have none; download it again"
        )
    raise_problems(target.problems(source))
    entries = _entries(source, target)
    size = sum(info.nbytes for _, info, _ in entries)
    quantization = target.config(source)
    config = {key: value for key, value in original.config_data().items() if key != "quantization_config"}
    if quantization is not None:
        config["quantization_config"] = quantization
    result = Exported(
        str(output), to, len(source.linears) if quantization else 0, size, _notes(source, original, target)
    )
    with appearing(output, size) as staging:
        show.say(f"writing {human_bytes(size)}")
        write_checkpoint(staging, source.path, config, entries, with_code=original.trust_remote_code)
        if target.own_file:
            write_text(staging / target.own_file, json.dumps(quantization, indent=2) + "\n")
        write_text(staging / RECORD, json.dumps(_record(original, result), indent=2) + "\n")
    return result


def _entries(source: Source, target: ExportTarget) -> list[Entry]:
    """Every tensor, grouped by layer, in the checkpoint's order where it has one."""
    entries: list[Entry] = [
        (name, source.weights.info(name), lambda name=name: source.weights.load(name))
        for name in source.carried
        if not name.endswith(CACHE_SCALES)
    ]
    if source.table is not None:
        entries += dense_entries(source, source.table)
    for linear in source.linears.values():
        entries += target.entries(source, linear)
    return entries


def _notes(source: Source, original: ModelDirectory, target: ExportTarget) -> list[str]:
    restored = (
        [] if source.table is None else [f"{source.table.name} was dequantized, as no loader supports codes there"]
    )
    return [*target.notes(source), *restored, *_cache_notes(original)]


def _cache_notes(original: ModelDirectory) -> list[str]:
    """What is lost of a checkpoint with a quantized KV cache."""
    scheme = (original.config_data().get("quantization_config") or {}).get("kv_cache_scheme")
    if not scheme:
        return []
    numbers = f"{'fp' if scheme.get('type') == 'float' else 'int'}{scheme.get('num_bits')}"
    return [
        f"the checkpoint's KV cache is quantized to {numbers}, which the format cannot express: this and its scales are"
        " dropped, and the cache is not quantized"
    ]


def _record(original: ModelDirectory, result: Exported) -> dict[str, Any]:
    """How the weights were made, for ``smelt inspect`` and ``smelt eval``, and this export."""
    made = original.record()
    for about_other_files in ("reload", "claims"):
        made.pop(about_other_files, None)
    facts = {key: value for key, value in result.as_data().items() if key != "path"}
    made.pop("export", None)  # the last command comes last
    return {**made, "export": {**facts, "of": original.name}}
