"""The prune step for whole blocks, or a part of some: which to take away, and the model that is left."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.steps.smaller_model import last_hidden, write_model
from ...models.steps.step import RunContext, StepRecord
from ...models.streaming.streamed import LOGIT_TOKENS, HeadFunction, StreamedModel
from ...models.structure.open_model import OpenModel
from ...system.activation_store import BATCH_TOKENS, ActivationStore
from ...system.device import on
from ...system.errors import Problem, SmeltError
from ...system.files import write_text
from ...system.machine import human_bytes
from ...system.resources import Cost, compute_dtype
from ..score.influence import Influence
from ..settings import Prune
from ..structure.drop_blocks import shallower
from ..structure.removable import BlockParts, Removable, WholeBlocks, check_parts

_CHECKED_WINDOWS, _CHECKED_LENGTH = 2, 64


class PruneBlocksStep:
    """Take blocks away, or the attention or the feed-forward part of some.

    Args:
        settings: the recipe's section.
        where: how messages name this step.
    """

    quantizes = False
    leaves_zeros = False

    def __init__(self, settings: Prune, where: str) -> None:
        self.settings = settings
        self._where = where
        self._score = settings.score or "influence"

    @property
    def keeps_zeros(self) -> bool:
        return self.settings.update != "merge"  # blocks have their zeros in different places

    @property
    def label(self) -> str:
        count = self.settings.count
        if self.settings.keep is not None:
            merged = " merged" if self.settings.update else ""
            return f"blocks {', '.join(map(str, self.settings.keep))} of the original{merged}"
        plural = {"blocks": "blocks", "attention": "attentions", "mlp": "feed-forward parts"}[self.settings.structure]
        noun = plural if count is None or count > 1 else plural.removesuffix("s")
        amount = f"{self.settings.ratio:.0%} of {noun}" if count is None else f"{count} {noun}"
        return f"{amount} fewer by {self._score}{' merged' if self.settings.update else ''}"

    def check(self, model: OpenModel) -> list[Problem]:
        try:
            removable = self._removable(model)
        except SmeltError as error:
            return [Problem(f"{self._where}.structure", str(error))]
        depth = len(removable.candidates)
        if self.settings.keep is not None:
            wrong = self._wrong_mapping(model, removable)
            return [] if wrong is None else [Problem(f"{self._where}.keep", wrong)]
        count, field = self._count(model), "count" if self.settings.count is not None else "ratio"
        if count >= depth + (self.settings.structure == "mlp"):
            return [
                Problem(
                    f"{self._where}.{field}",
                    f"leaves nothing: the model has {depth} {removable.plural if depth != 1 else removable.noun};"
                    " leave at least one",
                )
            ]
        if count < 1:
            return [
                Problem(
                    f"{self._where}.{field}",
                    f"{self.settings.ratio} of {depth} {removable.plural} is less than one; give a larger share or a count",
                )
            ]
        try:
            self.outlook(model)
        except SmeltError as error:
            return [Problem(f"{self._where}.structure", str(error))]
        return []

    def _wrong_mapping(self, model: OpenModel, removable: Removable) -> str | None:
        depth, keep = len(model.anatomy.blocks), self.settings.keep or []
        if keep[-1] >= depth:
            return f"there is no block {keep[-1]}; the model has those from 0 to {depth - 1}"
        removed = self._unmapped(model)
        if not removed:
            return f"keeps all {depth} blocks; leave some of them out"
        stuck = sorted(set(removed) - set(removable.candidates))
        if stuck:
            return f"block {stuck[0]} differs from the others by its number and cannot go; keep it, too"
        try:
            self.outlook(model)
        except SmeltError as error:
            return str(error)
        return None

    def _unmapped(self, model: OpenModel) -> list[int]:
        return [index for index in range(len(model.anatomy.blocks)) if index not in (self.settings.keep or [])]

    def outlook(self, model: OpenModel) -> OpenModel:
        removable = self._removable(model)
        if self.settings.keep is not None:
            return removable.left(self._unmapped(model))
        return removable.left(removable.candidates[len(removable.candidates) - self._count(model) :])

    def plan(self, model: OpenModel) -> dict[str, Any]:
        after = self.outlook(model)
        before_bytes, after_bytes = model.weights.nbytes, after.weights.nbytes
        removable = self._removable(model)
        count, depth = self._count(model), len(removable.candidates)
        return {
            "step": "prune",
            "structure": self.settings.structure,
            "score": None if self.settings.keep is not None else self._score,
            "removed": count,
            "of": depth,
            "bytes_before": before_bytes,
            "bytes_after": after_bytes,
            "checkpoint_bytes": after_bytes,
            "stays_packed": True,
            "sentence": f"prune {count} of {depth} {removable.plural}"
            f"{'' if self.settings.keep is not None else f' by {self._score}'}:"
            f" {human_bytes(before_bytes)} -> {human_bytes(after_bytes)}",
        }

    def reads_text(self, model: OpenModel) -> list[str]:
        return [] if self.settings.keep is not None else [f"score {self._score}"]

    def cost(self, model: OpenModel, windows: int, length: int) -> Cost:
        depth, tokens = len(model.anatomy.blocks), windows * length
        number = compute_dtype(model.dtype).itemsize
        width = max(
            max(facts.rows, facts.columns) for name, facts in model.linears.items() if name != model.anatomy.head
        )
        memory = model.largest_block() * number + max(BATCH_TOKENS, length) * 4 * width * number
        memory = max(memory, model.embedding_bytes())
        numel = sum(model.block_numel(index) for index in range(depth))
        hidden = tokens * model.skeleton.hidden_size * number
        parts = 1 + (self.settings.structure != "blocks")  # a block runs with the part and without
        operations, stores = 2.0 * tokens * numel * parts, 1
        if self._score == "loss":
            head = model.linears[model.anatomy.head].numel
            logits = max(LOGIT_TOKENS, length) * model.vocabulary() * 4 * 3
            memory = max(memory, model.embedding_bytes() + logits)
            rounds = self._count(model)
            operations, stores = rounds * (tokens * numel * depth + 2.0 * tokens * head * depth), 2
        if self.settings.keep is not None:
            operations = 0.0
        return Cost(int(memory), int(model.weights.nbytes + stores * hidden), operations)

    def run(self, model: OpenModel, context: RunContext, target: Path) -> StepRecord:
        removable = self._removable(model)

        def tried() -> tuple[dict[str, Tensor], None]:
            if self.settings.structure != "blocks":
                tokens = context.tokens[:_CHECKED_WINDOWS, :_CHECKED_LENGTH]
                context.journal.mkdir(parents=True, exist_ok=True)
                check_parts(model, StreamedModel(model.skeleton, model.weights, context.dtype, context.journal), tokens)
            return {}, None

        context.processes.from_first(tried)
        removed, record = self._decided(model, removable, context)

        def verified() -> tuple[dict[str, Tensor], None]:
            if self.settings.structure == "blocks":
                self._verify(model, shallower(model, removed), removed, context)
            return {}, None

        context.processes.from_first(verified)
        after = removable.left(removed)
        write_model(after, model, target)
        return StepRecord(
            "prune", self.settings.model_dump(mode="json"), [], [], record, [self._told(removable, removed, record)]
        )

    def help(self, model: OpenModel, context: RunContext) -> None:
        context.processes.wait()  # for what the first tries
        self._decided(model, self._removable(model), context)
        context.processes.wait()  # for what the first verifies

    def _count(self, model: OpenModel) -> int:
        if self.settings.keep is not None:
            return len(self._unmapped(model))
        if self.settings.count is not None:
            return self.settings.count
        assert self.settings.ratio is not None
        return round(self.settings.ratio * len(self._removable(model).candidates))

    def _removable(self, model: OpenModel) -> Removable:
        if self.settings.structure == "blocks":
            return WholeBlocks(model, merging=self.settings.update == "merge")
        return BlockParts(model, self.settings.structure)

    def _told(self, removable: Removable, removed: list[int], record: dict[str, Any]) -> str:
        numbers = ", ".join(str(index) for index in removed)
        noun = removable.plural if len(removed) > 1 else removable.noun
        what = f"{noun} {numbers} {'were' if len(removed) > 1 else 'was'} removed"
        if self.settings.keep is not None:
            return f"{what}, as the recipe says"
        if "influence" in record:
            scores = ", ".join(f"{record['influence'][0][str(index)]:.3f}" for index in removed)
            what += f" (influence {scores})"
        else:
            losses = ", ".join(f"{min(turn.values()):.3f}" for turn in record["loss"])
            what += f" (loss on the calibration text after each removal: {losses})"
        if self.settings.structure == "blocks":
            return what
        return (
            f"{what}; the checkpoint holds zeros in their place, so it loads anywhere and is as large as before: only Smelt's"
            " runtime leaves them out"
        )

    def _decided(self, model: OpenModel, removable: Removable, context: RunContext) -> tuple[list[int], dict[str, Any]]:
        """Which blocks go, and the scores that said so; what an interrupted run has measured is not measured again."""
        if self.settings.keep is not None:
            removed = self._unmapped(model)
            context.journal.mkdir(parents=True, exist_ok=True)
            return removed, {"removed": removed}
        context.journal.mkdir(parents=True, exist_ok=True)
        file = context.journal / "scores.json"
        known: list[dict[str, float]] = []
        _, known = context.processes.from_first(
            lambda: ({}, json.loads(file.read_text(encoding="utf-8")) if file.exists() else [])
        )
        scores = _Scores(model, removable, context, file, known)
        with on(context.processes.device), torch.no_grad():
            removed = (
                scores.least_influential(self._count(model))
                if self._score == "influence"
                else scores.least_missed(self._count(model))
            )
        return removed, {"removed": removed, self._score: known}

    def _verify(self, model: OpenModel, after: OpenModel, removed: list[int], context: RunContext) -> None:
        """See that what is left computes what the whole model does when it passes over those blocks."""
        tokens = context.tokens[:_CHECKED_WINDOWS, :_CHECKED_LENGTH]
        wanted = last_hidden(model, tokens, context.dtype, context.journal, removed)
        if not torch.equal(wanted, last_hidden(after, tokens, context.dtype, context.journal)):
            raise SmeltError(
                f"{self._where}: {type(model.skeleton.model).__name__} computes with the number of a block, so that"
                " the others change when one is taken away; its blocks cannot be pruned"
            )


class _Scores:
    """Measures what blocks do; known results are kept in a file as they come.

    Args:
        model: the whole model.
        removable: what may go.
        context: the run.
        file: where results are kept.
        known: one dict a round, from a block's number to its score; added to in place.
    """

    def __init__(
        self,
        model: OpenModel,
        removable: Removable,
        context: RunContext,
        file: Path,
        known: list[dict[str, float]],
    ) -> None:
        self._removable = removable
        self._context = context
        self._file = file
        self._known = known
        self._streamed = StreamedModel(
            model.skeleton, model.weights, context.dtype, context.journal, device=context.processes.device
        )
        self._tokens = context.processes.share(context.tokens)

    def least_influential(self, count: int) -> list[int]:
        """Those without which what leaves their block turns least."""
        candidates, depth = self._removable.candidates, len(self._streamed)
        if not self._known:
            self._known.append({})
            store = self._streamed.embed(self._tokens)
            try:
                for index in self._context.progress.track(range(depth), "measuring blocks", depth):
                    influence = Influence()
                    with self._streamed.block(index) as block:
                        for batch in store.batches():
                            before = store.read(batch)
                            after = self._streamed.call(index, before).run(block, before)
                            if index in candidates:
                                without = self._removable.without(index, self._streamed, block, before)
                                influence.add(without, after)
                            store.write(batch, after)
                    if index in candidates:
                        self._context.processes.sum_(influence.sums)
                        self._known[0][str(index)] = _finite(influence.value, index)
            finally:
                store.close()
            self._keep()
        scores = self._known[0]
        removed: list[int] = []
        for index in sorted(candidates, key=lambda index: scores[str(index)]):
            if len(removed) < count and self._removable.possible([*removed, index]):
                removed.append(index)
        self._see_enough(len(removed), count)
        return sorted(removed)

    def least_missed(self, count: int) -> list[int]:
        """One after another, that without which the text is predicted best."""
        removed: list[int] = []
        for turn in range(count):
            if len(self._known) == turn:
                self._known.append({})
            left = [index for index in self._removable.candidates if index not in removed]
            possible = [index for index in left if self._removable.possible([*removed, index])]
            if not possible:
                self._see_enough(turn, count)
            if any(str(index) not in self._known[turn] for index in left):
                told = f"removing {self._removable.noun} {turn + 1} of {count}"
                self._measure_without(left, removed, self._known[turn], told)
            removed.append(min(possible, key=lambda index: self._known[turn][str(index)]))
        return sorted(removed)

    def _see_enough(self, found: int, count: int) -> None:
        if found < count:
            raise SmeltError(
                f"only {found} of {count} {self._removable.plural} can go: config.json cannot say which are left without"
                " others; remove fewer"
            )

    def _measure_without(self, left: list[int], removed: list[int], known: dict[str, float], told: str) -> None:
        """The loss without each of those that are left, in turn."""
        entering = self._streamed.embed(self._tokens)
        head = self._streamed.head()
        trial = entering.beside(entering.shape[2])
        depth = range(len(self._streamed))
        try:
            for index in self._context.progress.track(depth, told, len(depth)):
                if index in left and str(index) not in known:
                    self._pass(index, entering, trial, without=True)
                    for other in depth[index + 1 :]:
                        self._pass(other, trial, trial, without=other in removed)
                    known[str(index)] = _finite(self._loss(head, trial), index)
                    self._keep()
                self._pass(index, entering, entering, without=index in removed)
        finally:
            entering.close()
            trial.close()

    def _pass(self, index: int, source: ActivationStore, target: ActivationStore, *, without: bool) -> None:
        if without and isinstance(self._removable, WholeBlocks):
            if source is not target:
                for batch in source.batches():
                    target.write(batch, source.read(batch))
            return
        with self._streamed.block(index) as block:
            for batch in source.batches():
                hidden = source.read(batch)
                if without:
                    hidden = self._removable.without(index, self._streamed, block, hidden)
                else:
                    hidden = self._streamed.call(index, hidden).run(block, hidden)
                target.write(batch, hidden)

    def _loss(self, head: HeadFunction, store: ActivationStore) -> float:
        """Mean loss of the next tokens, over the windows of all processes."""
        sums = torch.zeros(2, dtype=torch.float64)
        windows, length, _ = store.shape
        size = max(1, LOGIT_TOKENS // length)
        for start in range(0, windows, size):
            part = slice(start, min(start + size, windows))
            logits: Tensor = head(store.read(part))[:, :-1].float()
            wanted = self._tokens[part, 1:].to(logits.device)
            lost = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
            sums += torch.tensor([lost.item(), wanted.numel()], dtype=torch.float64)
        self._context.processes.sum_(sums)
        return (sums[0] / sums[1]).item()

    def _keep(self) -> None:
        if self._context.processes.leads:
            write_text(self._file, json.dumps(self._known) + "\n")


def _finite(score: float, index: int) -> float:
    if not math.isfinite(score):
        raise SmeltError(f"the score of block {index} on the calibration text is not finite; use other text")
    return score
