"""The prune step for the vocabulary: only the tokens that a corpus uses stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.steps.parts import load_part
from ...models.steps.smaller_model import write_model
from ...models.steps.step import RunContext, StepRecord
from ...models.structure.open_model import OpenModel
from ...models.text.source import TextSource
from ...models.text.windows import used_tokens
from ...system.errors import Problem, SmeltError
from ...system.machine import human_bytes
from ...system.resources import Cost
from ...system.tensor_files import save_tensors
from ..settings import Prune
from ..structure.axes import Axis, vocabulary
from ..structure.slice_width import narrower
from ..structure.vocabulary import Vocabulary, renumbered


class PruneVocabularyStep:
    """Take tokens that a corpus never uses from the tokenizer, the embedding and the head.

    Args:
        settings: the recipe's section.
        where: how messages name this step.
    """

    quantizes = False
    leaves_zeros = False
    keeps_zeros = True

    def __init__(self, settings: Prune, where: str) -> None:
        self.settings = settings
        self._where = where
        assert settings.corpus is not None
        self._source = TextSource(settings.corpus, "calibration")
        self._known: tuple[Path, list[int]] | None = None

    @property
    def label(self) -> str:
        return f"the vocabulary of {Path(self.settings.corpus or '').name}"

    def check(self, model: OpenModel) -> list[Problem]:
        problem = self._source.problem()
        if problem is not None:
            return [Problem(f"{self._where}.corpus", problem)]
        try:
            axis, kept = vocabulary(model), self._kept(model)
            self.outlook(model)
        except SmeltError as error:
            field = "corpus" if str(error).startswith(self._source.label) else "structure"
            return [Problem(f"{self._where}.{field}", str(error))]
        if len(kept) == axis.units:
            return [Problem(f"{self._where}.corpus", f"uses all {axis.units} tokens, so none can go")]
        return []

    def outlook(self, model: OpenModel) -> OpenModel:
        return self._smaller(model, vocabulary(model), self._kept(model))

    def plan(self, model: OpenModel) -> dict[str, Any]:
        axis, kept = vocabulary(model), self._kept(model)
        before, after = model.weights.nbytes, self.outlook(model).weights.nbytes
        return {
            "step": "prune",
            "structure": "vocabulary",
            "units_before": axis.units,
            "units_after": len(kept),
            "bytes_before": before,
            "bytes_after": after,
            "checkpoint_bytes": after,
            "stays_packed": True,
            "sentence": f"prune the vocabulary from {axis.units} to {len(kept)} tokens, those of {self._source.label}:"
            f" {human_bytes(before)} -> {human_bytes(after)}",
        }

    def reads_text(self, model: OpenModel) -> list[str]:
        return []  # but the corpus that it is given

    def cost(self, model: OpenModel, windows: int, length: int) -> Cost:
        return Cost(2 * model.embedding_bytes(), model.weights.nbytes, 0.0)

    def run(self, model: OpenModel, context: RunContext, target: Path) -> StepRecord:
        axis, kept = vocabulary(model), self._kept_once(model, context)
        write_model(self._smaller(model, axis, kept), model, target)
        Vocabulary(model.directory.path).write(kept, target)
        done = f"{len(kept)} of {axis.units} tokens are left, those of {self._source.label} and what they are made of"
        settings = self.settings.model_dump(mode="json")
        return StepRecord("prune", settings, [], list(model.anatomy.unknown), None, [done], retokenized=True)

    def help(self, model: OpenModel, context: RunContext) -> None:
        """It is the first process's work alone."""

    def _smaller(self, model: OpenModel, axis: Axis, kept: list[int]) -> OpenModel:
        changes = renumbered(model.directory.config_data(), {old: number for number, old in enumerate(kept)})
        directory = replace(model.directory, changes={**model.directory.changes, **changes})
        renamed = OpenModel(directory, model.weights, is_edited=model.is_edited)
        return narrower(renamed, replace(axis, pinned={}), {"": torch.tensor(kept)})

    def _kept(self, model: OpenModel) -> list[int]:
        """The tokens that stay, in their order."""
        path = model.directory.path
        if self._known is None or self._known[0] != path:
            tokens = Vocabulary(path)
            used = used_tokens(self._source, model.directory.tokenizer())
            config = renumbered(model.directory.config_data(), {number: number for number in range(model.vocabulary())})
            named = [each for value in config.values() for each in (value if isinstance(value, list) else [value])]
            if max(used) >= model.vocabulary():
                raise SmeltError(
                    f"{path}: its tokenizer makes token {max(used)}, but the model has only {model.vocabulary()}; the"
                    " tokenizer belongs to another model, or another step has made the vocabulary smaller before"
                )
            kept = tokens.closed({*used, *(each for each in named if each is not None)}, model.vocabulary())
            self._known = path, kept
        return self._known[1]

    def _kept_once(self, model: OpenModel, context: RunContext) -> list[int]:
        """The same for a run that goes on, though the corpus has changed."""
        context.journal.mkdir(parents=True, exist_ok=True)
        file = context.journal / "kept_tokens.safetensors"
        if file.exists():
            stored: dict[str, Tensor] = load_part(file)
            return stored["kept"].tolist()
        kept = self._kept(model)
        save_tensors(file, {"kept": torch.tensor(kept)})
        return kept
