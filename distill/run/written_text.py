"""Windows of generated text: by a teacher before training, or by the student during training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...system.progress import Progress
from ...system.storage.files import append_array, disk_error, flush_to_disk
from ..settings import TrainingText
from ..training.batches import TrainingBatch
from .student import WholeModel
from .text_writer import Writer
from .training_text import WindowsFile, learned_beside, predicting

_TOGETHER = 32


def written_by(
    writer: Callable[[], Writer],
    settings: TrainingText,
    windows: WindowsFile,
    path: Path,
    seed: int,
    progress: Progress,
) -> WindowsFile:
    """The training windows with the teacher's continuations of their prompts, up to its end; held-out windows keep the text.

    Args:
        writer: loads the teacher's writer, if any windows are left.
        settings: the recipe's section.
        windows: of the text.
        path: the file that gets the result; an interrupted run's is continued.
        seed: of sampling.
        progress: shows progress.
    """
    learned = learned_beside(path)
    begun, begun_learned = (each.with_name(each.name + ".partial") for each in (path, learned))
    if not path.exists():
        own = windows.nbytes // 4
        if begun.exists() and not begun_learned.exists():
            if learned.exists():  # it was complete, and about to appear
                shutil.move(learned, begun_learned)
            else:  # an older version's, whose teachers did not end
                begun_learned.write_bytes(b"\x01" * (begun.stat().st_size // windows.nbytes * own))
        done = min(begun.stat().st_size // windows.nbytes if begun.exists() else 0, windows.count)
        done = min(done, begun_learned.stat().st_size // own if begun_learned.exists() else 0)
        if done < windows.count:
            done -= done % _TOGETHER  # the same groups, and so the same seeds, as without an interruption
        try:
            with begun.open("ab") as file, begun_learned.open("ab") as beside, ExitStack() as stack:
                file.truncate(done * windows.nbytes)
                beside.truncate(done * own)

                def keep(tokens: Tensor, which: Tensor) -> None:
                    append_array(file, windows.own(tokens).numpy().astype(np.int32))
                    append_array(beside, windows.own(which).numpy().astype(np.uint8))

                teacher = stack.enter_context(closing(writer())) if done < windows.count else None
                for start in progress.track(range(done, windows.count, _TOGETHER), "the teacher generates text"):
                    assert teacher is not None
                    numbers = torch.arange(start, min(start + _TOGETHER, windows.count))
                    prompts = windows.read(numbers)[:, : settings.prompt]
                    tokens, which = teacher.continued(prompts, settings.temperature, seed * 1_000_003 + start)
                    which[:, : settings.prompt] = True
                    keep(tokens, which)
                kept = windows.read(windows.held_out())
                keep(kept, torch.ones(kept.shape, dtype=torch.bool))
                flush_to_disk(file)
                flush_to_disk(beside)
            shutil.move(begun_learned, learned)
            shutil.move(begun, path)
        except OSError as error:
            raise disk_error(error, path, windows.nbytes * windows.count) from None
    return windows.beside(path)


class OnPolicy:
    """On-policy text: the current student generates its training text.

    Args:
        student: the model that is trained.
        writer: on an engine for the student's shape.
        settings: the recipe's section.
        seed: determines which steps read the student's text, and the samples.
        whole: a context in which the student's weights are unsharded.
    """

    def __init__(
        self,
        student: WholeModel,
        writer: Writer,
        settings: TrainingText,
        seed: int,
        whole: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._student, self._writer, self._settings, self._seed = student, writer, settings, seed
        self._whole = whole

    def instead(self, batch: TrainingBatch, step: int, first: int = 0) -> TrainingBatch:
        """A batch of the same prompts continued by the student; only generated tokens count.

        Args:
            batch: from the text.
            step: its number.
            first: the index of its first window among all processes'.
        """
        settings = self._settings
        seed = self._seed * 1_000_003 + step
        if torch.rand((), generator=torch.Generator().manual_seed(seed)) >= settings.share:
            return batch
        student = self._student
        with torch.no_grad():
            with self._whole():
                self._writer.take_weights(student.module.config, student.tensor_names, student.tensor)
            prompts = batch.tokens[:, : settings.prompt]
            tokens, written = self._writer.continued(prompts, settings.temperature, seed, first)
        return TrainingBatch(tokens, predicting(written))
