"""Training text, tokenized and cut into windows on disk."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...models.text.text_source import TextSource
from ...models.text.windows import beginning
from ...system.progress import Progress
from ...system.storage.files import append_array, disk_error, flush_to_disk
from ..training.batches import TrainingBatch
from .examples import example_pieces

# At most one window in this many is held out, but one of a few.
_KEPT_SHARE, _MOST_KEPT = 20, 16


class WindowsFile:
    """Windows of token ids in a file, read on demand. Beside it may be one that says which of them are learned (uint8).

    Args:
        path: the file: int32, ``[windows, length]``.
        length: tokens per window.
        begin: tokens that every window starts with; they are not in the file.
        kept: how many windows are held out; None for a twentieth, at least one and at most 16.
    """

    def __init__(self, path: Path, length: int, begin: list[int], kept: int | None = None) -> None:
        own = length - len(begin)
        self.length, self._begin_length = length, len(begin)
        self.nbytes = 4 * own  # per window
        self._all = np.memmap(path, dtype=np.int32, mode="r").reshape(-1, own)
        self._begin = torch.tensor(begin, dtype=torch.int64)
        learned = learned_beside(path)
        self._learned = np.memmap(learned, dtype=np.uint8, mode="r").reshape(-1, own) if learned.exists() else None
        # The last windows are held out, so that a longer text would have the same training windows first.
        few = min(1, len(self._all) - 1)
        self.kept = min(_MOST_KEPT, max(few, len(self._all) // _KEPT_SHARE)) if kept is None else kept
        self.count = len(self._all) - self.kept

    def read(self, numbers: Tensor) -> Tensor:
        """Tokens ``[n, length]`` of windows by their numbers."""
        own = torch.from_numpy(self._all[numbers.numpy()].astype(np.int64))
        return torch.cat((self._begin.expand(len(own), -1), own), dim=1)

    def learned(self, numbers: Tensor) -> Tensor | None:
        """Which of these tokens are learned, ``[n, length]``; None if all are."""
        if self._learned is None:
            return None
        own = torch.from_numpy(self._learned[numbers.numpy()].astype(bool))
        return torch.cat((torch.zeros(len(own), self._begin_length, dtype=torch.bool), own), dim=1)

    def batch(self, numbers: Tensor) -> TrainingBatch:
        """Windows to train on."""
        learned = self.learned(numbers)
        return TrainingBatch(self.read(numbers), None if learned is None else predicting(learned), numbers)

    def held_out(self) -> Tensor:
        """Numbers of the held-out windows."""
        return torch.arange(self.count, self.count + self.kept)

    def own(self, tokens: Tensor) -> Tensor:
        """The part of windows ``[n, length]`` that is stored in the file."""
        return tokens[:, self._begin_length :]

    def beside(self, path: Path) -> WindowsFile:
        """Another file for windows of the same form."""
        return WindowsFile(path, self.length, self._begin.tolist())

    def fingerprint(self) -> str:
        """A digest that identifies the windows."""
        digest = hashlib.sha256(f"{self._all.shape} {self._begin.tolist()}".encode())
        for part in np.array_split(self._all, max(1, self._all.nbytes >> 24)):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def counts(self, vocabulary: int) -> Tensor:
        """How often each token occurs in the training windows."""
        found = torch.zeros(vocabulary, dtype=torch.int64)
        for part in np.array_split(self._all[: self.count], max(1, self._all.nbytes >> 24)):
            found += torch.from_numpy(np.bincount(part.ravel(), minlength=vocabulary))
        return found

    @property
    def largest(self) -> int:
        """The largest token id."""
        return int(self._all.max())


def learned_beside(path: Path) -> Path:
    """Where it is said which tokens of a file are learned."""
    return path.with_suffix(".learned")


def predicting(learned: Tensor) -> Tensor:
    """Weights of positions, of which each predicts the next token: 1 where that is learned."""
    counted = torch.zeros(learned.shape)
    counted[:, :-1] = learned[:, 1:]
    return counted


def training_windows(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    most: int,
    path: Path,
    progress: Progress,
) -> WindowsFile:
    """A source's first windows, tokenized once and kept in a file.

    Args:
        source: where the text comes from.
        tokenizer: the model's.
        length: tokens per window.
        most: number of windows wanted for training; some more are held out.
        path: the file.
        progress: shows progress.
    """
    begin = beginning(tokenizer)
    own = length - len(begin)
    enough = most + min(_MOST_KEPT, most // _KEPT_SHARE + 1)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        learned = learned_beside(path)
        partial, partial_learned = (each.with_name(each.name + ".partial") for each in (path, learned))
        all_learned = True
        try:
            with partial.open("wb") as file, partial_learned.open("wb") as beside:
                cut = itertools.islice(_cut(source, tokenizer, own, begins=bool(begin)), enough)
                for ids, which in progress.track(cut, f"tokenizing {source.label}", enough):
                    if len(ids) == own:  # the last one may be shorter
                        append_array(file, np.asarray(ids, dtype=np.int32))
                        append_array(beside, np.asarray(which, dtype=np.uint8))
                        all_learned &= all(which)
                flush_to_disk(file)
                flush_to_disk(beside)
            if all_learned:
                partial_learned.unlink()
            else:
                partial_learned.replace(learned)
            partial.replace(path)
        except OSError as error:
            raise disk_error(error, path, 5 * enough * own) from None
    return WindowsFile(path, length, begin)


def shortage(source: TextSource, tokenizer: PreTrainedTokenizerBase, length: int, batch: int) -> str | None:
    """Why a source has not even one batch of windows, reading no more of it than that."""
    own = length - len(beginning(tokenizer))
    needed, found = own * (batch + max(1, -(-batch // _KEPT_SHARE))), 0
    for ids, _ in _cut(source, tokenizer, own, begins=own < length):
        found += len(ids)
        if found >= needed:
            return None
    return (
        f"{source.label}: too short: a batch of {batch} windows of {length} tokens, and some held out, need {needed}"
        f" tokens, but it has {found}; give more text, or lower batch or length"
    )


def _cut(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, own: int, *, begins: bool
) -> Iterator[tuple[list[int], list[bool]]]:
    """Windows of a source in which something is learned, and which of their tokens are; the last one may be shorter.

    Args:
        source: the text.
        tokenizer: the model's.
        own: tokens per window.
        begins: whether a token precedes each, from which its first one is predicted.
    """
    ids: list[int] = []
    which: list[bool] = []
    for piece in example_pieces(source, tokenizer):
        ids += piece.ids
        which += [piece.learned] * len(piece.ids)
        start = 0
        while len(ids) - start >= own:
            window = which[start : start + own]
            if any(window if begins else window[1:]):
                yield ids[start : start + own], window
            start += own
        ids, which = ids[start:], which[start:]
    if ids:
        yield ids, which
