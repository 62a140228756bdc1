"""The prune step for experts of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.directory.experts import watched
from ...models.steps.block_loop import BlockJob, BlockResult, run_forward, streamed_model
from ...models.steps.parts import block_files, layers_of
from ...models.steps.record import LayerRecord, significant
from ...models.steps.smaller_model import computes_the_same, write_model
from ...models.steps.step import Given, RecipeStepPlan, RunContext, Step, StepRecord
from ...models.structure.open_model import OpenModel
from ...system.errors import SmeltError
from ...system.hardware.resources import Cost
from ...system.storage.activation_store import ActivationStore
from ...system.storage.tensor_files import SafetensorsFile
from ..score.experts import EXPERT_SCORES, ExpertFacts
from ..score.taylor import first_order
from ..settings.experts import PruneExperts
from ..structure.axes import Axis, Span
from ..structure.drop_experts import ExpertLayers, drop_experts
from .prepared import PreparedPrune
from .scoring_cost import scoring_cost


class PruneExpertsStep(Step[PruneExperts]):
    """Remove the same number of experts from every mixture."""

    @property
    def score(self) -> str:
        """What ranks them."""
        return self.settings.score or "activation"

    @property
    def label(self) -> str:
        count = self.settings.count
        amount = f"{self.settings.ratio:.0%} of" if count is None else f"{count}"
        return f"{amount} experts removed by {self.score}"

    def prepare(self, given: Given) -> PreparedExperts:
        return PreparedExperts(self, given.model)


class PreparedExperts(PreparedPrune[PruneExperts]):
    """Pruning the experts of one model."""

    def __init__(self, step: PruneExpertsStep, model: OpenModel) -> None:
        super().__init__(step, model)
        self._score = step.score
        try:
            self._layers = ExpertLayers.find(model)
        except SmeltError as error:
            raise self._wrong("structure", error) from None
        self._left = self._units_left()
        try:
            kept = dict.fromkeys(self._layers.modules, torch.arange(self._left))
            self.output = drop_experts(model, self._layers, kept, self._left)
        except SmeltError as error:
            raise self._wrong_amount(str(error)) from None

    def _units_left(self) -> int:
        layers = self._layers
        if self.settings.count is not None:
            left = layers.count - self.settings.count
        else:
            assert self.settings.ratio is not None
            left = round(layers.count * (1 - self.settings.ratio))
        if left < layers.chosen:
            what = (
                f"leaves {max(left, 0)} of {layers.count} experts, but every token is routed to {layers.chosen};"
                f" remove at most {layers.count - layers.chosen}"
            )
            raise self._wrong_amount(what)
        if left == layers.count:
            raise self._wrong_amount(f"removes none of {layers.count} experts; raise it")
        return left

    def plan(self) -> RecipeStepPlan:
        count, left = self._layers.count, self._left
        facts = {"score": self._score, "experts_before": count, "experts_after": left}
        return self._planned(facts, f"experts from {count} to {left} in each layer by {self._score}", self.output)

    def cost(self, windows: int, length: int) -> Cost:
        return scoring_cost(self.model, windows, length, gradients=3 if self._score == "taylor" else None)

    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        model, layers = self.model, self._layers
        context.processes.in_main(lambda: self._try_layout(context))
        parts = self._parts(context)
        if not context.processes.is_main:
            return None
        kept = {index: SafetensorsFile(parts[index]).load("kept") for index in layers.modules}
        after = drop_experts(model, layers, kept, self._left)
        write_model(after, model, target)
        done = f"{self._left} of {layers.count} experts are left in each layer"
        return self._record([done], layers_of(list(parts.values())))

    def _try_layout(self, context: RunContext) -> None:
        """Check that the model computes the same with its experts permuted: routing must not depend on order."""
        model, layers = self.model, self._layers
        generator = torch.Generator().manual_seed(context.seed)
        shuffled = {index: torch.randperm(layers.count, generator=generator) for index in layers.modules}
        if not computes_the_same(model, drop_experts(model, layers, shuffled, layers.count), context):
            raise SmeltError(
                f"{self._where}: {model.architecture} routes by the experts' order, perhaps in groups;"
                " they cannot be pruned"
            )

    def _parts(self, context: RunContext) -> dict[int, Path]:
        """Prune the blocks in order; each reads the outputs of the pruned ones before it."""
        context.journal.mkdir(parents=True, exist_ok=True)
        pruner = _ExpertPruner(self.model, self._layers, self._left, self._score, self.label, context)
        run_forward(pruner, pruner.narrow, context)
        return {index: file for index, file in enumerate(pruner.files) if file is not None}


class _ExpertPruner(BlockJob):
    """Removes experts from mixtures, block by block.

    Attributes:
        narrow: the pruned model, to compute with; valid for the blocks done so far.
    """

    description = "pruning experts"

    def __init__(
        self, model: OpenModel, layers: ExpertLayers, left: int, score: str, label: str, context: RunContext
    ) -> None:
        self._model, self._layers, self._left, self._context = model, layers, left, context
        self._score, self._label = EXPERT_SCORES[score], label
        self._kept: dict[int, Tensor] = {}
        self._known: dict[str, Tensor] = {}
        self._whole = streamed_model(model, context)
        self.narrow = streamed_model(drop_experts(model, layers, self._kept, left), context)
        files = enumerate(block_files(context.journal, len(self._whole)))
        self.files = [file if index in layers.modules else None for index, file in files]

    def begin(self) -> None:
        """Compute the first-order change of the loss without each expert, over all inputs of its last linear."""
        if not self._score.needs_gradients:
            return
        model = self._model
        readers = [reader for index in self._layers.modules for reader in _readers(model, index)]
        columns = model.linears[readers[0]].columns
        spans = {reader: {f"{reader}.weight": Span(1, (columns,))} for reader in readers}
        whole = Axis("experts", 1, 1, {self._layers.field: 1}, spans)
        self._known = first_order(model, whole, self._whole, self._context)

    @contextmanager
    def restore(self, index: int, stored: dict[str, Tensor]) -> Iterator[nn.Module]:
        """A block with its remaining experts."""
        self._kept[index] = stored["kept"].cpu()
        with self.narrow.block(index) as block:
            yield block

    @contextmanager
    def work(self, index: int, store: ActivationStore) -> Iterator[BlockResult]:
        """Choose the experts of a block."""
        advance = partial(self._advance, index, store)
        if index in self._layers.modules:
            kept, record = self._chosen(index, store)
            message, _ = self._context.processes.broadcast(lambda: ({"kept": kept}, None))
            self._kept[index] = message["kept"].cpu()
            yield BlockResult({"kept": self._kept[index]}, [record], advance)
        else:
            yield BlockResult(advance=advance)

    def _advance(self, index: int, store: ActivationStore) -> None:
        with self.narrow.block(index) as block:
            self.narrow.run_block(index, block, store)

    def _chosen(self, index: int, store: ActivationStore) -> tuple[Tensor, LayerRecord]:
        """The experts of a block to keep."""
        layers, name = self._layers, self._layers.modules[index]
        with self._whole.block(index) as block:
            local = name.removeprefix(f"{self._model.anatomy.blocks[index].name}.")
            with watched(block.get_submodule(local)) as (reached, added):
                for batch in store.batches():
                    hidden = store.read(batch)
                    self._whole.call(index, hidden).run(block, hidden)
        for each in (reached, added):
            self._context.processes.sum_(each)
        known = None
        if self._score.needs_gradients:
            known = torch.cat([self._known[each] for each in _readers(self._model, index)])
        facts = ExpertFacts(reached, added, known, partial(_matrices, self._model, layers, index))
        scores = self._score.compute(facts)
        if not scores.isfinite().all():
            raise SmeltError(f"{name}: the scores of its experts are not finite; use other text or another score")
        stays = scores.cpu().double().topk(self._left).indices.sort().values
        gone = sorted(set(range(layers.count)) - set(stays.tolist()))
        sizes = added.tolist()
        share = sum(sizes[number] for number in gone) / max(sum(sizes), 1e-30)
        notes = self._notes(reached, len(gone))
        return stays, LayerRecord(name, (layers.count, len(stays)), self._label, significant(share), notes)

    def _notes(self, reached: Tensor, gone: int) -> list[str]:
        """A note on experts that no token reached."""
        silent = [number for number, count in enumerate(reached.tolist()) if count == 0]
        if not silent:
            return []
        numbers = ", ".join(str(each) for each in silent)
        guessed = len(silent) > gone and self._score.reads_text
        return [
            f"no token of the calibration text reached expert{'s' * (len(silent) > 1)} {numbers}"
            + ("; which of them to keep is a guess; use more text" if guessed else "")
        ]


def _readers(model: OpenModel, index: int) -> list[str]:
    """The last linear of each expert of a block, in their order."""
    anatomy = model.anatomy.blocks[index]
    found: dict[str, str] = {}
    for group in anatomy.groups:
        for linear in group.linears:
            name = f"{anatomy.name}.{linear}"
            if model.linears[name].is_expert:
                found[linear.rpartition(".")[0]] = name  # groups are in the order that they run
    return sorted(found.values(), key=lambda name: int(name.split(".")[-2]))


def _matrices(model: OpenModel, layers: ExpertLayers, index: int) -> list[Tensor]:
    """Each expert's router row, and the norms of its matrices."""
    start = f"{model.anatomy.blocks[index].name}."
    matrices = []
    for name, dim in layers.routing.items():
        tensor = model.weights.load(model.names[name])
        if name.startswith(start) and tensor.dim() > 1:
            matrices.append(tensor.movedim(dim, 0).flatten(1))
    path = f"{layers.modules[index]}."
    leaves = [n.removeprefix(f"{path}0.") for n in model.names if n.startswith(f"{path}0.")]
    for leaf in leaves:
        every = [model.weights.load(model.names[f"{path}{number}.{leaf}"]) for number in range(layers.count)]
        matrices.append(torch.stack([each.float().norm()[None] for each in every]))
    return matrices
