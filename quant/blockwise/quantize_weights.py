"""The loop of a data-free quantize step: one thread reads, others round rows, one writes.

Nothing runs through the model, so no block waits for the one before it, and no activations are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...models.steps.parts import block_files, save_part
from ...models.steps.record import LayerRecord
from ...models.steps.step import RunContext
from ...models.structure.anatomy import BlockAnatomy
from ...models.structure.open_model import OpenModel
from ...system.hardware.device import on
from ...system.hardware.resources import release_freed_memory
from ..grid import Grid, shared_scale
from ..layer_stats import squared_error
from ..stored.compressed_tensors import join_rows, restore
from ..transforms.links import as_rows, links_of
from .apply_transforms import Transforms, changed_beside
from .assignment import Treatment, alike
from .embedding import round_embedding
from .group_quantizer import GroupQuantizer, ToRound, record_of

# Weights that are rounded at once: their temporaries stay in the processor's cache.
_AT_ONCE = 1 << 18
# Formats with square blocks share scales between this many rows; packed zero-points restart every 32.
_TOGETHER = 128

Stored = tuple[dict[str, Tensor], LayerRecord]


@dataclass
class _Portion:
    """A unit of reading: linears that are rounded alike, or a whole block where scales move within it.

    Attributes:
        part: the file that it goes to.
        stacks: names of linears; those of one stack share NVFP4's global scale.
        block: the block's number, if scales move within it.
        last: whether it completes the part.
    """

    part: Path
    stacks: list[list[str]]
    block: int | None = None
    last: bool = False


@dataclass
class _Read:
    """The data read for a portion.

    Attributes:
        weights: each linear's ``[rows, columns]``, by name.
        beside: unquantized tensors that transforms changed, by checkpoint name.
    """

    weights: dict[str, Tensor]
    beside: dict[str, Tensor] = field(default_factory=dict)


class WeightQuantizer:
    """Quantizes a model's blocks and head from their weights alone, and saves each as a part in the journal.

    Args:
        model: the model, its residual stream already changed where a transform does that.
        chosen: each linear's treatment, by name; none may read inputs.
        transforms: what is done to each block's weights before they are rounded; none may read inputs.
        context: the run around it.
        embedding: whether the input embedding is rounded.

    Attributes:
        parts: the files that it makes: the embedding's, one for each block, the head's.
    """

    def __init__(
        self,
        model: OpenModel,
        chosen: dict[str, Treatment],
        transforms: Transforms,
        context: RunContext,
        *,
        embedding: bool = False,
    ) -> None:
        self._model = model
        self._chosen = chosen
        self._transforms = transforms
        self._context = context
        self._embedding = context.journal / "embedding.safetensors" if embedding else None
        self._blocks = block_files(context.journal, len(model.anatomy.blocks))
        self._head = context.journal / "head.safetensors" if model.anatomy.head in chosen else None
        self.parts = [part for part in (self._embedding, *self._blocks, self._head) if part is not None]

    def run(self) -> None:
        """Make all missing parts, in the first process only."""
        self._context.processes.in_main(self._run)

    def _run(self) -> None:
        if self._embedding is not None and not self._embedding.exists():
            round_embedding(self._model, None, self._embedding)
        portions = [portion for portion in self._portions() if not portion.part.exists()]
        threads = torch.get_num_threads()
        # Edited weights are matrix products, which use all threads; others are only copied.
        reading = threads if self._model.is_edited else 1
        with _threads(reading) as reader, _threads(1, threads) as rows, _threads(1) as writer:
            stored: dict[str, Tensor] = {}
            records: list[LayerRecord] = []
            saving: Future[None] | None = None
            ahead = self._ahead(reader, portions)
            for portion, read in self._context.progress.track(ahead, "quantizing weights", len(portions)):
                stored |= read.beside
                for stack in portion.stacks:
                    for tensors, record in self._rounded(
                        [ToRound(self._model.linears[name], read.weights.pop(name)) for name in stack], rows
                    ):
                        key = self._model.linears[record.name].key.removesuffix("weight")
                        stored |= {key + local: tensor for local, tensor in tensors.items()}
                        records.append(record)
                del read
                if portion.last:
                    if saving is not None:
                        saving.result()
                    saving = writer.submit(save_part, portion.part, stored, records)
                    stored, records = {}, []
                    release_freed_memory()
            if saving is not None:
                saving.result()

    def _portions(self) -> Iterator[_Portion]:
        for index, (anatomy, part) in enumerate(zip(self._model.anatomy.blocks, self._blocks, strict=True)):
            stacks = self._stacks(anatomy)
            if self._transforms.links or not stacks:
                yield _Portion(part, stacks, index if self._transforms.links else None, last=True)
                continue
            for i, stack in enumerate(stacks):
                yield _Portion(part, [stack], last=i + 1 == len(stacks))
        if self._head is not None:
            yield _Portion(self._head, [[self._model.anatomy.head]], last=True)

    def _stacks(self, anatomy: BlockAnatomy) -> list[list[str]]:
        return [
            names
            for phase in anatomy.phases()
            for group in phase
            for names in alike(
                {
                    name: self._chosen[name]
                    for name in (f"{anatomy.name}.{local}" for local in group.linears)
                    if name in self._chosen
                }
            )
        ]

    def _ahead(self, reader: ThreadPoolExecutor, portions: list[_Portion]) -> Iterator[tuple[_Portion, _Read]]:
        """Each portion with its data, while the next one is being read."""
        coming: tuple[_Portion, Future[_Read]] | None = None
        for portion in portions:
            following = (portion, reader.submit(self._read, portion))
            if coming is not None:
                yield coming[0], coming[1].result()
            coming = following
        if coming is not None:
            yield coming[0], coming[1].result()

    def _read(self, portion: _Portion) -> _Read:
        if portion.block is not None:
            return self._read_block(portion.block)
        found = {}
        for name in (name for stack in portion.stacks for name in stack):
            module = self._model.skeleton.model.get_submodule(name)
            found[name] = as_rows(module, self._model.weights.load(self._model.linears[name].key))
        return _Read(found)

    def _read_block(self, index: int) -> _Read:
        """A block's weights with scales moved between them."""
        anatomy, block = self._model.anatomy.blocks[index], self._model.skeleton.blocks[index]
        links, prefix = links_of(self._model, index), f"{anatomy.name}."
        weights = {
            name: as_rows(
                block.get_submodule(name.rpartition(".")[0]),
                self._model.weights.load(self._model.names[prefix + name]).float(),
            )
            for name, _ in block.named_parameters()
        }
        schemes = {
            name.removeprefix(prefix): self._chosen[name].scheme for name in anatomy.linears if name in self._chosen
        }
        self._transforms.move(links, weights, schemes, self._model.dtype)
        beside = changed_beside(self._model, index, weights, schemes.keys())
        return _Read({prefix + name: weights[f"{name}.weight"] for name in schemes}, beside)

    def _rounded(self, linears: list[ToRound], rows: ThreadPoolExecutor) -> list[Stored]:
        """The stored tensors of linears with the same treatment."""
        treatment = self._chosen[linears[0].facts.name]
        if not treatment.method.by_row:  # long searches, worth moving to a GPU
            device = self._context.processes.device
            with on(device):
                moved = [ToRound(linear.facts, linear.weight.to(device)) for linear in linears]
                found = GroupQuantizer(treatment, []).round(moved, None)
            return [({name: tensor.cpu() for name, tensor in stored.items()}, record) for stored, record in found]
        shared = shared_scale([linear.weight for linear in linears], treatment.scheme.args)

        def round_part(linear: ToRound, start: int, height: int) -> tuple[dict[str, Tensor], tuple[float, float]]:
            weight = linear.weight[start : start + height]
            grid = Grid.fit(weight, treatment.scheme.args, linear.facts.dtype, shared)
            rounded = treatment.method.function(weight, treatment.scheme.args, None, treatment.options, grid)
            stored = rounded.stored(treatment.scheme)
            return stored, squared_error(weight, restore(stored, treatment.scheme))

        jobs = []
        for linear in linears:
            height = max(1, _AT_ONCE // linear.weight.shape[1] // _TOGETHER) * _TOGETHER
            starts = range(0, len(linear.weight), height)
            jobs.append([rows.submit(round_part, linear, start, height) for start in starts])
        found = []
        for linear, parts in zip(linears, jobs, strict=True):
            results = [part.result() for part in parts]
            lost, whole = (sum(sums) for sums in zip(*(sums for _, sums in results), strict=True))
            error = (lost / whole) ** 0.5 if whole else 0.0
            record = record_of(linear.facts, treatment.scheme, error, "weights", [])
            found.append((join_rows([stored for stored, _ in results]), record))
        return found


@contextmanager
def _threads(each: int, count: int = 1) -> Iterator[ThreadPoolExecutor]:
    """Threads that each compute with ``each`` torch threads."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(each,)) as threads:
            yield threads
    finally:
        torch.set_num_threads(before)  # it also applies to threads created later
