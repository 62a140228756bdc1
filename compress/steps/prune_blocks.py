"""The prune step for whole blocks: which to take away, and the model that is left."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...prune.influence import Influence
from ...runtime.device import on
from ...runtime.machine import human_bytes
from ..activations import BATCH_TOKENS, ActivationStore
from ..errors import Problem, SmeltError
from ..evaluation.text import LOGIT_TOKENS
from ..open_model import OpenModel
from ..recipe import Prune
from ..resources import Cost, compute_dtype
from ..safetensors_file import write_text
from ..shallower import can_lose, shallower
from ..streamed import HeadFunction, StreamedModel
from .smaller_model import last_hidden, write_model
from .step import RunContext, StepRecord

_CHECKED_WINDOWS, _CHECKED_LENGTH = 2, 64


class PruneBlocksStep:
    """Take whole blocks away.

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
        amount = f"{self.settings.ratio:.0%} of blocks" if count is None else _blocks(count)
        return f"{amount} fewer by {self._score}{' merged' if self.settings.update else ''}"

    def check(self, model: OpenModel) -> list[Problem]:
        depth, count = len(model.anatomy.blocks), self._count(model)
        field = "count" if self.settings.count is not None else "ratio"
        if count >= depth:
            return [
                Problem(
                    f"{self._where}.{field}",
                    f"leaves nothing: the model has {_blocks(depth)}; leave at least one",
                )
            ]
        if count < 1:
            return [
                Problem(
                    f"{self._where}.{field}",
                    f"{self.settings.ratio} of {depth} blocks is less than one; give a larger share or a count",
                )
            ]
        try:
            self.outlook(model)
        except SmeltError as error:
            return [Problem(f"{self._where}.structure", str(error))]
        return []

    def outlook(self, model: OpenModel) -> OpenModel:
        depth = len(model.anatomy.blocks)
        return self._left(model, range(depth - self._count(model), depth))

    def plan(self, model: OpenModel) -> dict[str, Any]:
        after = self.outlook(model)
        before_bytes, after_bytes = model.weights.nbytes, after.weights.nbytes
        count, depth = self._count(model), len(model.anatomy.blocks)
        return {
            "step": "prune",
            "structure": self.settings.structure,
            "score": self._score,
            "removed": count,
            "of": depth,
            "bytes_before": before_bytes,
            "bytes_after": after_bytes,
            "checkpoint_bytes": after_bytes,
            "stays_packed": True,
            "sentence": f"prune {count} of {depth} blocks by {self._score}:"
            f" {human_bytes(before_bytes)} -> {human_bytes(after_bytes)}",
        }

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
        operations, stores = 2.0 * tokens * numel, 1
        if self._score == "loss":
            head = model.linears[model.anatomy.head].numel
            logits = max(LOGIT_TOKENS, length) * model.vocabulary() * 4 * 3
            memory = max(memory, model.embedding_bytes() + logits)
            rounds = self._count(model)
            operations, stores = rounds * (tokens * numel * depth + 2.0 * tokens * head * depth), 2
        return Cost(int(memory), int(model.weights.nbytes + stores * hidden), operations)

    def run(self, model: OpenModel, context: RunContext, target: Path) -> StepRecord:
        removed, record = self._decided(model, context)

        def verified() -> tuple[dict[str, Tensor], None]:
            self._verify(model, shallower(model, removed), removed, context)
            return {}, None

        context.processes.from_first(verified)
        after = self._left(model, removed)
        write_model(after, model, target)
        return StepRecord("prune", self.settings.model_dump(mode="json"), [], [], record, [_told(removed, record)])

    def help(self, model: OpenModel, context: RunContext) -> None:
        self._decided(model, context)
        context.processes.wait()  # for what the first verifies

    def _count(self, model: OpenModel) -> int:
        if self.settings.count is not None:
            return self.settings.count
        assert self.settings.ratio is not None
        return round(self.settings.ratio * len(model.anatomy.blocks))

    def _left(self, model: OpenModel, removed: Iterable[int]) -> OpenModel:
        return shallower(model, removed, merging=self.settings.update == "merge")

    def _decided(self, model: OpenModel, context: RunContext) -> tuple[list[int], dict[str, Any]]:
        """Which blocks go, and the scores that said so; what an interrupted run has measured is not measured again."""
        context.journal.mkdir(parents=True, exist_ok=True)
        file = context.journal / "scores.json"
        known: list[dict[str, float]] = []
        _, known = context.processes.from_first(
            lambda: ({}, json.loads(file.read_text(encoding="utf-8")) if file.exists() else [])
        )
        scores = _Scores(model, context, file, known)
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
        context: the run.
        file: where results are kept.
        known: one dict a round, from a block's number to its score; added to in place.
    """

    def __init__(self, model: OpenModel, context: RunContext, file: Path, known: list[dict[str, float]]) -> None:
        self._model = model
        self._context = context
        self._file = file
        self._known = known
        self._streamed = StreamedModel(
            model.skeleton, model.weights, context.dtype, context.journal, device=context.processes.device
        )
        self._tokens = context.processes.share(context.tokens)

    def least_influential(self, count: int) -> list[int]:
        """The blocks that turn their inputs least."""
        if not self._known:
            self._known.append({})
            store = self._streamed.embed(self._tokens)
            depth = len(self._streamed)
            try:
                for index in self._context.progress.track(range(depth), "measuring blocks", depth):
                    influence = Influence()
                    with self._streamed.block(index) as block:
                        for batch in store.batches():
                            before = store.read(batch)
                            after = self._streamed.call(index, before).run(block, before)
                            influence.add(before, after)
                            store.write(batch, after)
                    self._context.processes.sum_(influence.sums)
                    self._known[0][str(index)] = _finite(influence.value, index)
            finally:
                store.close()
            self._keep()
        scores = self._known[0]
        removed: list[int] = []
        for index in sorted(range(len(self._streamed)), key=lambda index: scores[str(index)]):
            if len(removed) < count and can_lose(self._model, [*removed, index]):
                removed.append(index)
        if len(removed) < count:
            raise SmeltError(
                f"only {len(removed)} of {count} blocks can go: config.json cannot say which are left without others;"
                " remove fewer"
            )
        return sorted(removed)

    def least_missed(self, count: int) -> list[int]:
        """One after another, the block without which the text is predicted best."""
        removed: list[int] = []
        depth = len(self._streamed)
        for turn in range(count):
            if len(self._known) == turn:
                self._known.append({})
            left = [index for index in range(depth) if index not in removed]
            possible = [index for index in left if can_lose(self._model, [*removed, index])]
            if not possible:
                raise SmeltError(
                    f"only {turn} of {count} blocks can go: config.json cannot say which are left without others;"
                    " remove fewer"
                )
            if any(str(index) not in self._known[turn] for index in left):
                self._measure_without(left, self._known[turn], f"removing block {turn + 1} of {count}")
            removed.append(min(possible, key=lambda index: self._known[turn][str(index)]))
        return sorted(removed)

    def _measure_without(self, left: list[int], known: dict[str, float], told: str) -> None:
        """The loss without each of the blocks that are left, in turn."""
        entering = self._streamed.embed(self._tokens)
        head = self._streamed.head()
        trial = entering.beside(entering.shape[2])
        try:
            for place, index in enumerate(self._context.progress.track(left, told, len(left))):
                if str(index) not in known:
                    for batch in entering.batches():
                        trial.write(batch, entering.read(batch))
                    for other in left[place + 1 :]:
                        self._pass(other, trial)
                    known[str(index)] = _finite(self._loss(head, trial), index)
                    self._keep()
                if place + 1 < len(left):
                    self._pass(index, entering)
        finally:
            entering.close()
            trial.close()

    def _pass(self, index: int, store: ActivationStore) -> None:
        with self._streamed.block(index) as block:
            self._streamed.run_block(index, block, store)

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


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count > 1)}"


def _told(removed: list[int], record: dict[str, Any]) -> str:
    numbers = ", ".join(str(index) for index in removed)
    what = f"blocks {numbers} were" if len(removed) > 1 else f"block {numbers} was"
    if "influence" in record:
        scores = ", ".join(f"{record['influence'][0][str(index)]:.3f}" for index in removed)
        return f"{what} removed (influence {scores})"
    losses = ", ".join(f"{min(turn.values()):.3f}" for turn in record["loss"])
    return f"{what} removed (loss on the calibration text after each removal: {losses})"
