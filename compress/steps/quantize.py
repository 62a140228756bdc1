"""The quantize step: weights, and optionally activations and KV cache, in fewer bits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...distill.run.checks import step_training, teacher_of, training_problems
from ...distill.run.training_cost import training_cost
from ...models.steps.parts import layers_of
from ...models.steps.step import (
    Given,
    PreparedStep,
    RecipeStepPlan,
    RunContext,
    Step,
    StepRecord,
    StepTraining,
    StoragePlan,
)
from ...models.structure.attention import head_width
from ...models.structure.block_calls import block_calls
from ...models.structure.open_model import OpenModel
from ...models.structure.untied_head import with_untied_head
from ...quant.blockwise.apply_transforms import Transforms
from ...quant.blockwise.assignment import Assignment, Treatment
from ...quant.blockwise.embedding import EMBEDDING
from ...quant.blockwise.guard import LayerGuard
from ...quant.blockwise.quantize_blocks import BlockQuantizer
from ...quant.blockwise.quantize_weights import WeightQuantizer
from ...quant.scheme import Scheme, cache_args, resolve
from ...quant.stored.kv_cache import takes_cache
from ...quant.transforms import TRANSFORMS
from ...system.errors import Problem, SmeltError, raise_problems
from ...system.hardware.machine import human_bytes
from ...system.hardware.resources import Cost
from .mixed_precision import MixedPrecision
from .quantize_cost import RoundingCost
from .quantized_checkpoint import embedding_tables, write_quantized
from .settings import Quantize, QuantizeAuto
from .train_quantized import QuantizedTraining


class QuantizeStep(Step[Quantize | QuantizeAuto]):
    """Quantize a model's linears."""

    quantizes = True

    @property
    def changes_zeros(self) -> str | None:
        method = next(
            (each.method for each in self.settings.transforms if not TRANSFORMS[each.method].keeps_zeros), None
        )
        return None if method is None else f"transforms: {method}"

    @property
    def training(self) -> StepTraining | None:
        train = self.settings.train
        return None if train is None else step_training(train, f"{self.where}.train")

    @property
    def label(self) -> str:
        settings = self.settings
        group = (
            "" if settings.group_size is None else f" g{settings.group_size}" if settings.group_size > 0 else " per row"
        )
        if isinstance(settings, QuantizeAuto):
            group = f" {settings.target.label}"
        methods = [*(choice.method for choice in settings.transforms), settings.rounding.method]
        trained = "" if settings.train is None else f", trained by {settings.train.label}"
        return f"{settings.scheme}{group} {' + '.join(methods)}{trained}"

    def prepare(self, given: Given) -> PreparedQuantize:
        return PreparedQuantize(self.settings, self.where, given)


