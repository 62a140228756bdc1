"""The prune step for single weights: which become zero, and how the others compensate."""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor, nn

from ...models.steps.block_loop import run_forward, streamed_model
from ...models.steps.parts import block_files, layers_of, save_part
from ...models.steps.record import LayerRecord, significant
from ...models.steps.smaller_model import write_model
from ...models.steps.step import Given, RecipeStepPlan, RunContext, Step, StepRecord
from ...models.streaming.streamed import LOGIT_TOKENS
from ...models.structure.open_model import LinearFacts, OpenModel
from ...quant.blockwise.assignment import named
from ...quant.blockwise.group_quantizer import reached_notes
from ...quant.blockwise.guard import LayerGuard
from ...quant.layer_stats import LayerStats, output_error, weight_error
from ...quant.pattern import Pattern
from ...quant.rounding.options.gptq import AT_A_TIME
from ...quant.sparsity import keep_share
from ...quant.transforms.links import as_rows
from ...system.errors import Problem, SmeltError, raise_problems
from ...system.hardware.machine import human_bytes
from ...system.hardware.resources import Cost, compute_dtype
from ...system.storage.activation_store import BATCH_TOKENS
from ...system.storage.tensor_files import SafetensorsFile
from ..allocation.sparsities import LEVELS, shared_out
from ..score.weights import WEIGHT_SCORES
from ..settings.weights import PrunePattern, PruneWeights
from ..update.table import WEIGHT_UPDATES
from .linear_pruner import LinearPruner
from .prepared import PreparedPrune

_NO_FASTER = (
    "its zeros save neither memory nor time here: only the GPU kernels of this runtime use them, and only 2:4 with int4"
)


class PruneWeightsStep(Step[PrunePattern | PruneWeights]):
    """Set weights to zero: N of each M neighbours, or a share of all."""

    leaves_zeros = True

    def __init__(self, settings: PrunePattern | PruneWeights, where: str) -> None:
        super().__init__(settings, where)
        self.pattern = None if settings.structure == "weights" else Pattern.named(settings.structure)
        self.score = settings.score or ("obs" if settings.update else "wanda")

    @property
    def label(self) -> str:
        share = f"{self.settings.sparsity:.0%} sparse" if self.pattern is None else self.settings.structure
        allocation = "" if self.settings.allocation == "uniform" else f", by {self.settings.allocation}"
        return f"{share}{allocation} {self.score}{'' if self.settings.update is None else ' + ' + self.settings.update}"

    def prepare(self, given: Given) -> PreparedWeights:
        return PreparedWeights(self, given.model)


