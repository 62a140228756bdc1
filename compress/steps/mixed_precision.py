"""Mixed precision: a quantize step's schemes, chosen by measurement to meet a target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...models.steps.parts import data_once
from ...models.steps.step import RecipeStepPlan, RunContext
from ...models.streaming.streamed import LOGIT_TOKENS
from ...models.structure.open_model import OpenModel
from ...models.text.windows import fingerprint
from ...quant.blockwise.assignment import Assignment, Treatment
from ...quant.blockwise.embedding import embedding_saving
from ...quant.mixed.choose import best_choice
from ...quant.mixed.costs import bytes_of, header_bytes, other_header_bytes, unit_bytes
from ...quant.mixed.format_units import Unit, find_units
from ...quant.mixed.sensitivity import Roundings, SensitivityInputs, fisher_losses, kl_losses
from ...quant.scheme import Scheme, resolve
from ...quant.settings.auto_scheme import PostTrainingQuantizeAuto
from ...quant.settings.methods import TransformChoice
from ...system.errors import Problem, SmeltError
from ...system.hardware.machine import human_bytes
from ...system.hardware.resources import Cost, compute_dtype
from ...system.storage.activation_store import BATCH_TOKENS
from ...system.storage.digests import digest
from ...system.storage.measurement_cache import Kept
from ...system.versions import versions
from .format_speed import StepTimes, step_times

AS_IT_IS = "as it is"
# KV cache scales, per block: four tensors of one value per head, and their names.
_CACHE_BYTES = 2000
# Bytes of the embedding's scales in a file's header.
_TABLE_BYTES = 160


@dataclass(frozen=True)
class SchemeChoices:
    """The choices in a model.

    Attributes:
        units: the units that get a choice.
        options: by unit, the schemes that it may get; None leaves it unquantized.
        fixed: the linears with a scheme fixed by an override.
    """

    units: list[Unit]
    options: list[list[Scheme | None]]
    fixed: dict[str, Treatment]


@dataclass(frozen=True)
class Budget:
    """A target in whole bytes of the units' tensors.

    Attributes:
        costs: bytes by unit and option.
        most: their maximum sum.
        numbers: number of weights in the units and the linears fixed by overrides.
        fixed: bytes of the linears fixed by overrides.
        around: bytes of the rest of the checkpoint.
    """

    costs: list[list[int]]
    most: int
    numbers: int
    fixed: int
    around: int

    @property
    def least(self) -> int:
        """The cheapest options' bytes."""
        return sum(min(unit) for unit in self.costs)

    def bits(self, spent: int) -> float:
        """Bits per weight, given the units' bytes."""
        return 8 * (spent + self.fixed) / self.numbers


