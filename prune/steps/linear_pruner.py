"""Block-by-block pruning of linears by their inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...models.steps.block_loop import BlockJob, BlockResult
from ...models.steps.parts import block_files
from ...models.steps.record import LayerRecord
from ...models.steps.step import RunContext
from ...models.streaming.streamed import StreamedModel
from ...models.structure.open_model import LinearFacts, OpenModel
from ...quant.blockwise.block_passes import BlockPasses
from ...quant.layer_stats import LayerStats
from ...quant.transforms.links import as_rows
from ...system.storage.activation_store import ActivationStore


class LinearPruner(BlockJob):
    """Prunes linears phase by phase, so that each reads the outputs of the pruned ones before it.

    Args:
        model: the model.
        streamed: the same, to compute with; kept as an attribute.
        wanted: full names of the linears that are pruned.
        context: the run around it.
        hessian: whether second moments of the inputs are needed.

    Attributes:
        parts: the files that it writes, one for each block.
    """

    def __init__(
        self,
        model: OpenModel,
        streamed: StreamedModel,
        wanted: Collection[str],
        context: RunContext,
        *,
        hessian: bool,
    ) -> None:
        self._model, self.streamed, self._context = model, streamed, context
        self._wanted, self._hessian = wanted, hessian
        self.files = self.parts = block_files(context.journal, len(streamed))

    def pruned(
        self, facts: LinearFacts, module: nn.Module, weight: Tensor, stats: LayerStats
    ) -> tuple[dict[str, Tensor], LayerRecord]:
        """A linear's stored tensors and its record; decided only in the main process.

        Args:
            facts: the linear.
            module: its module.
            weight: its weight ``[rows, columns]`` in its own dtype, or wider if an adapter is merged into it.
            stats: of its inputs.
        """
        raise NotImplementedError

    def use(self, facts: LinearFacts, module: nn.Module, stored: dict[str, Tensor]) -> None:
        """Let a linear compute with its pruned weight."""
        raise NotImplementedError

    @contextmanager
    def restore(self, index: int, stored: dict[str, Tensor]) -> Iterator[nn.Module]:
        """A block with its pruned linears."""
        with self.streamed.block(index) as block:
            for name, local in self._model.anatomy.blocks[index].local_names(self._wanted).items():
                self.use(self._model.linears[name], block.get_submodule(local), stored)
            yield block

    @contextmanager
    def work(self, index: int, store: ActivationStore) -> Iterator[BlockResult]:
        """Prune the linears of a block."""
        anatomy, call = self._model.anatomy.blocks[index], partial(self.streamed.call, index)
        tokens, processes = self._context.tokens.numel(), self._context.processes
        stored: dict[str, Tensor] = {}
        records: list[LayerRecord] = []
        with (
            self.streamed.block(index) as block,
            closing(BlockPasses(block, anatomy, store, call, tokens, processes)) as passes,
        ):
            for phase in anatomy.phases():
                wanted = anatomy.wanted_groups(self._wanted, phase)
                done: list[tuple[LinearFacts, nn.Module]] = []
                for group, stats in passes.observe(wanted, hessian=self._hessian, energy=True):
                    for name in group.linears:
                        linear = self._model.linears[f"{anatomy.name}.{name}"], block.get_submodule(name)
                        made, record = processes.broadcast(partial(self._made, *linear, stats))
                        stored |= made
                        records.append(LayerRecord.of_data(record))
                        done.append(linear)
                for facts, module in done:
                    self.use(facts, module, stored)
            yield BlockResult(stored, records, passes.advance)

    def _made(self, facts: LinearFacts, module: nn.Module, stats: LayerStats) -> tuple[dict[str, Tensor], Any]:
        weight = as_rows(module, self._model.weights.load(facts.key)).to(self._context.processes.device)
        tensors, record = self.pruned(facts, module, weight, stats)
        return tensors, record.as_data()
