"""The table of export formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...models.checkpoint.writer import Entry
from ...system.errors import Problem
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
    """

    summary: str
    problems: Callable[[Source], list[Problem]]
    entries: Callable[[Source, StoredLinear], list[Entry]]
    config: Callable[[Source], dict[str, Any] | None]
    notes: Callable[[Source], list[str]]
    own_file: str | None = None


def _gptq(version: int) -> ExportTarget:
    return ExportTarget(
        f"GPTQ, version {version}",
        partial(gptq_problems, version=version),
        partial(gptq_entries, version=version),
        partial(gptq_config, version=version),
        lambda source: [*scales_in_float16(source), *gptq_notes(source, version)],
        "quantize_config.json",
    )


TARGETS = {
    "gptq": _gptq(1),
    "gptq-v2": _gptq(2),
    "awq": ExportTarget("AWQ, version gemm", awq_problems, awq_entries, awq_config, scales_in_float16),
    "dense": ExportTarget("plain weights", lambda _: [], dense_entries, lambda _: None, dense_notes),
}