class PreparedQuantize(PreparedStep):
    """Quantizing one model.

    Args:
        settings: the recipe's section.
        where: how messages name the step.
        given: the model, and the one that the run started from, which may teach it.

    Raises:
        ProblemsError: it cannot be quantized this way.
    """

    def __init__(self, settings: Quantize | QuantizeAuto, where: str, given: Given) -> None:
        self.settings, self._where, self._given, self.model = settings, where, given, given.model
        self.transforms = Transforms(settings.transforms, where)
        chooses = isinstance(settings, QuantizeAuto)
        self._assignment = MixedPrecision(settings, where) if chooses else Assignment(settings, where)
        self._mixed = self._assignment if isinstance(self._assignment, MixedPrecision) else None
        raise_problems(self.transforms.problems(self.model))
        self._working = self._changed()
        problems = self._assignment.problems(self._working)
        if settings.train is not None:
            problems += training_problems(settings.train, self.model, f"{where}.train")
        raise_problems(problems + self._expert_problems() + self._embedding_problems() + self._cache_problems())
        self._chosen = self._assignment.of(self._working)
        wanted = settings.kv_cache
        self._cache = None if wanted is None else cache_args(wanted.dtype, wanted.scales, head_width(self.model.config))
        self.reads_text = self._text_readers()
        self.learns_from_original = settings.train is not None and settings.train.learns_from_original
        self.output = self.model  # of the same shapes; no step may follow, which was checked before
        self.stored = StoragePlan(self._working, self._may_store(), settings.embeddings is not None, self._cache)

    def _expert_problems(self) -> list[Problem]:
        """Experts that would be written as they are, where transformers looks for quantized ones."""
        return [
            Problem(
                self._where,
                f"{path} has experts in a layout that Smelt does not know, and transformers would not reload what Smelt writes of this"
                f" model ({self.model.architecture}); it cannot be quantized",
            )
            for path in list(self.model.skeleton.fused_experts)[:1]
        ]

    def _changed(self, seed: int = 0, context: RunContext | None = None) -> OpenModel:
        """The model with the weights to quantize, computing the same: transforms change some, and lm_head is untied."""
        changed = self.transforms.opened(self.model, seed, context)
        return with_untied_head(changed) if changed.anatomy.head in self._assignment.of(changed) else changed

    def _may_store(self) -> dict[str, list[Scheme]]:
        """Each linear's possible schemes: one, or the candidates of the measurement."""
        guard = self.settings.guard
        further = [resolve(guard.fallback)] if guard is not None and guard.otherwise == "fallback" else []
        if self._mixed is not None:
            further += self._mixed.candidates
        return {
            name: list({scheme.label: scheme for scheme in (treatment.scheme, *further)}.values())
            for name, treatment in self._chosen.items()
        }

    def _text_readers(self) -> list[str]:
        settings, cache = self.settings, self._cache
        found = self.transforms.reads_inputs
        if self._mixed is not None:
            found.append("scheme auto")
        else:
            found += [what for treatment in self._chosen.values() for what in treatment.reads_inputs]
        if cache is not None and cache.dynamic is not True:
            found.append("kv_cache's fixed scales")
        found += [name for name in ("guard", "train", "diagnostics") if getattr(settings, name) is not None]
        return list(dict.fromkeys(found))

    def cost(self, windows: int, length: int) -> Cost:
        settings, plan = self.settings, self.plan()
        disk = int(plan.bytes_after + plan.checkpoint_bytes)
        work = RoundingCost(self._working, self._chosen, self.transforms, embedding=settings.embeddings is not None)
        if not self.reads_text:
            return work.of_weights() + Cost(0, disk, 0.0)
        if self.reads_text == ["diagnostics"]:
            windows = min(windows, settings.diagnostics or windows)
        rounding = work.of_text(windows, length) + Cost(0, disk, 0.0)
        everything = rounding + self.transforms.cost(self.model, windows * length)
        if settings.train is not None:
            teacher = teacher_of(settings.train, self.model, self._given.original)
            everything += training_cost(
                settings.train,
                self._working,
                teacher,
                list(self._chosen),
                [name for name, each in self._chosen.items() if each.rounding == "nested"],
                on_gpu=self._given.on_gpu,
            )
        if self._mixed is None:
            return everything
        candidates = len(self._mixed.candidates)
        measuring = self._mixed.cost(self._working, windows, length)
        again = Cost(0, 0, candidates * rounding.operations, candidates * rounding.sequential)
        return everything + measuring + again

    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        working, chosen, rounded, record = self._quantized(context)
        training = self._training(working, chosen, rounded, context)
        outcome = None if training is None else training.run(context)
        if not context.processes.is_main:
            return None
        parts = rounded if training is None else [*rounded, training.part(context)]
        tables = {} if self.settings.embeddings is None else embedding_tables(working)
        write_quantized(working, chosen, parts, target, cache=self._cache, tables=tables)
        layers, settings = layers_of(rounded), self.settings.model_dump(mode="json")
        unknown = self.model.unknown
        if outcome is None:
            return StepRecord("quantize", settings, layers, unknown, record)
        done = [*outcome.sentences, "layer errors are from before training"]
        return StepRecord("quantize", settings, layers, unknown, record, done, training=outcome.training)

    def plan(self) -> RecipeStepPlan:
        working = self._working
        chosen = [(working.linears[name], treatment) for name, treatment in self._chosen.items()]
        stored = sum(treatment.scheme.stored_bytes(f.rows, f.columns, f.dtype.itemsize) for f, treatment in chosen)
        before = sum(facts.numel * facts.dtype.itemsize for facts, _ in chosen)
        numbers = sum(facts.numel for facts, _ in chosen)
        # auto chooses for linears only; it counts the rest of the checkpoint itself.
        if self.settings.embeddings is not None and self._mixed is None:
            table = working.weights.info(working.embedding_key)
            stored += EMBEDDING.stored_bytes(table.shape[0], table.shape[1], table.dtype.itemsize)
            before += table.nbytes
            numbers += math.prod(table.shape)
        facts = {
            "scheme": self.settings.scheme,
            "transforms": [choice.method for choice in self.settings.transforms],
            "rounding": self.settings.rounding.method,
            "linears": len(chosen),
            "bits_per_weight": 8 * stored / numbers if numbers else 0.0,
        }
        unchanged, packed = working.weights.nbytes - before, self._stays_packed()
        plan = RecipeStepPlan("quantize", facts, before, stored, unchanged_bytes=unchanged, stays_packed=packed)
        if isinstance(self._assignment, MixedPrecision):
            plan = self._assignment.plan(working, plan)
        else:
            usual = self._assignment.usual.scheme
            plan = replace(plan, more={"group_size": usual.args.group_size, "format": usual.format})
        return replace(plan, sentence=_sentence(plan.as_data()))

    def _stays_packed(self) -> bool:
        """Whether transformers dequantizes the checkpoint's weights on use, not on loading."""
        chosen = [treatment.scheme for treatment in self._chosen.values()]
        schemes = chosen if self._mixed is None else self._mixed.candidates
        experts = any(facts.is_expert for facts in self._working.linears.values())
        return all(scheme.args.symmetric for scheme in schemes) and not experts

    def _training(
        self, working: OpenModel, chosen: dict[str, Treatment], parts: list[Path], context: RunContext
    ) -> QuantizedTraining | None:
        if self.settings.train is None:
            return None
        context.processes.wait()  # for the last results of the first process
        known, original = not self.transforms.links, self._given.original
        return QuantizedTraining(
            self.settings.train, working, chosen, parts, self._cache, original=original, latent_known=known
        )

    def _quantized(
        self, context: RunContext
    ) -> tuple[OpenModel, dict[str, Treatment], list[Path], dict[str, Any] | None]:
        context.journal.mkdir(parents=True, exist_ok=True)
        working = self._changed(context.seed, context)
        record = None
        if self._mixed is not None:
            chosen, record = self._mixed.chosen(working, self.transforms.ranges, context)
        else:
            chosen = self._assignment.of(working)
        embedding = self.settings.embeddings is not None
        if self.reads_text:
            if self.reads_text == ["diagnostics"]:
                context = replace(context, tokens=context.tokens[: self.settings.diagnostics])
            guard = LayerGuard(self.settings.guard)
            quantizer = BlockQuantizer(
                working, chosen, self.transforms, self._cache, guard, context, embedding=embedding
            )
        else:
            quantizer = WeightQuantizer(working, chosen, self.transforms, context, embedding=embedding)
        quantizer.run()
        return working, chosen, quantizer.parts, record

    def _cache_problems(self) -> list[Problem]:
        model = self.model
        if self.settings.kv_cache is None:
            return []
        where = f"{self._where}.kv_cache"
        try:
            model.attention_prefix(0)
        except SmeltError as error:
            return [Problem(where, f"{error}; remove the field")]
        if not hasattr(model.config, "num_key_value_heads"):
            what = (
                "config.json has no num_key_value_heads, without which compressed-tensors loads no quantized KV cache"
            )
            return [Problem(where, f"{what}; remove the field")]
        if not takes_cache(block_calls(model.skeleton, 1, 4, torch.float32)[0]):
            kind = type(model.skeleton.blocks[0]).__name__
            return [Problem(where, f"{kind} is called without a cache, so Smelt cannot see its keys; remove the field")]
        return []

    def _embedding_problems(self) -> list[Problem]:
        if self.settings.embeddings is None or not self._working.is_tied:
            return []
        head = f"{self.model.anatomy.head} is tied to the input embedding and cannot stay unquantized"
        return [Problem(f"{self._where}.embeddings", f"{head}; quantize it too (remove lm_head from ignore)")]


def _sentence(plan: dict[str, Any]) -> str:
    what, at_most = f"{plan['scheme']} (group {plan.get('group_size') or 'none'}", ""
    if "candidates" in plan:
        what = f"the best of {', '.join(plan['candidates'])} by {plan['loss']} ({plan['units']} units"
        at_most = "at most "
    return (
        f"quantize {plan['linears']} linears to {what}, {plan['rounding']}"
        f"{', ' + plan['format'] if 'format' in plan else ''}): {human_bytes(plan['bytes_before'])} ->"
        f" {at_most}{human_bytes(plan['bytes_after'])}, {at_most}{plan['bits_per_weight']:.2f} bits per weight"
    )
