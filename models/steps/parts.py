"""The finished parts of a quantize step, one file a block: what the checkpoint will hold instead of the original's tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from ...system.tensor_files import SafetensorsFile, save_tensors
from .record import LayerRecord


def save_part(path: Path, stored: dict[str, Tensor], records: list[LayerRecord]) -> None:
    """Write a part: tensors by their names in the checkpoint, and what is to be told of their layers."""
    layers = json.dumps([record.as_data() for record in records])
    save_tensors(path, stored, {"format": "pt", "layers": layers})


def load_part(path: Path) -> dict[str, Tensor]:
    """The tensors of a part."""
    file = SafetensorsFile(path)
    return {name: file.load(name) for name in file.tensors}


def layers_of(paths: list[Path]) -> list[dict[str, Any]]:
    """The layers' records of all parts."""
    return [record for path in paths for record in json.loads(SafetensorsFile(path).metadata["layers"])]
