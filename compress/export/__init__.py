"""Carrying a quantized checkpoint over into formats that other programs read: GPTQ, AWQ, GGUF, or plain weights."""

from __future__ import annotations

from .export import Exported, ExportResult, export
from .targets import TARGETS

__all__ = ["TARGETS", "Exported", "ExportResult", "export"]