class MixedPrecision:
    """Chooses a scheme for every unit of a model.

    Args:
        settings: the recipe's section, with ``scheme: auto``.
        where: how messages name this step.
    """

    def __init__(self, settings: PostTrainingQuantizeAuto, where: str) -> None:
        self._settings, self._where, self._target = settings, where, settings.target
        chosen = settings.auto_candidates()
        self.candidates = [resolve(candidate.scheme, candidate.group_size) for candidate in chosen]
        self._assignments = [Assignment(settings.with_only(each), where) for each in chosen]

    def problems(self, model: OpenModel) -> list[Problem]:
        """Problems of these settings with this model that can be found before any work."""
        found = list(dict.fromkeys(problem for each in self._assignments for problem in each.problems(model)))
        if found:
            return found
        choices = self._choices(model)
        if not choices.units:
            return [
                Problem(f"{self._where}.scheme", "overrides leave nothing to choose; name a scheme instead of auto")
            ]
        if self._target.kind == "speedup":
            return []
        budget = self._budget(model, choices)
        if budget.most < budget.least:
            return [Problem(f"{self._where}.target.{self._target.kind}", self._unreachable(choices, budget))]
        if budget.most >= sum(bytes_of(model.linears[name], None) for unit in choices.units for name in unit.linears):
            return [
                Problem(
                    f"{self._where}.target.{self._target.kind}",
                    f"the model keeps to {self._target.label} as it is, so nothing would be quantized; set a lower target",
                )
            ]
        return []

    def of(self, model: OpenModel) -> dict[str, Treatment]:
        """Each linear's treatment with the most bytes: an upper bound of any choice."""
        each = [assignment.of(model) for assignment in self._assignments]
        return {
            name: max((by_name[name] for by_name in each), key=lambda t: bytes_of(model.linears[name], t.scheme))
            for name in each[0]
        }

    def plan(self, model: OpenModel, usual: RecipeStepPlan) -> RecipeStepPlan:
        """The plan, known before anything is measured, from that of the schemes with the most bytes."""
        choices = self._choices(model)
        budget = self._budget(model, choices)
        most = min(budget.most, sum(max(unit) for unit in budget.costs))
        facts = {**usual.facts, "bits_per_weight": budget.bits(most)}
        more = {
            "candidates": [scheme.label for scheme in self.candidates],
            "target": self._target.model_dump(exclude_none=True),
            "loss": self._settings.loss or "fisher",
            "units": len(choices.units),
            "least_bits_per_weight": budget.bits(budget.least),
        }
        after, unchanged = most + budget.fixed, budget.around - budget.fixed
        return replace(usual, facts=facts, bytes_after=after, unchanged_bytes=unchanged, more=more)

    def cost(self, model: OpenModel, windows: int, length: int) -> Cost:
        """The cost of measuring."""
        choices, tokens, count = self._choices(model), windows * length, len(self.candidates)
        itemsize = self._dtype(model).itemsize
        hidden = tokens * model.skeleton.hidden_size * itemsize
        blocks = model.block_numels
        widest = max(facts.rows + facts.columns for facts in model.block_linears)
        head = model.head
        logits = max(LOGIT_TOKENS, length) * head.rows * 4 * 6
        changes = itemsize * (1 + count) if self._settings.loss != "kl" else itemsize * 3
        largest = max(facts.numel for facts in model.linears.values()) * 4 * 4
        passing = max(BATCH_TOKENS, length) * widest * 12 * itemsize
        in_head = head.numel * (changes if head.name in choices.units[-1].linears else itemsize) + logits
        memory = max(max(blocks) * changes + passing, in_head) + largest
        all_numel = sum(blocks) + head.numel
        if self._settings.loss != "kl":
            return Cost(int(memory), (len(blocks) + 2) * hidden, 2 * all_numel * tokens * (3 + count))
        variants = 4 * count  # about four units per block
        return Cost(
            int(memory), (len(blocks) + 1 + variants) * hidden, variants * all_numel * tokens * (len(blocks) + 1)
        )

    def chosen(
        self, model: OpenModel, ranges: list[TransformChoice], context: RunContext
    ) -> tuple[dict[str, Treatment], dict[str, Any]]:
        """Measure and choose, or reuse the choice of an interrupted run.

        Args:
            model: the model, with transforms of the residual stream already applied.
            ranges: the step's choices of grid ranges.
            context: the run around it.

        Returns:
            The treatment of each linear that is quantized, and a record of the choice as plain data.

        Raises:
            SmeltError: the target cannot be reached.
        """
        choices = self._choices(model)
        # Measuring samples tokens and times kernels, so only the first of several processes does it.
        file = context.journal / "choice.json"
        _, record = context.processes.broadcast(
            lambda: ({}, data_once(file, lambda: self._choose(model, choices, ranges, context)))
        )
        self._report(record, context)
        by_label = {scheme.label: i for i, scheme in enumerate(self.candidates)}
        found = {}
        for unit, choice in zip(choices.units, record["units"], strict=True):
            if choice["scheme"] != AS_IT_IS:
                treatments = self._assignments[by_label[choice["scheme"]]].of(model)
                found |= {name: treatments[name] for name in unit.linears}
        found |= choices.fixed
        return {name: found[name] for name in model.linears if name in found}, record

    def _choose(
        self, model: OpenModel, choices: SchemeChoices, ranges: list[TransformChoice], context: RunContext
    ) -> dict[str, Any]:
        budget = self._budget(model, choices)
        costs, most, times = budget.costs, budget.most, None
        if self._target.speedup is not None:
            times = self._times(model, choices, context)
            costs = [[round(seconds * 1e9) for seconds in unit] for unit in times.units]
            most = int((times.whole / self._target.speedup - times.around) * 1e9)
            if most < sum(min(unit) for unit in costs):
                raise SmeltError(f"{self._where}.target.speedup: {self._too_fast(times)}")
        losses = self._losses(model, choices, ranges, context)
        by_option = [
            [0.0 if scheme is None else unit[self.candidates.index(scheme)] for scheme in options]
            for options, unit in zip(choices.options, losses, strict=True)
        ]
        places = best_choice(by_option, costs, most)
        if places is None:
            raise SmeltError(f"{self._where}.target.{self._target.kind}: {self._unreachable(choices, budget)}")
        schemes = [options[place] for options, place in zip(choices.options, places, strict=True)]
        stored = sum(unit_bytes(model, unit, scheme) for unit, scheme in zip(choices.units, schemes, strict=True))
        return {
            "target": self._target.model_dump(exclude_none=True),
            "loss": self._settings.loss or "fisher",
            "predicted_kl": sum(loss[place] for loss, place in zip(by_option, places, strict=True)),
            "bits_per_weight": budget.bits(stored),
            "units": [
                {
                    "name": unit.name,
                    "linears": len(unit.linears),
                    "scheme": _label(options[place]),
                    "options": {
                        _label(option): {"loss": loss, "nanoseconds" if times else "bytes": cost}
                        for option, loss, cost in zip(options, unit_losses, unit_costs, strict=True)
                    },
                }
                for unit, options, unit_losses, unit_costs, place in zip(
                    choices.units, choices.options, by_option, costs, places, strict=True
                )
            ],
            **({} if times is None else self._predicted(times, places)),
        }

    def _times(self, model: OpenModel, choices: SchemeChoices, context: RunContext) -> StepTimes:
        fixed = [(unit, choices.fixed[unit.linears[0]].scheme) for unit in find_units(model, choices.fixed)]
        return step_times(model, choices.units, choices.options, fixed, context.progress)

    def _too_fast(self, times: StepTimes) -> str:
        fastest = times.around + sum(min(unit) for unit in times.units)
        most = f"{times.whole / fastest:.2f}" if fastest else "without limit"
        return f"{self._target.speedup:g} cannot be reached on this machine: the most is {most}, with the fastest candidates"

    def _predicted(self, times: StepTimes, places: list[int]) -> dict[str, Any]:
        """The expected gain of the choice, for the record."""
        step = times.around + sum(unit[place] for unit, place in zip(times.units, places, strict=True))
        return {
            "predicted_speedup": times.whole / step,
            "step_seconds": {"original": times.whole, "around": times.around, "estimated": times.estimated},
        }

    def _losses(
        self, model: OpenModel, choices: SchemeChoices, ranges: list[TransformChoice], context: RunContext
    ) -> list[list[float]]:
        loss = self._settings.loss or "fisher"
        kept = Kept(
            "sensitivity",
            {
                "loss": loss,
                "model": model.stored.content_digest(),
                **({} if context.adapter is None else {"adapter": context.adapter}),
                "config": digest(model.directory.config_data()),
                "rounding": [
                    self._settings.rounding.model_dump(mode="json"),
                    [override.model_dump(mode="json") for override in self._settings.overrides],
                ],
                "transforms": [choice.model_dump(mode="json") for choice in self._settings.transforms],
                "text": fingerprint(context.tokens),
                "seed": context.seed,
                "units": digest([asdict(unit) for unit in choices.units]),
                "candidates": [scheme.args.model_dump(mode="json") for scheme in self.candidates]
                + [scheme.label for scheme in self.candidates],
                "computed_in": str(self._dtype(model)),
                "versions": versions(),
            },
        )
        found = kept.read()
        if found is None:
            dtype = self._dtype(model)
            roundings = Roundings(model, [each.of(model) for each in self._assignments], ranges, dtype)
            measured = SensitivityInputs(model, choices.units, roundings, replace(context, dtype=dtype))
            found = (kl_losses if loss == "kl" else fisher_losses)(measured)
            kept.write(found)
        return found

    def _choices(self, model: OpenModel) -> SchemeChoices:
        treatments, fixed = self._assignments[0].of(model), self._assignments[0].with_fixed_scheme(model)
        units = find_units(model, treatments.keys() - fixed)
        options = [[*self.candidates, *([] if unit.is_experts else [None])] for unit in units]
        return SchemeChoices(units, options, {name: treatments[name] for name in treatments if name in fixed})

    def _budget(self, model: OpenModel, choices: SchemeChoices) -> Budget:
        costs = [
            [unit_bytes(model, unit, option) for option in options]
            for unit, options in zip(choices.units, choices.options, strict=True)
        ]
        chosen = [name for unit in choices.units for name in unit.linears]
        fixed = sum(bytes_of(model.linears[name], treatment.scheme) for name, treatment in choices.fixed.items())
        replaced = sum(bytes_of(model.linears[name], None) for name in [*chosen, *choices.fixed])
        numbers = sum(model.linears[name].numel for name in [*chosen, *choices.fixed])
        around = model.weights.nbytes - replaced + fixed
        if self._settings.embeddings is not None:
            around += _TABLE_BYTES - embedding_saving(model)
        most = sum(max(unit) for unit in costs)
        if self._target.bits is not None:
            most = int(self._target.bits * numbers / 8) - fixed
        elif self._target.bytes is not None:
            costs = [
                [
                    cost + header_bytes(model, list(unit.linears), option)
                    for cost, option in zip(each, options, strict=True)
                ]
                for unit, options, each in zip(choices.units, choices.options, costs, strict=True)
            ]
            headers = other_header_bytes(model, [*chosen, *choices.fixed])
            headers += sum(header_bytes(model, [name], t.scheme) for name, t in choices.fixed.items())
            scales = _CACHE_BYTES * len(model.anatomy.blocks) if self._settings.kv_cache is not None else 0
            around += headers + scales
            most = self._target.bytes - around
        return Budget(costs, most, numbers, fixed, around)

    def _unreachable(self, choices: SchemeChoices, budget: Budget) -> str:
        cheapest = {
            _label(options[costs.index(min(costs))])
            for options, costs in zip(choices.options, budget.costs, strict=True)
        }
        least = f"{budget.bits(budget.least):.2f}"
        if self._target.bytes is not None:
            least = f"{budget.least + budget.around} ({human_bytes(budget.least + budget.around)})"
        asked = self._target.bits or self._target.bytes
        return f"{asked} cannot be reached: the least is {least} with {' and '.join(sorted(cheapest))} everywhere"

    def _dtype(self, model: OpenModel) -> torch.dtype:
        """Gradients tolerate the dtype of calibration; differences between logits do not."""
        return torch.float32 if self._settings.loss == "kl" else compute_dtype(model.dtype)

    def _report(self, record: dict[str, Any], context: RunContext) -> None:
        counts: dict[str, int] = {}
        for unit in record["units"]:
            counts[unit["scheme"]] = counts.get(unit["scheme"], 0) + unit["linears"]
        shares = ", ".join(f"{count} linears {label}" for label, count in counts.items())
        context.progress.say(
            f"chosen: {shares}; {record['bits_per_weight']:.2f} bits a weight,"
            f" predicted divergence {record['predicted_kl']:.4f} nats a token"
            + (f", predicted speedup {record['predicted_speedup']:.2f}" if "predicted_speedup" in record else "")
        )


def _label(scheme: Scheme | None) -> str:
    return AS_IT_IS if scheme is None else scheme.label
