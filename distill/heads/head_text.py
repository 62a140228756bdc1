"""The text that a draft head learns from: what the model itself writes after many beginnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...system.errors import SmeltError
from ...system.progress import Progress
from ...system.storage.files import append_array, disk_error, flush_to_disk
from ..run.text_writer import Writer
from ..run.training_text import WindowsFile, training_windows
from ..settings import Training

# Beginnings have from so many tokens to the settings' prompt.
_SHORTEST = 8
_TOGETHER = 32
# Every window is read so often.
_READ = 2


def head_windows(
    settings: Training,
    tokenizer: PreTrainedTokenizerBase,
    writer: Callable[[], Writer],
    journal: Path,
    seed: int,
    progress: Progress,
) -> WindowsFile:
    """Windows that a model has written after pieces of a text; an interrupted run's are continued.

    Only beginnings are taken from the text, so that a short one gives many; where they do not suffice, they are continued again with other
    noise. Every other batch is sampled at half of the temperature. Held-out windows have beginnings of their own.

    Args:
        settings: of the training.
        tokenizer: the model's.
        writer: loads the model, if any windows are left.
        journal: gets the files.
        seed: of sampling.
        progress: shows progress.

    Raises:
        SmeltError: the text is too short.
    """
    text, longest = settings.data.text(), settings.data.prompt
    # At least twenty, of which one is held out.
    wanted = max(settings.batch, -(-settings.steps * settings.batch // _READ), 20)
    begins = training_windows(text, tokenizer, longest, wanted, journal / "beginnings.bin", progress)
    if begins.count < settings.batch or begins.kept == 0:
        raise SmeltError(
            f"{text.label}: too short: it has {begins.count} beginnings of {longest} tokens, less than one batch of"
            f" {settings.batch} and some to hold out; give more text"
        )
    kept = max(1, min(begins.kept, wanted // 20))
    path = journal / "written.bin"
    nbytes, total = 4 * settings.length, wanted + kept
    if not path.exists():
        partial = path.with_name(path.name + ".partial")
        done = partial.stat().st_size // nbytes // _TOGETHER * _TOGETHER if partial.exists() else 0
        try:
            with partial.open("ab") as file:
                file.truncate(done * nbytes)
                made = writer() if done < total else None
                for start in progress.track(range(done, total, _TOGETHER), "the model writes text"):
                    assert made is not None
                    tokens = _written(made, settings, begins, range(start, min(start + _TOGETHER, total)), wanted, seed)
                    append_array(file, tokens.numpy().astype(np.int32))
                    file.flush()
                if made is not None:
                    made.close()
                flush_to_disk(file)
            partial.replace(path)
        except OSError as error:
            raise disk_error(error, path, nbytes * total) from None
    return WindowsFile(path, settings.length, [], kept=kept)


def _written(writer: Writer, settings: Training, begins: WindowsFile, windows: range, wanted: int, seed: int) -> Tensor:
    """Some windows; those from ``wanted`` on are held out."""
    longest = settings.data.prompt
    found = []
    for some in _parts(windows, wanted):
        trains = some.start < wanted
        count, first = (begins.count, 0) if trains else (begins.kept, begins.count)
        numbers = torch.tensor([first + (i if trains else i - wanted) % count for i in some])
        shortest = min(_SHORTEST, longest)
        length = shortest + 5 * (some.start // _TOGETHER) % (longest - shortest + 1)
        prompts = begins.read(numbers)[:, :length]
        # Half of it is less surprising, as the text of greedy requests is.
        temperature = settings.data.temperature / (1 + some.start // _TOGETHER % 2)
        found.append(writer.continued(prompts, temperature, seed * 1_000_003 + some.start, ends=False)[0])
    return torch.cat(found)


def _parts(windows: range, wanted: int) -> Iterator[range]:
    whole: Iterable[range] = (
        range(windows.start, min(windows.stop, wanted)),
        range(max(windows.start, wanted), windows.stop),
    )
    return (some for some in whole if some)
