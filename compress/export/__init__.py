"""Export of a quantized checkpoint to formats that other programs read: GPTQ, AWQ, GGUF, or unquantized weights."""

from __future__ import annotations

from .export import Exported, export
from .formats import TARGETS, ExportResult

__all__ = ["TARGETS", "ExportResult", "Exported", "export"]
