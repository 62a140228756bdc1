"""A teacher's top tokens at every position of a text: computed once, kept in files, and read when needed."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...system.errors import SmeltError
from ...system.progress import Progress
from ...system.storage.files import append_array, disk_error, flush_to_disk
from ..losses.chunked import rows_at_once
from ..losses.probabilities import most_likely
from .student import WholeModel
from .training_text import WindowsFile

_TOGETHER = 8
# Lowest log-probability that is stored as float16.
_LEAST = -6e4


class CachedTeacherLogits:
    """Ids and log-probabilities of a teacher's most likely tokens, ``[windows, length, k]`` each.

    They take four bytes per token for vocabularies of up to 65,536 and six for larger ones: ids as 16 or 32 bits,
    log-probabilities as float16.

    Args:
        directory: of the two files.
        windows: the text.
        count: tokens kept per position.
        vocabulary: number of tokens that student and teacher share.

    Attributes:
        vocabulary: the same.
    """

    def __init__(self, directory: Path, windows: WindowsFile, count: int, vocabulary: int) -> None:
        self._windows, self._count = windows, min(count, vocabulary)
        self.vocabulary = vocabulary
        self._ids = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.int32)
        self._directory = directory
        self._paths = directory / "teacher-ids.bin", directory / "teacher-logs.bin"
        self._each = windows.length * self._count  # elements per window

    def compute(self, teacher: Callable[[], WholeModel], temperature: float, progress: Progress) -> None:
        """Run a teacher on all windows whose logits no earlier run has stored.

        Args:
            teacher: loads it, if any windows are left.
            temperature: of its distributions.
            progress: shows progress.
        """
        place = self._directory / "teacher.lock"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = place.open("a")
        except OSError as error:
            raise disk_error(error, place, 0) from None
        with lock:
            with suppress(OSError):  # if files cannot be locked
                fcntl.flock(lock, fcntl.LOCK_EX)  # other runs that share the directory wait, and find it done
            self._compute(teacher, temperature, progress)

    def _compute(self, teacher: Callable[[], WholeModel], temperature: float, progress: Progress) -> None:
        sizes = self._ids.itemsize * self._each, 2 * self._each
        there = [
            path.stat().st_size // size if path.exists() else 0 for path, size in zip(self._paths, sizes, strict=True)
        ]
        done, total = min(there), self._windows.count + self._windows.kept
        if done < total:
            done -= done % _TOGETHER  # the same groups as without an interruption, for bit-identical results
        if done == total:
            return
        reader = teacher()
        try:
            with self._paths[0].open("ab") as ids, self._paths[1].open("ab") as logs:
                for file, size in ((ids, sizes[0]), (logs, sizes[1])):
                    file.truncate(done * size)
                for start in progress.track(range(done, total, _TOGETHER), "running the teacher"):
                    numbers = torch.arange(start, min(start + _TOGETHER, total))
                    places, kept = self._logits_of(reader, self._windows.read(numbers), temperature)
                    append_array(ids, places.numpy().astype(self._ids))
                    append_array(logs, kept.numpy().astype(np.float16))
                for file in (ids, logs):
                    flush_to_disk(file)
        except OSError as error:
            raise disk_error(error, self._paths[0], total * sum(sizes)) from None

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities ``[n, length, k]`` of windows by their numbers."""
        shape = (-1, self._windows.length, self._count)
        ids = np.memmap(self._paths[0], dtype=self._ids, mode="r").reshape(shape)[numbers.numpy()]
        logs = np.memmap(self._paths[1], dtype=np.float16, mode="r").reshape(shape)[numbers.numpy()]
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logs.astype(np.float32))

    @torch.no_grad()
    def _logits_of(self, teacher: WholeModel, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        head = teacher.split.head
        hidden = teacher.split.hidden(tokens.to(head.weight.device)).flatten(0, 1)
        found = []
        for rows in hidden.split(rows_at_once(head.weight.shape[0])):
            logits = teacher.split.logits(rows.unsqueeze(0), head.weight, head.bias)[0]
            found.append(most_likely(logits[:, : self.vocabulary], self._count, temperature))
        places, kept = (torch.cat(each).cpu() for each in zip(*found, strict=True))
        if not kept.isfinite().all():
            raise SmeltError("the teacher's predictions are not finite; download it again")
        return places, kept.clamp_min(_LEAST)
