"""The prune step for feed-forward channels and attention heads: which to keep in each layer, and the refit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.steps.block_loop import run_forward, streamed_model
from ...models.steps.parts import layers_of
from ...models.steps.record import LayerRecord, significant
from ...models.steps.smaller_model import computes_the_same, write_model
from ...models.steps.step import Given, RecipeStepPlan, RunContext, Step, StepRecord
from ...models.streaming.streamed import LOGIT_TOKENS
from ...models.structure.open_model import LinearFacts, OpenModel
from ...quant.blockwise.group_quantizer import reached_notes
from ...quant.blockwise.guard import LayerGuard
from ...quant.layer_stats import LayerStats, output_error
from ...quant.transforms.links import as_rows, weight_rows
from ...system.errors import SmeltError
from ...system.hardware.resources import Cost, compute_dtype
from ...system.storage.activation_store import BATCH_TOKENS
from ...system.storage.tensor_files import SafetensorsFile
from ..allocation.unit_sizes import MOST_LEVELS, shared_out_units, worst_case_units
from ..score.taylor import first_order
from ..score.units import UNIT_SCORES, UnitFacts
from ..settings.units import PruneChannels, PruneHeads
from ..structure import axes
from ..structure.axes import Axis
from ..structure.removable import layer_parts
from ..structure.slice_width import by_reader, matrices_of_units, slice_width, units_of_blocks
from ..update.table import UNIT_UPDATES
from .linear_pruner import LinearPruner
from .prepared import PreparedPrune

AXES: dict[str, Callable[[OpenModel], Axis]] = {"ffn": axes.feed_forward, "heads": axes.heads}
_KEPT = "kept:"
UNEVEN_LOADS = (
    "its blocks differ in size, which no Hugging Face configuration can express: Smelt loads it, and transformers with"
    " config=smelt.compress.config_for(…); without that transformers, vLLM and llama.cpp do not"
)


class PruneUnitsStep(Step[PruneChannels | PruneHeads]):
    """Remove units from every layer that has them, equally many unless the recipe allocates them over blocks."""

    @property
    def score(self) -> str:
        """What ranks them."""
        return self.settings.score or "activation"

    @property
    def label(self) -> str:
        s = self.settings
        amount = f"{s.count}" if s.count is not None else f"{s.ratio:.0%} of" if s.ratio is not None else None
        update = "" if s.update is None else " + least squares"
        update += "" if self.is_even else f", allocated by {s.allocation}"
        if amount is None:
            return f"{s.size} {s.structure} kept by {self.score}{update}"
        return f"{amount} {s.structure} removed by {self.score}{update}"

    @property
    def is_even(self) -> bool:
        """Whether all layers keep the same number."""
        return self.settings.allocation == "uniform"

    def prepare(self, given: Given) -> PreparedUnits:
        return PreparedUnits(self, given.model)


class PreparedUnits(PreparedPrune[PruneChannels | PruneHeads]):
    """Pruning the channels or heads of one model."""

    def __init__(self, step: PruneUnitsStep, model: OpenModel) -> None:
        super().__init__(step, model)
        self._score_name, self._score, self._is_even = step.score, UNIT_SCORES[step.score], step.is_even
        try:
            axis = AXES[step.settings.structure](model)
        except SmeltError as error:
            raise self._wrong("structure", error) from None
        self._axis = axis = axis.in_multiples_of(step.settings.multiple)
        self._left = self._units_left()
        self._narrow = self._narrowed()
        if not self._is_even and sum(bool(axis.of_block(block.name)) for block in model.anatomy.blocks) < 2:
            raise self._wrong("allocation", "only one block has them, so there is nothing to allocate")
        self.output = (
            self._narrow if self._is_even else slice_width(model, axis, worst_case_units(model, axis, self._left))
        )

    def _units_left(self) -> int:
        """How many units are left in each layer, or on average."""
        axis, settings = self._axis, self.settings
        per_unit = max(axis.fields.values())
        if settings.size is not None and settings.size % per_unit:
            what = f"{settings.size} heads are not whole groups of {per_unit} that share a key-value head"
            raise self._wrong_amount(f"{what}; use a multiple of {per_unit}")
        if settings.count is not None and settings.count % per_unit:
            raise self._wrong_amount(
                f"{settings.count} heads are not whole groups: {per_unit} query heads share each key-value"
                f" head; use a multiple of {per_unit}"
            )
        if settings.count is not None:
            left = axis.units - settings.count // per_unit
        elif settings.size is not None:
            left = settings.size // per_unit
        else:
            assert settings.ratio is not None
            left = axis.left(settings.ratio)
        if left < 1:
            raise self._wrong_amount(f"leaves none of {axis.units} {axis.noun}; lower it")
        if left >= axis.units and settings.size is not None:
            raise self._wrong_amount(f"keeps all of {axis.units * per_unit} {axis.noun}; give a smaller size")
        if left == axis.units:
            each = "one by one" if axis.multiple == 1 else f"in {axis.multiple}s"
            raise self._wrong_amount(f"removes none of {axis.units} {axis.noun}, which are removed {each}; raise it")
        return left

    def _narrowed(self) -> OpenModel:
        """The model with the same number of units in each layer."""
        model, axis, left = self.model, self._axis, self._left
        try:
            return slice_width(model, axis, left)
        except SmeltError as error:
            why = str(error).rsplit("Error: ", 1)[-1].rstrip(".)")
            what = f"leaves {left} of {axis.units} {axis.noun}, which its configuration does not allow ({why})"
            if axis.multiple == 1:
                per_unit = max(axis.fields.values())
                possible = [str(per_unit * (axis.units - units)) for units in axes.possible_units(model, axis)]
                what += f"; heads that can be removed: {', '.join(possible)}"
            raise self._wrong_amount(what) from None

    def plan(self) -> RecipeStepPlan:
        axis, left = self._axis, self._left
        uneven = "" if self._is_even else f" in each layer on average, allocated by {self.settings.allocation},"
        facts = {
            "score": self._score_name,
            "update": self.settings.update,
            "units_before": axis.units,
            "units_after": left,
        }
        what = f"{axis.noun} from {axis.units} to {left}{uneven} by {self._score_name}"
        more = {} if self._is_even else {"allocation": self.settings.allocation}
        return self._planned(facts, what, self._narrow, more)

    def cost(self, windows: int, length: int) -> Cost:
        model, axis = self.model, self._axis
        tokens, itemsize = windows * length, compute_dtype(model.dtype).itemsize
        numel, columns = model.largest_block(), axis.units * axis.columns
        blocks, hidden = len(model.anatomy.blocks), model.skeleton.hidden_size
        # The Hessian and its sums; then, in float64, its kept part and that part's factor.
        matrices = columns**2 * (4 + 8 + 3 * 8) + columns * hidden * 4 * 3 if self.settings.update else 0
        passing = max(BATCH_TOKENS, length) * 4 * max(columns, hidden) * itemsize
        memory = max(numel * itemsize + max(matrices, passing), model.embedding_bytes())
        operations = 4.0 * tokens * sum(model.block_numels)
        kept = hidden + columns
        if self.settings.update:
            operations += len(axis.readers) * (2.0 * tokens * columns**2 + columns**3)
        if self._score.needs_gradients:
            logits = max(LOGIT_TOKENS, length) * model.vocabulary() * 4 * 4
            memory = max(memory + 2 * passing, model.embedding_bytes() + logits)
            operations += 8.0 * tokens * sum(model.block_numels) + 6.0 * tokens * model.head.numel
            kept += (blocks + 2) * hidden
        if not self._is_even:
            operations += 10.0 * tokens * sum(model.block_numels) + 6.0 * tokens * model.head.numel
            operations += MOST_LEVELS * len(axis.readers) * (2.0 * tokens * columns * hidden + columns**3)
            logits = max(LOGIT_TOKENS, length) * model.vocabulary() * 4 * 4
            changes = MOST_LEVELS * len(axis.readers) // blocks * columns * hidden * itemsize
            memory = max(memory + changes, model.embedding_bytes() + logits)
            kept += (blocks + 2) * hidden
        return Cost(int(memory), int(2 * model.weights.nbytes + tokens * kept * itemsize), operations)

    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        model, axis = self.model, self._axis
        context.processes.in_main(lambda: self._try_layout(context))
        parts = self._parts(context)
        if not context.processes.is_main:
            return None
        files = [SafetensorsFile(part) for part in parts]
        stored = {name: file for file in files for name in file.tensors}
        kept = {reader: stored[f"{_KEPT}{reader}"].load(f"{_KEPT}{reader}") for reader in axis.readers}
        after = slice_width(model, axis, kept, {name: f for name, f in stored.items() if not name.startswith(_KEPT)})
        write_model(after, model, target)
        left = {len(each) for each in kept.values()}
        if len(left) > 1:
            each = zip(model.anatomy.blocks, units_of_blocks(model, axis, kept), strict=True)
            units = [count if axis.of_block(block.name) else None for block, count in each]  # a dense block has none
            counts = ", ".join("-" if count is None else str(count) for count in units)
            sentence = f"{counts} of {axis.units} {axis.noun} are left, block by block"
            done, chosen = [sentence, UNEVEN_LOADS], {"units": units}
        else:
            done, chosen = [f"{left.pop()} of {axis.units} {axis.noun} are left in each layer"], None
        return self._record(done, layers_of(parts), chosen)

    def _try_layout(self, context: RunContext) -> None:
        """Check that the model computes the same with its units permuted, which confirms their layout."""
        model, axis = self.model, self._axis
        generator = torch.Generator().manual_seed(context.seed)
        shuffled = {reader: torch.randperm(axis.units, generator=generator) for reader in axis.readers}
        if not computes_the_same(model, slice_width(model, axis, shuffled), context):
            raise SmeltError(
                f"{self._where}: {model.architecture} arranges its {axis.noun} in a way that Smelt does"
                " not follow; they cannot be pruned"
            )

    def _parts(self, context: RunContext) -> list[Path]:
        context.journal.mkdir(parents=True, exist_ok=True)
        pruner = _UnitPruner(self.model, self._axis, self, context)
        run_forward(pruner, pruner.streamed, context)
        return pruner.parts

    def units_of_readers(self, known: Mapping[str, Tensor], context: RunContext) -> dict[str, int]:
        """How many units each reader keeps, given gradient-based scores."""
        model, axis, left = self.model, self._axis, self._left
        if self._is_even:
            return dict.fromkeys(axis.readers, left)

        def scores(reader: str, weight: Tensor, stats: LayerStats) -> Tensor:
            return self.scores(reader, weight, stats, known.get(reader))

        # Units of a removed part compute nothing, and must not be traded for others.
        part = "mlp" if self.settings.structure == "ffn" else "attention"
        blocks = [index for index, rest in enumerate(layer_parts(model)) if rest in ("all", part)]
        units = shared_out_units(model, axis, left, blocks, scores, context, refits=self.refits)
        return by_reader(model, axis, units)

    @property
    def needs_gradients(self) -> bool:
        return self._score.needs_gradients

    def scores(self, reader: str, weight: Tensor, stats: LayerStats, known: Tensor | None) -> Tensor:
        """The importance of each input unit of a linear."""
        matrices = partial(matrices_of_units, self.model, self._axis, reader)
        return self._score.compute(UnitFacts(weight, self._axis.columns, stats.energy, known, matrices))

    @property
    def refits(self) -> bool:
        return self.settings.update is not None


class _UnitPruner(LinearPruner):
    """Removes input units of linears, block by block."""

    def __init__(self, model: OpenModel, axis: Axis, step: PreparedUnits, context: RunContext) -> None:
        super().__init__(model, streamed_model(model, context), axis.readers, context, hessian=step.refits)
        self.description = f"pruning {axis.noun}"
        self._axis, self._step = axis, step
        self._known: dict[str, Tensor] = {}
        self._left: dict[str, int] = {}

    def begin(self) -> None:
        """Compute scores that need the whole model, and how many units each block keeps."""
        if self._step.needs_gradients:
            self._known = first_order(self._model, self._axis, self.streamed, self._context)
        with torch.device("cpu"):
            self._left = self._step.units_of_readers(self._known, self._context)

    def pruned(
        self, facts: LinearFacts, module: nn.Module, weight: Tensor, stats: LayerStats
    ) -> tuple[dict[str, Tensor], LayerRecord]:
        """The units to keep and their refitted reader."""
        axis, reader = self._axis, facts.name
        kept = self._kept(reader, weight, stats)
        columns = axis.columns_of(kept).to(weight.device)
        narrow, notes = weight.float()[:, columns], reached_notes(stats)
        update = self._step.settings.update
        if update is not None and stats.tokens:
            assert stats.hessian is not None
            narrow, more = UNIT_UPDATES[update](weight, stats.hessian, columns)
            notes += more
        whole = torch.zeros_like(weight, dtype=torch.float32)
        whole[:, columns] = narrow
        error = significant(output_error(weight, whole, stats))
        record = LayerRecord(reader, (weight.shape[0], len(columns)), self._step.label, error, notes)
        LayerGuard(self._step.settings.guard, "remove less, or set guard.otherwise: warn").judge(record)
        return {
            f"{_KEPT}{reader}": kept,
            facts.key: as_rows(module, narrow.to(facts.dtype)).contiguous(),
        }, record

    def _kept(self, reader: str, weight: Tensor, stats: LayerStats) -> Tensor:
        """The units to keep, in order."""
        assert stats.energy is not None
        if not stats.energy.isfinite().all():
            raise SmeltError(f"{reader}: its inputs on the calibration text are not finite; use other text")
        scores = self._step.scores(reader, weight, stats, self._known.get(reader))
        if not scores.isfinite().all():
            raise SmeltError(f"{reader}: the scores of its inputs are not finite; use other text or another score")
        return scores.topk(self._left[reader]).indices.sort().values.cpu()

    def use(self, facts: LinearFacts, module: nn.Module, stored: dict[str, Tensor]) -> None:
        """Let a layer compute like its narrow version, with zeros for removed units."""
        target = weight_rows(module)
        columns = self._axis.columns_of(stored[f"{_KEPT}{facts.name}"].to(target.device))
        target.zero_()
        target[:, columns] = as_rows(module, stored[facts.key]).to(target.device, target.dtype)
