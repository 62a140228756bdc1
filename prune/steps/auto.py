"""The prune step that searches depth and widths: the shape with the least loss among those that meet a target."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...models.directory.directory import ModelDirectory
from ...models.steps.parts import Measured, data_once
from ...models.steps.smaller_model import write_model
from ...models.steps.step import Given, RecipeStepPlan, RunContext, Step, StepRecord
from ...models.streaming.streamed import LOGIT_TOKENS
from ...models.structure.open_model import OpenModel
from ...quant.transforms.rotated_model import RotationError
from ...runtime.decoder.architectures import spec_of
from ...runtime.measure.shape_time import decode_seconds
from ...system.errors import ProblemsError, RuntimeProblem, SmeltError
from ...system.hardware.resources import Cost, compute_dtype
from ...system.processes.process_group import Processes
from ...system.progress import Progress
from ..search import TRIED, ShapeSearch
from ..settings.auto import PruneAuto
from ..settings.base import PruneBase
from ..structure.removable import layer_parts
from ..structure.shapes import DIMENSIONS, Costs, SizeGrid, Sizes, parameters_of, shape_of, timing_bytes
from .hidden import check_rotates
from .prepared import PreparedPrune
from .table import STRUCTURES, step_of

_SLACK = 1.02


class PruneAutoStep(Step[PruneAuto]):
    """Prune blocks and widths until a target is met."""

    @property
    def changes_zeros(self) -> str:
        return "structure: auto"  # hidden states may be rotated

    @property
    def label(self) -> str:
        return f"pruned to {self.settings.target.label}"

    def prepare(self, given: Given) -> PreparedAuto:
        return PreparedAuto(self, given.model)


class PreparedAuto(PreparedPrune[PruneAuto]):
    """Searching for the best shape of one model."""

    def __init__(self, step: PruneAutoStep, model: OpenModel) -> None:
        super().__init__(step, model)
        self._target = step.settings.target
        self._check_latency()
        if set(layer_parts(model)) != {"all"}:
            what = (
                f"{model.architecture}: parts of some of its blocks were already removed; search first, or give"
                " structures and shares"
            )
            raise self._wrong("structure", what)
        self._grid, self._rotates = SizeGrid.of(model, step.settings.multiple), _rotates(model)
        if all(len(levels) == 1 for levels in self._grid.levels.values()):
            kind = model.architecture
            raise self._wrong("structure", f"{kind}: none of its dimensions can be made smaller")
        self._check_parameters()
        # The shape is not known yet: of the possible ones, the one that the fewest group sizes divide.
        self.output = model
        for settings in self._settings(self._grid.worst_case):
            self.output = step_of(settings, settings.structure).prepare(Given(self.output, self.output)).output

    def _check_latency(self) -> None:
        if self._target.latency is None:
            return
        try:
            spec = spec_of(self.model.config)
        except RuntimeProblem as problem:
            raise self._wrong("target", f"latency: {problem}; give a target of params instead") from None
        if self._target.place.context > spec.max_length:
            what = (
                f"at.context is {self._target.place.context}, more than the model's context length of {spec.max_length}"
            )
            raise self._wrong("target", what)
        if len(self.model.anatomy.blocks) < 2:
            what = "latency: a model of one block cannot be timed by differences; give a target of params"
            raise self._wrong("target", what)

    def _check_parameters(self) -> None:
        if self._target.params is None:
            return
        try:
            costs = Costs(self.model, self._grid, rotated=self._rotates)
        except SmeltError as error:
            raise self._wrong("structure", error) from None
        least = min(costs.parameters(sizes) for sizes in self._grid) / costs.parameters(self._grid.whole)
        if least > self._target.params:
            what = f"params: the smallest shape in the search has {least:.2f} of the parameters; give at least that"
            raise self._wrong("target", what)

    def plan(self) -> RecipeStepPlan:
        grid, before = self._grid, self.model.weights.nbytes
        count = math.prod(len(levels) for levels in grid.levels.values())
        after = int(before * self._target.params) if self._target.params is not None else before
        facts = {"structure": "auto", "target": self._target.model_dump(exclude_none=True), "shapes": count}
        levels = " x ".join(f"{len(grid.levels[name])} {name}" for name in DIMENSIONS)
        sentence = f"prune to {self._target.label}: the best of {count} shapes of {levels}"
        return RecipeStepPlan("prune", facts, before, after, sentence)

    def cost(self, windows: int, length: int) -> Cost:
        model = self.model
        tokens, itemsize = windows * length, compute_dtype(model.dtype).itemsize
        grid = self._grid
        runs = sum(1 for _ in grid.alone()) + 3 * TRIED
        numel = sum(model.block_numels)
        width = max(facts.columns for facts in model.block_linears)
        logits = max(LOGIT_TOKENS, length) * model.vocabulary() * 4 * 4
        matrices = 4 * width**2 * 8
        memory = model.largest_block() * itemsize * 2 + matrices + 2 * model.embedding_bytes() + logits
        if self._target.latency is not None:
            memory = max(memory, timing_bytes(model, grid, self._target.place.batch, self._target.place.context))
        operations = runs * (
            6.0 * tokens * numel + 2.0 * tokens * model.head.numel + len(model.anatomy.blocks) * width**3
        )
        kept = (len(model.anatomy.blocks) + 4) * model.skeleton.hidden_size + width
        return Cost(int(memory), int(4 * model.weights.nbytes + tokens * kept * itemsize), operations)

    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        if not context.processes.is_main:
            return None  # splitting many short steps over processes costs more than it saves
        model = self.model
        context.journal.mkdir(parents=True, exist_ok=True)
        context = replace(context, processes=Processes(context.processes.device))
        grid = self._grid
        search = ShapeSearch(grid, context, self._made)
        costs = Costs(model, grid, rotated=self._rotates)

        def chosen_sizes() -> dict[str, Any]:
            limit, spent = self._limits(costs, context.progress)
            found = search.best(self._allowed(limit, spent))
            return {"sizes": vars(found), "milliseconds": costs.as_data()}

        known = data_once(context.journal / "sizes.json", chosen_sizes)  # timings would differ the next time
        found = Sizes(**known["sizes"])
        final = self._made(found, context, context.journal / "final")
        write_model(final, model, target)
        if (context.journal / "final").exists():
            shutil.rmtree(context.journal / "final")
        measured = self._measured(final, context.progress)
        sentences = [search.sentence(found), *([measured] if measured else [])]
        chosen = {
            "sizes": vars(found),
            "losses": search.losses,
            "parameters": parameters_of(final) / parameters_of(model),
            **({} if self._target.latency is None else {"milliseconds": known["milliseconds"]}),
        }
        return self._record(sentences, chosen=chosen)

    def _made(self, sizes: Sizes, context: RunContext, place: Path) -> OpenModel:
        """The model of some sizes; its files are in ``place``, and steps that an interrupted run finished there stay."""
        model, done = self.model, Measured(place / "finished.json", context.processes)
        for number, each in enumerate(self._settings(sizes)):
            try:
                step = step_of(each, each.structure).prepare(Given(model, model))
            except ProblemsError as error:
                raise SmeltError(str(error.problems[0])) from None
            directory = place / f"model-{number}"
            if directory.name not in done.known:
                shutil.rmtree(directory, ignore_errors=True)
                step.run(replace(context, journal=place / f"step-{number}"), directory)
                done.once(directory.name, lambda: True)
            model = OpenModel(ModelDirectory(directory.name, directory, model.directory.trust_remote_code))
        return model

    def _settings(self, sizes: Sizes) -> list[PruneBase]:
        """The steps that produce a shape, in order."""
        whole, found = self._grid.whole, []
        if sizes.blocks < whole.blocks:
            found.append({"structure": "blocks", "count": whole.blocks - sizes.blocks})
        for name, more in (
            ("hidden", {"score": "pca" if self._rotates else "activation"}),
            ("heads", {"score": "taylor", "update": "least_squares"}),
            ("ffn", {"score": "wanda", "update": "least_squares"}),
        ):
            left, all_of_them = getattr(sizes, name), getattr(whole, name)
            if left < all_of_them:
                multiple = {} if name == "heads" else {"multiple": left & -left}
                found.append({"structure": name, "ratio": 1 - left / all_of_them, **multiple, **more})
        return [STRUCTURES[each["structure"]].settings.model_validate(each) for each in found]

    def _allowed(self, limit: float, spent: Callable[[Sizes], float]) -> list[Sizes]:
        grid = self._grid
        allowed = [sizes for sizes in grid if spent(sizes) <= limit]
        if not allowed:
            share = min(map(spent, grid)) / spent(grid.whole)
            raise SmeltError(
                f"{self._where}.target: the fastest shape in the search takes {share:.2f} of the time; give at least that"
            )
        return allowed

    def _limits(self, costs: Costs, progress: Progress) -> tuple[float, Callable[[Sizes], float]]:
        """The maximum cost of a shape, and the cost function."""
        if self._target.params is not None:
            return self._target.params * costs.parameters(self._grid.whole), costs.parameters
        assert self._target.latency is not None
        place = self._target.place
        costs.measure(place.batch, place.context, progress)
        return self._target.latency * costs.seconds(self._grid.whole), costs.seconds

    def _measured(self, final: OpenModel, progress: Progress) -> str | None:
        """The result's speed compared with the original, on the runtime; None if it is not supported."""
        model, place = self.model, self._target.place
        shapes = [shape_of(each) for each in (model, final)]
        try:
            before, after = decode_seconds(
                shapes, model.dtype, batch=place.batch, context=place.context, log=progress.say
            )
        except RuntimeProblem:
            return None
        missed = self._target.latency is not None and after > self._target.latency * _SLACK * before
        return (
            f"a decoding step of {place.batch} sequence{'s' * (place.batch > 1)} with {place.context} tokens takes"
            f" {after / before:.2f} of the original's, measured side by side"
            + (f", more than the target of {self._target.latency:g}: parts were timed separately" if missed else "")
        )


def _rotates(model: OpenModel) -> bool:
    try:
        check_rotates(model)
    except RotationError:
        return False
    return True
