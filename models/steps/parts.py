"""The files from which a killed step resumes: finished parts, one per block, and measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ...system.processes.process_group import Processes
from ...system.storage.files import write_text
from ...system.storage.tensor_files import SafetensorsFile, save_tensors
from .record import LayerRecord


def block_files(journal: Path, count: int, suffix: str = "safetensors") -> list[Path]:
    """The path of each block's part."""
    return [journal / f"block-{index:05d}.{suffix}" for index in range(count)]


def save_part(path: Path, stored: dict[str, Tensor], records: list[LayerRecord]) -> None:
    """Write a part: tensors by their names in the checkpoint, and the records of their layers."""
    layers = json.dumps([record.as_data() for record in records])
    save_tensors(path, stored, {"format": "pt", "layers": layers})


def load_part(path: Path) -> dict[str, Tensor]:
    """The tensors of a part."""
    file = SafetensorsFile(path)
    return {name: file.load(name) for name in file.tensors}


def layers_of(paths: list[Path]) -> list[dict[str, Any]]:
    """The layers' records of all parts."""
    return [record for path in paths for record in json.loads(SafetensorsFile(path).metadata["layers"])]


def tensors_once(file: Path, processes: Processes, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors that all processes compute together; those that an earlier run left in a file are loaded instead."""
    stored, known = processes.broadcast(lambda: (load_part(file), True) if file.exists() else ({}, False))
    if not known:
        made = make()
        stored, _ = processes.broadcast(lambda: (made, None))
        if processes.is_main:
            save_tensors(file, {name: tensor.cpu() for name, tensor in stored.items()})
    return stored


class Measured:
    """Plain data by name, kept in a file as it is measured, so that a killed run measures none of it again.

    Args:
        file: where it is kept.
        processes: those that measure it together; the main one writes.

    Attributes:
        known: what has been measured.
    """

    def __init__(self, file: Path, processes: Processes) -> None:
        self._file, self._processes = file, processes
        self.known: dict[str, Any] = processes.broadcast(lambda: ({}, load_data(file) if file.exists() else {}))[1]

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """What is known by a name, or is measured now."""
        if name not in self.known:
            self.known[name] = measure()
            if self._processes.is_main:
                save_data(self._file, self.known)
        return self.known[name]


def data_once(file: Path, make: Callable[[], Any]) -> Any:
    """Plain data that an earlier run left in a file, or that this process makes now."""
    if not file.exists():
        save_data(file, make())
    return load_data(file)


def save_data(path: Path, data: Any) -> None:
    """Write plain data, such as what was measured."""
    write_text(path, json.dumps(data) + "\n")


def load_data(path: Path) -> Any:
    """What :func:`save_data` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
