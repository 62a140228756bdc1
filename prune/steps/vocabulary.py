"""The prune step for the vocabulary: keeps only the tokens that a corpus uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ...models.steps.parts import data_once
from ...models.steps.smaller_model import write_model
from ...models.steps.step import Given, RecipeStepPlan, RunContext, Step, StepRecord
from ...models.structure.open_model import OpenModel
from ...models.text.text_source import TextSource
from ...models.text.windows import used_tokens
from ...system.errors import SmeltError
from ...system.hardware.resources import Cost
from ..settings.vocabulary import PruneVocabulary
from ..structure.axes import vocabulary
from ..structure.slice_width import slice_width
from ..structure.vocabulary import Vocabulary, renumbered
from .prepared import PreparedPrune


class PruneVocabularyStep(Step[PruneVocabulary]):
    """Remove tokens that a corpus never uses from the tokenizer, the embedding and lm_head."""

    @property
    def label(self) -> str:
        return f"the vocabulary of {Path(self.settings.corpus).name}"

    def prepare(self, given: Given) -> PreparedVocabulary:
        return PreparedVocabulary(self, given.model)


class PreparedVocabulary(PreparedPrune[PruneVocabulary]):
    """Pruning the vocabulary of one model."""

    def __init__(self, step: PruneVocabularyStep, model: OpenModel) -> None:
        super().__init__(step, model)
        self.reads_text = ()
        self._source = TextSource(step.settings.corpus, "calibration")
        problem = self._source.problem()
        if problem is not None:
            raise self._wrong("corpus", problem)
        try:
            self._axis, self._kept = vocabulary(model), self._used()
            self.output = self._smaller(self._kept)
        except SmeltError as error:
            field = "corpus" if str(error).startswith(self._source.label) else "structure"
            raise self._wrong(field, error) from None
        if len(self._kept) == self._axis.units:
            raise self._wrong("corpus", f"uses all {self._axis.units} tokens, so none can be removed")

    def plan(self) -> RecipeStepPlan:
        units, left = self._axis.units, len(self._kept)
        what = f"the vocabulary from {units} to {left} tokens, those of {self._source.label}"
        return self._planned({"units_before": units, "units_after": left}, what, self.output)

    def cost(self, windows: int, length: int) -> Cost:
        return Cost(2 * self.model.embedding_bytes(), self.model.weights.nbytes, 0.0)

    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        if not context.processes.is_main:
            return None
        model, kept = self.model, self._kept_once(context)
        write_model(self._smaller(kept), model, target)
        Vocabulary(model.directory.path).write(kept, target)
        done = f"{len(kept)} of {self._axis.units} tokens are left, those of {self._source.label} and the tokens they are merged from"
        return replace(self._record([done]), retokenized=True)

    def _smaller(self, kept: list[int]) -> OpenModel:
        model = self.model
        changes = renumbered(model.directory.config_data(), {old: number for number, old in enumerate(kept)})
        renamed = OpenModel(model.directory.changed(changes), model.weights, is_edited=model.is_edited)
        return slice_width(renamed, replace(self._axis, pinned={}), {"": torch.tensor(kept)})

    def _used(self) -> list[int]:
        """The tokens to keep, in order."""
        model, path = self.model, self.model.directory.path
        tokens = Vocabulary(path)
        used = used_tokens(self._source, model.directory.tokenizer())
        config = renumbered(model.directory.config_data(), {number: number for number in range(model.vocabulary())})
        named = [each for value in config.values() for each in (value if isinstance(value, list) else [value])]
        if max(used) >= model.vocabulary():
            raise SmeltError(
                f"{path}: its tokenizer produces token id {max(used)}, but the model has only {model.vocabulary()} tokens; the"
                " tokenizer belongs to another model, or an earlier step pruned the vocabulary"
            )
        return tokens.closed({*used, *(each for each in named if each is not None)}, model.vocabulary())

    def _kept_once(self, context: RunContext) -> list[int]:
        """The same, saved for a resumed run even if the corpus has changed."""
        context.journal.mkdir(parents=True, exist_ok=True)
        return data_once(context.journal / "kept_tokens.json", lambda: self._kept)
