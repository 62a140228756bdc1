"""The loop over a model's blocks, forwards and backwards; it can resume after being killed at any point.

Each block reads what the blocks before it produce. What a step does to a block is a job; everything around that is here:
an earlier run's finished blocks are restored, the main process saves new ones, and activations are removed in all cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from ...system.hardware.device import on
from ...system.hardware.resources import release_freed_memory
from ...system.progress import Progress
from ...system.storage.activation_store import ActivationStore
from ..streaming.backward import KeptPass
from ..streaming.streamed import Changes, StreamedModel
from ..structure.open_model import OpenModel
from .parts import load_part, save_data, save_part
from .record import LayerRecord
from .step import RunContext


@dataclass(frozen=True)
class BlockResult:
    """The result of a job on a block.

    Attributes:
        tensors: the contents of its file, by name.
        records: the records of its layers.
        advance: runs all windows through the changed block.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    records: list[LayerRecord] = field(default_factory=list)
    advance: Callable[[], None] = lambda: None


class BlockJob(Protocol):
    """Work on a model block by block. Several processes do it in step, each with its own windows.

    Attributes:
        description: for the progress bar.
        files: by block, the file that says that it is finished, or None where nothing is kept; one more if the job
            also does something after the last block.
    """

    description: str
    files: Sequence[Path | None]

    def begin(self) -> Tensor | None:
        """Do what comes before the first block, unless all are finished.

        Returns:
            The embedding table to use, if not the model's own.
        """
        return None

    def work(self, index: int, store: ActivationStore) -> AbstractContextManager[BlockResult]:
        """Process a block. The result is saved, and then advanced if anything follows, before the context ends.

        Args:
            index: the block; the number of blocks for what follows them.
            store: hidden states that enter it.
        """
        ...

    def restore(self, index: int, stored: dict[str, Tensor]) -> AbstractContextManager[nn.Module]:
        """A block that computes with ``stored``, an earlier run's tensors, until the context ends."""
        ...


class BackwardJob(Protocol):
    """Work on a model block by block from the last one, during a backward pass.

    Attributes:
        description: for the progress bar.
        files: the file that says that a block is finished, by block and then for the head; empty if nothing is kept.
    """

    description: str
    files: Sequence[Path]

    def work(self, index: int, kept: KeptPass, flow: ActivationStore, *, finished: bool) -> Any:
        """Replace the gradients of a block's outputs by those of its inputs, and measure meanwhile.

        Args:
            index: the block; the number of blocks for the head, which comes first and writes the first gradients.
            kept: what entered each block, and last what left this one.
            flow: the gradients.
            finished: whether an earlier run has measured this block.

        Returns:
            What was measured, as plain data for the block's file; ignored if there is no file.
        """
        ...


def run_forward(job: BlockJob, streamed: StreamedModel, context: RunContext) -> None:
    """Do a job from the first block to the last; a finished block is only run, to get the next block's inputs.

    Args:
        job: the work.
        streamed: the model that embeds tokens and runs finished blocks.
        context: the run around it.
    """
    processes = context.processes
    _, finished = processes.broadcast(lambda: ({}, [file is not None and file.exists() for file in job.files]))
    kept = [done for done, file in zip(finished, job.files, strict=True) if file is not None]
    if kept and all(kept):
        return
    with on(processes.device), closing(streamed.embed(processes.share(context.tokens), job.begin())) as store:
        for index in each_block(range(len(streamed)), context.progress, job.description):
            _forward(job, index, finished[index], streamed, store, context)
        for index in range(len(streamed), len(job.files)):
            _forward(job, index, finished[index], streamed, store, context)


def _forward(
    job: BlockJob, index: int, finished: bool, streamed: StreamedModel, store: ActivationStore, context: RunContext
) -> None:
    processes, file, is_last = context.processes, job.files[index], index + 1 == len(job.files)
    if finished:
        if not is_last:
            assert file is not None
            stored, _ = processes.broadcast(lambda: (load_part(file), None))
            with job.restore(index, {name: t.to(processes.device) for name, t in stored.items()}) as block:
                streamed.run_block(index, block, store)
        return
    with job.work(index, store) as result:
        if file is not None and processes.is_main:
            save_part(file, {name: tensor.cpu() for name, tensor in result.tensors.items()}, result.records)
        if not is_last:
            result.advance()


def run_backward(job: BackwardJob, streamed: StreamedModel, tokens: Tensor, progress: Progress) -> None:
    """Do a job from the head to the first block.

    Args:
        job: the work.
        streamed: the model.
        tokens: this process's windows, ``[windows, length]``.
        progress: shows how far it is.
    """
    finished = [file.exists() for file in job.files]
    if finished and all(finished):
        return
    with (
        kept_pass(streamed, tokens, progress) as kept,
        closing(kept.stores[-1].beside(kept.stores[-1].shape[2])) as flow,
    ):
        _backward(job, len(streamed), kept, flow, finished)
        for index in each_block(range(len(streamed))[::-1], progress, job.description):
            _backward(job, index, kept, flow, finished)
            kept.stores.pop().close()  # only a later block reads it


def _backward(job: BackwardJob, index: int, kept: KeptPass, flow: ActivationStore, finished: list[bool]) -> None:
    found = job.work(index, kept, flow, finished=bool(finished) and finished[index])
    if finished and not finished[index]:
        save_data(job.files[index], found)


@contextmanager
def forward(
    streamed: StreamedModel, tokens: Tensor, progress: Progress, description: str
) -> Iterator[tuple[ActivationStore, Iterator[int]]]:
    """The first block's input hidden states, to be replaced block by block, and the block indices.

    For loops that save nothing in files.
    """
    with closing(streamed.embed(tokens)) as store:
        yield store, each_block(range(len(streamed)), progress, description)


@contextmanager
def kept_pass(streamed: StreamedModel, tokens: Tensor, progress: Progress) -> Iterator[KeptPass]:
    """A forward pass that keeps every block's inputs on disk until the context ends."""
    with closing(KeptPass(streamed)) as kept:
        kept.begin(tokens)
        for index in each_block(range(len(streamed)), progress, "reading the original"):
            kept.forward(index)
        yield kept


def each_block(indices: Sequence[int], progress: Progress, description: str) -> Iterator[int]:
    """Block indices; memory freed by the previous block is returned to the system first."""
    for index in progress.track(indices, description, len(indices)):
        release_freed_memory()
        yield index


def streamed_model(model: OpenModel, context: RunContext, changes: Changes | None = None) -> StreamedModel:
    """A model for calibration: in the run's dtype and on its device, with activations in the step's journal."""
    device = context.processes.device
    return StreamedModel(model.skeleton, model.weights, context.dtype, context.journal, changes, device=device)
