"""The table of export formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...models.checkpoint.writer import Entry
from ...system.errors import Problem
from ...system.lazy import later
from .awq import awq_config, awq_entries, awq_problems
from .dense import dense_entries, dense_notes
from .gptq import gptq_config, gptq_entries, gptq_notes, gptq_problems
from .source import Source, StoredLinear, scales_in_float16


@dataclass(frozen=True)
class ExportTarget:
    """A format that is a model directory.

    Attributes:
        summary: its name in messages.
        problems: all that it does not support of a checkpoint.
        entries: the tensors that store one quantized linear.
        config: its ``quantization_config``; None for unquantized weights.
        notes: notes for the user, one sentence each.
        own_file: where the config is written besides ``config.json``.
        uneven: whether its loaders support blocks of different sizes.
    """

    summary: str
    problems: Callable[[Source], list[Problem]]
    entries: Callable[[Source, StoredLinear], list[Entry]]
    config: Callable[[Source], dict[str, Any] | None]
    notes: Callable[[Source], list[str]]
    own_file: str | None = None
    uneven: bool = False


class ExportResult(Protocol):
    """The result of an export: its path, and notes for the user."""

    @property
    def path(self) -> str: ...
    @property
    def notes(self) -> list[str]: ...
    def as_data(self) -> dict[str, Any]: ...
    def summary(self) -> str: ...


@dataclass(frozen=True)
class FileTarget:
    """A format that is one file.

    Attributes:
        summary: its name in messages.
        write: ``(checkpoint, file, kind=…, progress=…)``; reads any checkpoint that the runtime reads, also unquantized.
        written_by_smelt: whether an existing file is an earlier export, which may be replaced.
        typed: whether it has types, of which ``--type`` chooses one.
        uneven: whether its loaders support blocks of different sizes.
    """

    summary: str
    write: Callable[..., ExportResult]
    written_by_smelt: Callable[[Path], bool]
    typed: bool = False
    uneven: bool = False


def _gptq(version: int) -> ExportTarget:
    return ExportTarget(
        f"GPTQ, version {version}",
        partial(gptq_problems, version=version),
        partial(gptq_entries, version=version),
        partial(gptq_config, version=version),
        lambda source: [*scales_in_float16(source), *gptq_notes(source, version)],
        "quantize_config.json",
    )


_later = partial(later, __name__.rpartition(".")[0])

TARGETS: dict[str, ExportTarget | FileTarget] = {
    "gptq": _gptq(1),
    "gptq-v2": _gptq(2),
    "awq": ExportTarget("AWQ, version gemm", awq_problems, awq_entries, awq_config, scales_in_float16),
    "dense": ExportTarget("plain weights", lambda _: [], dense_entries, lambda _: None, dense_notes, uneven=True),
    "gguf": FileTarget("GGUF", _later("gguf", "export_gguf"), _later("gguf_file", "written_by_smelt"), typed=True),
}