class PreparedWeights(PreparedPrune[PrunePattern | PruneWeights]):
    """Setting weights of one model to zero."""

    def __init__(self, step: PruneWeightsStep, model: OpenModel) -> None:
        super().__init__(step, model)
        settings = step.settings
        self._pattern, self._score = step.pattern, step.score
        self._shares: dict[str, float] = {}
        self._guard = LayerGuard(settings.guard, "remove less, add it to ignore, or set guard.otherwise: warn")
        # lm_head is excluded: it may be tied to the embedding.
        self._facts = [
            facts
            for facts in model.block_linears
            if named(facts, settings.targets, model) and not named(facts, settings.ignore, model)
        ]
        raise_problems(self._problems())
        self.reads_text = [
            *([f"score {self._score}"] if self._reads_inputs else []),
            *([] if settings.update is None else [f"update {settings.update}"]),
            *([] if settings.allocation == "uniform" else [f"allocation {settings.allocation}"]),
            *([] if settings.guard is None else ["guard"]),
        ]
        self.output = model  # of the same shapes

    def _problems(self) -> list[Problem]:
        model, facts = self.model, self._facts
        problems = [
            Problem(f"{self._where}.{field}", f"{pattern!r} matches no linear of the model")
            for field, patterns in (("targets", self.settings.targets), ("ignore", self.settings.ignore))
            for pattern in patterns
            if not any(named(each, [pattern], model) for each in model.linears.values())
        ]
        if not facts and not problems:
            what = "selects no linear in a block that ignore leaves; lm_head is never pruned"
            problems.append(Problem(f"{self._where}.targets", what))
        if self._pattern is not None and WEIGHT_SCORES[self._score].compute is None and AT_A_TIME % self._pattern.of:
            problems.append(
                Problem(
                    f"{self._where}.structure",
                    f"sparsegpt chooses {AT_A_TIME} columns at a time, which is not a multiple of {self._pattern.of};"
                    " add score: wanda, or choose another pattern",
                )
            )
        if self._pattern is not None:
            odd = [each for each in facts if each.columns % self._pattern.of]
            if odd:
                problems.append(
                    Problem(
                        f"{self._where}.structure",
                        f"{odd[0].name} and {len(odd) - 1} more: {odd[0].columns} columns are not a multiple of"
                        f" {self._pattern.of}; choose another pattern, or add these layers to ignore",
                    )
                )
        return problems

    def plan(self) -> RecipeStepPlan:
        count, nbytes = len(self._facts), self.model.weights.nbytes
        facts = {
            "structure": self.settings.structure,
            "score": self._score,
            "update": self.settings.update,
            "linears": count,
        }
        sentence = f"prune {count} linears to {self.label}: {human_bytes(nbytes)} as before"
        return RecipeStepPlan("prune", facts, nbytes, nbytes, sentence)

    def cost(self, windows: int, length: int) -> Cost:
        model = self.model
        if not self.reads_text:
            largest = max(each.numel for each in self._facts)
            block = model.largest_block() * model.dtype.itemsize
            return Cost(block + largest * 4 * 5, 2 * model.weights.nbytes, 50.0 * model.weights.nbytes)
        tokens, itemsize = windows * length, compute_dtype(model.dtype).itemsize
        memory, operations, kept, sequential = 0, 0.0, 0, 0
        pruned = {each.name for each in self._facts}
        for index, anatomy in enumerate(model.anatomy.blocks):
            facts = [model.linears[name] for name in anatomy.linears]
            largest = 0
            for group in anatomy.groups:
                mine = [model.linears[f"{anatomy.name}.{n}"] for n in group.linears if f"{anatomy.name}.{n}" in pruned]
                columns = model.linears[f"{anatomy.name}.{group.linears[0]}"].columns
                size = max((each.numel for each in mine), default=0)
                largest = max(largest, size * 4 * 4)
                if self.settings.update and mine:
                    largest = max(largest, size * 4 * 4 + 2 * columns * columns * 4)
                    operations += tokens * columns * columns + sum(f.numel for f in mine) * columns + columns**3
                    sequential += columns
            batch = max(BATCH_TOKENS, length)
            passing = batch * (2 * max(f.rows for f in facts) + 2 * max(f.columns for f in facts)) * itemsize
            memory = max(memory, model.block_numels[index] * itemsize + max(largest, passing))
            operations += {"uniform": 3.0, "owl": 5.0, "sensitivity": 12.0}[self.settings.allocation] * (
                model.block_numels[index] * tokens
            )
            tails = [model.linears[f"{anatomy.name}.{tail.linear}"].columns for tail in anatomy.tails]
            kept = max(kept, model.skeleton.hidden_size + sum(tails))
        if self.settings.allocation == "sensitivity":
            kept += (len(model.anatomy.blocks) + 2) * model.skeleton.hidden_size
            memory += LEVELS * model.largest_block() * itemsize
            memory = max(memory, model.embedding_bytes() + max(LOGIT_TOKENS, length) * model.vocabulary() * 4 * 4)
        disk = 2 * model.weights.nbytes + tokens * kept * itemsize
        return Cost(int(max(memory, model.embedding_bytes())), int(disk), operations, sequential)

    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        model, parts = self.model, self._parts(context)
        if not context.processes.is_main:
            return None
        home = {name: file for file in map(SafetensorsFile, parts) for name in file.tensors}
        write_model(model, model, target, home)
        layers = layers_of(parts)
        return self._record([f"{len(layers)} linears were pruned to {self.label}; {_NO_FASTER}"], layers)

    def _parts(self, context: RunContext) -> list[Path]:
        context.journal.mkdir(parents=True, exist_ok=True)
        model, facts = self.model, self._facts
        if self.settings.allocation == "uniform":
            self._shares = {each.name: self._share for each in facts if self._pattern is None}
        else:
            self._shares = shared_out(self.settings.allocation, self._share, facts, model, context)
        chosen = {each.name for each in facts}
        if not self.reads_text:
            return self._pruned_alone(model, chosen, context)
        pruner = _WeightPruner(model, chosen, self, context)
        run_forward(pruner, pruner.streamed, context)
        return pruner.parts

    def _pruned_alone(self, model: OpenModel, chosen: set[str], context: RunContext) -> list[Path]:
        """A part for each block, from its weights alone; written by the first process."""
        parts = block_files(context.journal, len(model.anatomy.blocks))

        def make() -> None:
            missing = [(part, at) for part, at in zip(parts, model.anatomy.blocks, strict=True) if not part.exists()]
            for part, anatomy in context.progress.track(missing, "pruning blocks", len(missing)):
                stored: dict[str, Tensor] = {}
                records: list[LayerRecord] = []
                for facts in (model.linears[name] for name in anatomy.linears if name in chosen):
                    module = model.skeleton.model.get_submodule(facts.name)
                    found, record = self.pruned(facts, as_rows(module, model.weights.load(facts.key)), None)
                    stored[facts.key] = as_rows(module, found.to(facts.dtype)).contiguous()
                    records.append(record)
                save_part(part, stored, records)

        context.processes.in_main(make)
        return parts

    def pruned(self, facts: LinearFacts, weight: Tensor, stats: LayerStats | None) -> tuple[Tensor, LayerRecord]:
        """A linear's weight ``[rows, columns]`` with zeros, in float32, and its record.

        Args:
            facts: the linear.
            weight: its weight.
            stats: of its inputs; None if no text was read, which suffices only for magnitude.
        """
        notes = [] if stats is None else reached_notes(stats)
        update, score = self.settings.update, self._score
        if stats is None:
            assert not self._reads_inputs
            assert update is None
        elif stats.tokens == 0 and self._reads_inputs:
            notes.append("no calibration token reached it, so its smallest weights were removed without compensation")
            update, score = None, "magnitude"
        elif stats.energy is not None and not stats.energy.isfinite().all():
            raise SmeltError(
                f"{facts.name}: its inputs on the calibration text are not finite; add it to ignore or use other text"
            )
        by = WEIGHT_SCORES[score]
        if by.compute is None:
            keep: Pattern | float | Tensor = self._pattern or self._shares[facts.name]
        else:
            ranked = by.compute(weight, None if stats is None else stats.energy)
            keep = (
                self._pattern.keep(ranked)
                if self._pattern
                else keep_share(ranked, self._shares[facts.name], by_row=by.by_row)
            )
        if update is None:
            assert isinstance(keep, Tensor)
            found = weight.float() * keep
        else:
            assert stats is not None
            assert stats.hessian is not None
            found, more = WEIGHT_UPDATES[update](weight, stats.hessian, keep)
            notes += more
        found = found.to(facts.dtype).float()
        error = weight_error(weight, found) if stats is None else output_error(weight, found, stats)
        if error is not None and not math.isfinite(error):
            raise SmeltError(
                f"{facts.name}: its outputs on the calibration text are not finite; add it to ignore or use other text"
            )
        if self.settings.allocation != "uniform":
            notes.append(f"{self._shares[facts.name]:.1%} of its weights were removed")
        of = "weights" if stats is None else "outputs"
        record = LayerRecord(facts.name, (facts.rows, facts.columns), self.label, significant(error), notes, of)
        self._guard.judge(record)
        return found, record

    @property
    def needs_hessian(self) -> bool:
        """Whether later columns compensate for removed weights."""
        return self.settings.update is not None

    @property
    def _share(self) -> float:
        assert self.settings.sparsity is not None
        return self.settings.sparsity

    @property
    def _reads_inputs(self) -> bool:
        return WEIGHT_SCORES[self._score].reads_inputs


class _WeightPruner(LinearPruner):
    """Sets weights of linears to zero, block by block."""

    description = "pruning blocks"

    def __init__(self, model: OpenModel, chosen: set[str], step: PreparedWeights, context: RunContext) -> None:
        super().__init__(model, streamed_model(model, context), chosen, context, hessian=step.needs_hessian)
        self._step = step

    def pruned(
        self, facts: LinearFacts, module: nn.Module, weight: Tensor, stats: LayerStats
    ) -> tuple[dict[str, Tensor], LayerRecord]:
        found, record = self._step.pruned(facts, weight, stats)
        return {facts.key: as_rows(module, found.to(facts.dtype)).contiguous()}, record

    def use(self, facts: LinearFacts, module: nn.Module, stored: dict[str, Tensor]) -> None:
        weight = stored[facts.key]
        module.weight.data = weight.to(self._context.processes.device, self.streamed.dtype)  # type: ignore[union-attr, operator]
