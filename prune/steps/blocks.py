"""The prune step for whole blocks, or the attention or feed-forward part of some."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...models.steps.block_loop import forward, streamed_model
from ...models.steps.parts import Measured
from ...models.steps.smaller_model import last_hidden, write_model
from ...models.steps.step import Given, RecipeStepPlan, RunContext, Step, StepRecord
from ...models.streaming.streamed import LOGIT_TOKENS, HeadFunction, StreamedModel
from ...models.structure.open_model import OpenModel
from ...system.errors import SmeltError
from ...system.hardware.device import on
from ...system.hardware.resources import Cost, compute_dtype
from ...system.storage.activation_store import BATCH_TOKENS, ActivationStore
from ..score.blocks import BLOCK_SCORES, BlockScore
from ..settings.blocks import PruneBlocks, PruneParts
from ..structure.drop_blocks import drop_blocks
from ..structure.removable import BlockParts, Removable, WholeBlocks, check_parts
from .prepared import PreparedPrune

_CHECKED_WINDOWS, _CHECKED_LENGTH = 2, 64


class PruneBlocksStep(Step[PruneBlocks | PruneParts]):
    """Remove blocks, or the attention or feed-forward part of some."""

    @property
    def score(self) -> str:
        """What ranks them."""
        return self.settings.score or "influence"

    @property
    def changes_zeros(self) -> str | None:
        return "update: merge" if self.settings.update == "merge" else None  # blocks have zeros at different positions

    @property
    def label(self) -> str:
        count = self.settings.count
        if self.settings.keep is not None:
            merged = " merged" if self.settings.update else ""
            return f"blocks {', '.join(map(str, self.settings.keep))} of the original{merged}"
        plural = {"blocks": "blocks", "attention": "attentions", "mlp": "feed-forward parts"}[self.settings.structure]
        noun = plural if count is None or count > 1 else plural.removesuffix("s")
        amount = f"{self.settings.ratio:.0%} of {noun}" if count is None else f"{count} {noun}"
        return f"{amount} removed by {self.score}{' merged' if self.settings.update else ''}"

    def prepare(self, given: Given) -> PreparedBlocks:
        return PreparedBlocks(self, given.model)


class PreparedBlocks(PreparedPrune[PruneBlocks | PruneParts]):
    """Removing blocks of one model, or parts of them."""

    def __init__(self, step: PruneBlocksStep, model: OpenModel) -> None:
        super().__init__(step, model)
        self._score, structure, keep = step.score, step.settings.structure, step.settings.keep
        self.reads_text = [] if keep is not None else [f"score {step.score}"]
        try:
            self._removable: Removable = (
                WholeBlocks(model, merging=step.settings.update == "merge")
                if structure == "blocks"
                else BlockParts(model, structure)
            )
        except SmeltError as error:
            raise self._wrong("structure", error) from None
        self._unmapped = [index for index in range(len(model.anatomy.blocks)) if index not in (keep or [])]
        if keep is None:
            self._count = self._counted()
        else:
            self._count = len(self._unmapped)
            self._check_mapping(keep)
        candidates = self._removable.candidates
        try:
            self.output = self._removable.left(
                self._unmapped if keep is not None else candidates[len(candidates) - self._count :]
            )
        except SmeltError as error:
            raise self._wrong("structure" if keep is None else "keep", error) from None

    def _counted(self) -> int:
        """How many are removed."""
        settings, removable, depth = self.settings, self._removable, len(self._removable.candidates)
        if settings.count is not None:
            count = settings.count
        else:
            assert settings.ratio is not None
            count = round(settings.ratio * depth)
        if count >= depth + (settings.structure == "mlp"):
            nouns = removable.plural if depth != 1 else removable.noun
            raise self._wrong_amount(f"leaves nothing: the model has {depth} {nouns}; leave at least one")
        if count < 1:
            what = f"{settings.ratio} of {depth} {removable.plural} is less than one; raise the ratio or give a count"
            raise self._wrong_amount(what)
        return count

    def _check_mapping(self, keep: list[int]) -> None:
        depth = len(self.model.anatomy.blocks)
        if keep[-1] >= depth:
            raise self._wrong("keep", f"block {keep[-1]} does not exist; the model has blocks 0 to {depth - 1}")
        if not self._unmapped:
            raise self._wrong("keep", f"keeps all {depth} blocks; omit some of them")
        stuck = sorted(set(self._unmapped) - set(self._removable.candidates))
        if stuck:
            what = f"block {stuck[0]} differs from the others by its index and cannot be removed; keep it, too"
            raise self._wrong("keep", what)

    def plan(self) -> RecipeStepPlan:
        removable, count, depth = self._removable, self._count, len(self._removable.candidates)
        score = None if self.settings.keep is not None else self._score
        by = "" if score is None else f" by {score}"
        facts = {"score": score, "removed": count, "of": depth}
        return self._planned(facts, f"{count} of {depth} {removable.plural}{by}", self.output)

    def cost(self, windows: int, length: int) -> Cost:
        model = self.model
        depth, tokens = len(model.anatomy.blocks), windows * length
        itemsize = compute_dtype(model.dtype).itemsize
        width = max(max(facts.rows, facts.columns) for facts in model.block_linears)
        memory = model.largest_block() * itemsize + max(BATCH_TOKENS, length) * 4 * width * itemsize
        memory = max(memory, model.embedding_bytes())
        numel = sum(model.block_numels)
        hidden = tokens * model.skeleton.hidden_size * itemsize
        parts = 1 + (self.settings.structure != "blocks")  # a block runs with and without the part
        operations, stores = 2.0 * tokens * numel * parts, 1
        if self._score == "loss":
            logits = max(LOGIT_TOKENS, length) * model.vocabulary() * 4 * 3
            memory = max(memory, model.embedding_bytes() + logits)
            rounds = self._count
            operations, stores = rounds * (tokens * numel * depth + 2.0 * tokens * model.head.numel * depth), 2
        if self.settings.keep is not None:
            operations = 0.0
        return Cost(int(memory), int(model.weights.nbytes + stores * hidden), operations)

    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        model, removable = self.model, self._removable
        whole_blocks = self.settings.structure == "blocks"
        if not whole_blocks:
            context.processes.in_main(lambda: self._check_parts(context))
        removed, record = self._decided(context)
        if whole_blocks:
            context.processes.in_main(lambda: self._verify(drop_blocks(model, removed), removed, context))
        if not context.processes.is_main:
            return None
        after = removable.left(removed)
        write_model(after, model, target)
        return self._record([self._sentence(removed, record)], chosen=record)

    def _check_parts(self, context: RunContext) -> None:
        tokens, model = context.tokens[:_CHECKED_WINDOWS, :_CHECKED_LENGTH], self.model
        context.journal.mkdir(parents=True, exist_ok=True)
        check_parts(model, StreamedModel(model.skeleton, model.weights, context.dtype, context.journal), tokens)

    def _sentence(self, removed: list[int], record: dict[str, Any]) -> str:
        removable, numbers = self._removable, ", ".join(str(index) for index in removed)
        noun = removable.plural if len(removed) > 1 else removable.noun
        what = f"{noun} {numbers} {'were' if len(removed) > 1 else 'was'} removed"
        if self.settings.keep is not None:
            return f"{what}, as the recipe says"
        if BLOCK_SCORES[self._score].of_block is not None:
            scores = ", ".join(f"{record[self._score][0][str(index)]:.3f}" for index in removed)
            what += f" ({self._score} {scores})"
        else:
            losses = ", ".join(f"{min(turn.values()):.3f}" for turn in record[self._score])
            what += f" ({self._score} on the calibration text after each removal: {losses})"
        if self.settings.structure == "blocks":
            return what
        return (
            f"{what}; the checkpoint has zeros instead, so it loads anywhere and is as large as before: only Smelt's"
            " runtime skips them"
        )

    def _decided(self, context: RunContext) -> tuple[list[int], dict[str, Any]]:
        """The blocks to remove, and their scores; measurements of an interrupted run are reused."""
        context.journal.mkdir(parents=True, exist_ok=True)
        if self.settings.keep is not None:
            return self._unmapped, {"removed": self._unmapped}
        score = BLOCK_SCORES[self._score]
        scores = _Scores(score, self.model, self._removable, context)
        with on(context.processes.device), torch.no_grad():
            removed = (
                scores.least_missed(self._count) if score.of_block is None else scores.least_influential(self._count)
            )
        return removed, {"removed": removed, self._score: scores.rounds}

    def _verify(self, after: OpenModel, removed: list[int], context: RunContext) -> None:
        """Check that the result computes the same as the whole model with those blocks skipped."""
        model, tokens = self.model, context.tokens[:_CHECKED_WINDOWS, :_CHECKED_LENGTH]
        wanted = last_hidden(model, tokens, context.dtype, context.journal, removed)
        if not torch.equal(wanted, last_hidden(after, tokens, context.dtype, context.journal)):
            raise SmeltError(
                f"{self._where}: {model.architecture} depends on block numbers, so that"
                " removing one changes the others; its blocks cannot be pruned"
            )


class _Scores:
    """Measures the importance of blocks, each once.

    Args:
        score: what is measured.
        model: the whole model.
        removable: what may be removed.
        context: the run.

    Attributes:
        rounds: one dict per round, from a block's number to its score.
    """

    def __init__(self, score: BlockScore, model: OpenModel, removable: Removable, context: RunContext) -> None:
        self._score = score
        self._removable = removable
        self._context = context
        self._measured = Measured(context.journal / "scores.json", context.processes)
        self.rounds: list[dict[str, float]] = []
        self._streamed = streamed_model(model, context)
        self._tokens = context.processes.share(context.tokens)

    def least_influential(self, count: int) -> list[int]:
        """Those whose removal changes the direction of the hidden states least."""
        candidates = self._removable.candidates
        scores = self._influences()
        self.rounds.append(scores)
        removed: list[int] = []
        for index in sorted(candidates, key=lambda index: scores[str(index)]):
            if len(removed) < count and self._removable.possible([*removed, index]):
                removed.append(index)
        self._see_enough(len(removed), count)
        return sorted(removed)

    def least_missed(self, count: int) -> list[int]:
        """Greedily, one after another, the one without which the loss is lowest."""
        removed: list[int] = []
        for turn in range(count):
            left = [index for index in self._removable.candidates if index not in removed]
            possible = [index for index in left if self._removable.possible([*removed, index])]
            if not possible:
                self._see_enough(turn, count)
            description = f"removing {self._removable.noun} {turn + 1} of {count}"
            losses = self._losses_without(left, removed, description)
            self.rounds.append(losses)
            removed.append(min(possible, key=lambda index: losses[str(index)]))
        return sorted(removed)

    def _see_enough(self, found: int, count: int) -> None:
        if found < count:
            raise SmeltError(
                f"only {found} of {count} {self._removable.plural} can be removed: config.json cannot express which are left without"
                " others; remove fewer"
            )

    def _influences(self) -> dict[str, float]:
        candidates, progress = self._removable.candidates, self._context.progress
        if any(str(index) not in self._measured.known for index in candidates):
            with forward(self._streamed, self._tokens, progress, "measuring blocks") as (store, blocks):
                for index in blocks:
                    with self._streamed.block(index) as block:
                        if index in candidates and str(index) not in self._measured.known:
                            self._measured.once(str(index), partial(self._influence, index, block, store))
                        else:
                            self._streamed.run_block(index, block, store)
        return {str(index): self._measured.known[str(index)] for index in candidates}

    def _influence(self, index: int, block: nn.Module, store: ActivationStore) -> float:
        """A block's influence; the hidden states in ``store`` become its outputs."""
        assert self._score.of_block is not None
        influence = self._score.of_block()
        for batch in store.batches():
            before = store.read(batch)
            after = self._streamed.call(index, before).run(block, before)
            influence.add(self._removable.without(index, self._streamed, block, before), after)
            store.write(batch, after)
        self._context.processes.sum_(influence.sums)
        return _finite(influence.value, index)

    def _losses_without(self, left: list[int], removed: list[int], description: str) -> dict[str, float]:
        """The loss without each remaining one in turn."""
        names = {index: f"{index} without {removed}" for index in left}
        if any(name not in self._measured.known for name in names.values()):
            self._measure_without(names, removed, description)
        return {str(index): self._measured.known[name] for index, name in names.items()}

    def _measure_without(self, names: dict[int, str], removed: list[int], description: str) -> None:
        passing = forward(self._streamed, self._tokens, self._context.progress, description)
        with passing as (entering, blocks), closing(entering.beside(entering.shape[2])) as trial:
            head = self._streamed.head()
            for index in blocks:
                if index in names and names[index] not in self._measured.known:
                    self._pass(index, entering, trial, without=True)
                    for other in range(index + 1, len(self._streamed)):
                        self._pass(other, trial, trial, without=other in removed)
                    loss = _finite(self._loss(head, trial), index)
                    self._measured.once(names[index], lambda loss=loss: loss)
                self._pass(index, entering, entering, without=index in removed)

    def _pass(self, index: int, source: ActivationStore, target: ActivationStore, *, without: bool) -> None:
        if without and isinstance(self._removable, WholeBlocks):
            if source is not target:
                for batch in source.batches():
                    target.write(batch, source.read(batch))
            return
        with self._streamed.block(index) as block:
            if not without:
                self._streamed.run_block(index, block, source, target)
                return
            for batch in source.batches():
                target.write(batch, self._removable.without(index, self._streamed, block, source.read(batch)))

    def _loss(self, head: HeadFunction, store: ActivationStore) -> float:
        """Mean next-token loss over the windows of all processes."""
        assert self._score.of_rest is not None
        sums = torch.tensor(self._score.of_rest(head, store, self._tokens), dtype=torch.float64)
        self._context.processes.sum_(sums)
        return (sums[0] / sums[1]).item()


def _finite(score: float, index: int) -> float:
    if not math.isfinite(score):
        raise SmeltError(f"the score of block {index} on the calibration text is not finite; use other text")
    return score
