"""Snapshots of a training: files with each process's shards, and one that lists the files that belong together."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...system.errors import SmeltError
from ...system.storage.files import write_text
from ...system.storage.tensor_files import SafetensorsFile, save_tensors
from ..training.optimizer import Rows, Saved
from ..training.sharded import Sharding


class Snapshots:
    """Weights and moments, the curve and samples so far, on disk.

    Any number of processes can resume from the files of any other number: each reads the rows that it needs.

    Args:
        journal: the directory.
        spread: the distribution over processes.
        samples: the model's generated text so far; saved, and restored when training resumes.
    """

    def __init__(self, journal: Path, spread: Sharding, samples: list[dict[str, Any]]) -> None:
        self._journal, self._spread, self._samples = journal, spread, samples
        self._record = journal / "snapshot.json"
        # In a separate file, because it only grows: a snapshot's size does not depend on the number of steps.
        self._metrics, self._written = journal / "metrics.jsonl", 0
        there = float(self._record.exists())
        self.is_new = not spread.sums([there if spread.rank == 0 else 0.0])[0]
        if not spread.sums([there])[0] == (0 if self.is_new else spread.count):
            raise SmeltError(f"{journal}: processes do not see the same files here; use a shared file system")

    def load(self) -> tuple[Saved, dict[str, Any]] | None:
        """The last snapshot."""
        if self.is_new:
            return None
        data = json.loads(self._record.read_text(encoding="utf-8"))
        self._samples[:] = data.pop("samples")
        lines = self._metrics.read_text(encoding="utf-8").splitlines()[: data.pop("done")]
        self._written = len(lines)
        self._spread.sums([0])  # all have read what the first is about to truncate
        if self._spread.rank == 0:
            write_text(self._metrics, "".join(line + "\n" for line in lines))  # without those after the snapshot
        data["metrics"] = [json.loads(line) for line in lines]
        return _Pieces([SafetensorsFile(self._journal / name) for name in data.pop("files")]), data

    def save(self, tensors: dict[str, Tensor], rows: Mapping[str, Rows], data: dict[str, Any]) -> None:
        """Save a snapshot, in all processes at the same step."""
        metrics, keeps = data.pop("metrics"), self._spread.keeps
        count = self._spread.shards
        names = [f"snapshot-{len(metrics)}-{i}-of-{count}.safetensors" for i in range(count)]
        if keeps is not None:
            # The first process writes what all have whole.
            mine = {name: each.cpu() for name, each in tensors.items() if name in rows or self._spread.rank == 0}
            kept = {name: rows[name] for name in mine if name in rows}
            save_tensors(self._journal / names[int(keeps)], mine, {"rows": json.dumps(kept)})
        self._spread.sums([0])  # all files are written
        if self._spread.rank == 0:
            with self._metrics.open("w" if self._written == 0 else "a", encoding="utf-8") as file:
                file.writelines(json.dumps(each) + "\n" for each in metrics[self._written :])
                file.flush()
                os.fsync(file.fileno())
            record = data | {"samples": self._samples, "done": len(metrics), "files": names}
            write_text(self._record, json.dumps(record))
            for old in self._journal.glob("snapshot-*"):
                if old.name not in names:
                    old.unlink()
        self._spread.sums([0])  # nobody writes the next one before the first has cleaned up
        self._written = len(metrics)


class _Pieces:
    """Tensors whose rows are split over files."""

    def __init__(self, files: list[SafetensorsFile]) -> None:
        self._files = files
        self._rows = [{n: Rows(*r) for n, r in json.loads(file.metadata["rows"]).items()} for file in files]

    def __call__(self, name: str, rows: Rows | None) -> Tensor | None:
        found: list[Tensor] = []
        for file, kept in zip(self._files, self._rows, strict=True):
            info = file.tensors.get(name)
            if info is None:
                continue
            here = kept.get(name) or Rows(0, info.shape[0] if info.shape else 0, 0)
            if rows is None and name not in kept:
                return file.load(name)
            wanted = rows or Rows(0, here.total, here.total)
            start, stop = max(wanted.start, here.start), min(wanted.stop, here.stop)
            if start < stop or not found:
                inside = max(start, here.start) - here.start
                found.append(file.load(name, slice(inside, max(inside, stop - here.start))))
        return torch.cat(found) if found else None
