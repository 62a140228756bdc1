"""The quantize step: weights, and what the model computes with, in fewer bits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs

from ...distill.run.checks import teacher_of, training_problems
from ...distill.run.costs import training_cost
from ...models.checkpoint.writer import Entry, write_checkpoint
from ...models.steps.parts import layers_of
from ...models.steps.step import RunContext, StepRecord
from ...models.structure.anatomy import is_linear
from ...models.structure.attention import head_width
from ...models.structure.block_calls import block_calls
from ...models.structure.open_model import LinearFacts, OpenModel
from ...models.structure.untied_head import untied, with_own_head
from ...quant.blockwise.apply_transforms import Transforms
from ...quant.blockwise.assignment import Assignment, Treatment
from ...quant.blockwise.embedding import EMBEDDING, SLICE, embedding_key
from ...quant.blockwise.guard import LayerGuard
from ...quant.blockwise.quantize_blocks import BlockQuantizer
from ...quant.blockwise.quantize_weights import WeightQuantizer
from ...quant.scheme import Scheme, cache_args, resolve
from ...quant.settings.methods import AUTO
from ...quant.stored.config import quantization_config
from ...quant.stored.dense_weights import CACHE_SCALES
from ...quant.stored.kv_cache import takes_cache
from ...system.activation_store import BATCH_TOKENS
from ...system.errors import Problem, SmeltError
from ...system.machine import human_bytes
from ...system.resources import Cost, compute_dtype
from ...system.tensor_files import SafetensorsFile
from .mixed_precision import MixedPrecision
from .settings import Quantize
from .train_quantized import QuantizedTraining

# Where there are several schemes, transformers takes that for the experts' whose targets have a pattern that names them.
_EXPERTS = r"re:.*\.experts\.\d+\..*"


class QuantizeStep:
    """Quantize a model's linears.

    Args:
        settings: the recipe's section.
        where: how messages name this step.
    """

    quantizes = True
    leaves_zeros = False

    def __init__(self, settings: Quantize, where: str) -> None:
        self.settings = settings
        self._where = where
        self.original: OpenModel | None = None  # what the run begins with, once it is known
        self.on_gpu = False  # whether what is trained is in another memory
        self._assignment = (MixedPrecision if settings.scheme == AUTO else Assignment)(settings, where)
        self.transforms = Transforms(settings.transforms, where)

    @property
    def keeps_zeros(self) -> bool:
        return not any(choice.method == "rotate" for choice in self.settings.transforms)

    @property
    def label(self) -> str:
        settings = self.settings
        group = (
            "" if settings.group_size is None else f" g{settings.group_size}" if settings.group_size > 0 else " per row"
        )
        if settings.target is not None:
            group = f" {settings.target.label}"
        methods = [*(choice.method for choice in settings.transforms), settings.rounding.method]
        trained = "" if settings.train is None else f", trained by {settings.train.label}"
        return f"{settings.scheme}{group} {' + '.join(methods)}{trained}"

    def outlook(self, model: OpenModel) -> OpenModel:
        return model  # of the same shapes; that nothing can follow is checked before

    def check(self, model: OpenModel) -> list[Problem]:
        problems = self.transforms.problems(model)
        if problems:
            return problems
        problems = self._assignment.problems(self.working(model))
        if self.settings.train is not None:
            problems += training_problems(self.settings.train, model, f"{self._where}.train")
        return problems + self._embedding_problems(model) + self._cache_problems(model)

    @property
    def learns_from_original(self) -> bool:
        """Whether it is trained, and by the model that the run began with."""
        return self.settings.train is not None and self.settings.train.learns_from_original

    def plan(self, model: OpenModel) -> dict[str, Any]:
        working = self.working(model)
        chosen = self._chosen(working)
        stored = sum(treatment.scheme.stored_bytes(f.rows, f.columns, f.dtype.itemsize) for f, treatment in chosen)
        before = sum(facts.numel * facts.dtype.itemsize for facts, _ in chosen)
        numbers = sum(facts.numel for facts, _ in chosen)
        # What auto chooses from are linears; the rest of its checkpoint it counts itself.
        if self.settings.embeddings is not None and not isinstance(self._assignment, MixedPrecision):
            table = working.weights.info(embedding_key(working))
            stored += EMBEDDING.stored_bytes(table.shape[0], table.shape[1], table.dtype.itemsize)
            before += table.nbytes
            numbers += math.prod(table.shape)
        told = {
            "step": "quantize",
            "scheme": self.settings.scheme,
            "transforms": [choice.method for choice in self.settings.transforms],
            "rounding": self.settings.rounding.method,
            "linears": len(chosen),
            "bits_per_weight": 8 * stored / numbers if numbers else 0.0,
            "bytes_before": before,
            "bytes_after": stored,
            "checkpoint_bytes": working.weights.nbytes - before + stored,
            "stays_packed": self._stays_packed(working),
        }
        if isinstance(self._assignment, MixedPrecision):
            told |= self._assignment.plan(working)
        else:
            usual = self._assignment.usual.scheme
            told |= {"group_size": usual.args.group_size, "format": usual.format}
        return told | {"sentence": _sentence(told)}

    def may_store(self, working: OpenModel) -> dict[str, list[Scheme]]:
        """What each linear will be stored as: one scheme, or those that measuring chooses from."""
        guard = self.settings.guard
        further = [resolve(guard.fallback)] if guard is not None and guard.otherwise == "fallback" else []
        if isinstance(self._assignment, MixedPrecision):
            further += self._assignment.candidates
        return {
            name: list({scheme.label: scheme for scheme in (treatment.scheme, *further)}.values())
            for name, treatment in self._assignment.of(working).items()
        }

    def _stays_packed(self, model: OpenModel) -> bool:
        """Whether transformers restores the checkpoint's weights when they are used, and not as it loads them."""
        mixed = self._assignment if isinstance(self._assignment, MixedPrecision) else None
        schemes = mixed.candidates if mixed else [treatment.scheme for treatment in self._assignment.of(model).values()]
        return all(s.args.symmetric for s in schemes) and not any(f.is_expert for f in model.linears.values())

    def reads_text(self, model: OpenModel) -> list[str]:
        settings, cache = self.settings, self.cache_args(model)
        found = self.transforms.reads_inputs
        if isinstance(self._assignment, MixedPrecision):
            found.append("scheme auto")
        else:
            found += [what for treatment in self._assignment.of(model).values() for what in treatment.reads_inputs]
        if cache is not None and cache.dynamic is not True:
            found.append("kv_cache's fixed scales")
        found += [name for name in ("guard", "train", "diagnostics") if getattr(settings, name) is not None]
        return list(dict.fromkeys(found))

    def _weights_cost(self, model: OpenModel) -> Cost:
        """Of rounding that reads no text: a portion that is rounded, the next one, and a block's results."""
        model = self.working(model, 0)
        chosen, itemsize = self._assignment.of(model), 4 if model.is_edited else model.dtype.itemsize
        memory, operations = 0, 0.0
        for index, anatomy in enumerate(model.anatomy.blocks):
            facts = [model.linears[name] for name in anatomy.linears if name in chosen]
            stored = sum(chosen[f.name].scheme.stored_bytes(f.rows, f.columns, f.dtype.itemsize) for f in facts)
            if self.transforms.links:
                portion = model.block_numel(index) * 4
                memory = max(
                    memory, model.block_numel(index) * 3 * 8
                )  # the experiments that show where scales can move
            else:
                groups = ([f"{anatomy.name}.{name}" for name in group.linears] for group in anatomy.groups)
                portion = max((sum(model.linears[n].numel for n in group) for group in groups), default=0) * itemsize
            # A weight that is rounded whole is there in float32 as itself, its values, their errors and what is fitted.
            whole = max((f.numel for f in facts if not chosen[f.name].method.by_row), default=0) * 4 * 8
            memory = max(memory, 2 * portion + 2 * stored + whole)
            operations += sum(f.numel for f in facts) * 100.0
        if model.anatomy.head in chosen:
            memory = max(memory, 3 * model.linears[model.anatomy.head].numel * itemsize)
        memory = max(memory, model.embedding_bytes(), self._embedding_bytes(model))
        plan = self.plan(model)
        return Cost(int(memory), int(plan["bytes_after"] + plan["checkpoint_bytes"]), operations)

    def _embedding_bytes(self, model: OpenModel) -> int:
        """What rounding the embedding takes: the codes in pieces and in one, and a slice in float64."""
        if self.settings.embeddings is None:
            return 0
        table = model.weights.info(embedding_key(model))
        return table.nbytes + 2 * math.prod(table.shape) + SLICE * table.shape[1] * 3 * 8

    def cost(self, model: OpenModel, windows: int, length: int) -> Cost:
        if not self.reads_text(model):
            return self._weights_cost(model)
        if self.reads_text(model) == ["diagnostics"]:
            windows = min(windows, self.settings.diagnostics or windows)
        tokens = windows * length
        learning = self.transforms.cost(model, tokens)
        model = self.working(model)
        batch = max(BATCH_TOKENS, length)
        chosen = self._assignment.of(model)
        number = compute_dtype(model.dtype).itemsize
        wide = model.is_edited or self.transforms.change_weights
        held = number + (4 if wide else 0)
        memory, operations, kept, sequential = 0, 0.0, 0, 0
        for index, anatomy in enumerate(model.anatomy.blocks):
            numel = model.block_numel(index)
            facts = [model.linears[name] for name in anatomy.linears]
            rounding, beside = 0, 0
            for group in anatomy.groups:
                mine = [model.linears[f"{anatomy.name}.{n}"] for n in group.linears if f"{anatomy.name}.{n}" in chosen]
                size, columns = sum(f.numel for f in mine), model.linears[f"{anatomy.name}.{group.linears[0]}"].columns
                if any(chosen[f.name].method.needs_hessian for f in mine):
                    # The weight as it shrinks, its result and a copy in the stored type; the Hessian and its factor, or it
                    # and the half in float64 that it is made of.
                    rounding = max(rounding, size * (4 + 4 + 2) + 2 * columns * columns * 4)
                    operations += tokens * columns * columns + size * columns + columns**3
                    sequential += columns
                    if any(chosen[f.name].options.reads_unrounded and not f.is_expert for f in mine):
                        # The differences' matrix and its permutation, and the weight's own change.
                        rounding = max(rounding, size * (4 + 4 + 4 + 2) + 5 * columns * columns * 4)
                        operations += 2 * tokens * columns * columns + 4 * size * columns
                        beside += columns
                else:
                    rounding = max(rounding, size * (4 + 4 + 4 + 2))
            # The block, then whichever is more: rounding one group, or one batch's activations inside the block.
            passing = batch * (2 * max(f.rows for f in facts) + 2 * max(f.columns for f in facts)) * number
            memory = max(memory, numel * held + max(rounding, passing))
            if self.transforms.change_weights:
                memory = max(memory, numel * 3 * 8)  # the experiments in float64 that show where scales can move
            tails = [model.linears[f"{anatomy.name}.{tail.linear}"].columns for tail in anatomy.tails]
            unrounded = [chosen[f.name] for f in facts if f.name in chosen]
            width = model.skeleton.hidden_size
            passes = 1.5 + sum(c.method != "equalize" for c in self.transforms.links)
            if any(t.method.by_block or t.options.reads_unrounded for t in unrounded):
                # The unrounded block runs, too, and again if transforms change what its linears read.
                passes += 1 + bool(beside and self.transforms.links)
                beside += 2 * width
            kept = max(kept, width + sum(tails) + beside)
            operations += 2 * numel * tokens * passes
        head = model.linears[model.anatomy.head]
        if head.name in chosen:
            matrices = 5 if chosen[head.name].options.reads_unrounded else 2
            hessian = matrices * head.columns * head.columns * 4 if chosen[head.name].method.needs_hessian else 0
            memory = max(memory, head.numel * (2 * head.dtype.itemsize + 4 * 5) + hessian)
            sequential += head.columns
        hidden = tokens * kept * number
        memory = max(memory, model.embedding_bytes(), self._embedding_bytes(model))
        plan = self.plan(model)
        disk = plan["bytes_after"] + plan["checkpoint_bytes"] + hidden
        by_block = any(treatment.method.by_block for treatment in chosen.values())
        collected = 2 * tokens * model.skeleton.hidden_size * number if by_block else 0
        rounding = Cost(int(memory), int(disk), operations, sequential, collected) + learning
        if self.settings.train is not None:
            teacher = teacher_of(self.settings.train, model, self.original)
            rounding += training_cost(self.settings.train, model, teacher, len(chosen), on_gpu=self.on_gpu)
        mixed = self._assignment if isinstance(self._assignment, MixedPrecision) else None
        if mixed is None:
            return rounding
        measuring = mixed.cost(model, windows, length)
        candidates = len(mixed.candidates)
        return rounding + measuring + Cost(0, 0, candidates * operations, candidates * sequential)

    def run(self, model: OpenModel, context: RunContext, target: Path) -> StepRecord:
        working, chosen, rounded, record = self._quantized(model, context)
        parts, outcome = rounded, None
        training = self._training(working, chosen, parts, context)
        if training is not None:
            part, outcome = training.run(context)
            parts = [*parts, part]
        self._write(working, chosen, parts, target)
        layers, settings = layers_of(rounded), self.settings.model_dump(mode="json")
        if outcome is None:
            return StepRecord("quantize", settings, layers, list(model.anatomy.unknown), record)
        done = [outcome.sentence, "the errors of layers are those before training"]
        return StepRecord(
            "quantize", settings, layers, list(model.anatomy.unknown), record, done, training=outcome.told
        )

    def help(self, model: OpenModel, context: RunContext) -> None:
        working, chosen, parts, _ = self._quantized(model, context)
        training = self._training(working, chosen, parts, context)
        if training is not None:
            training.help(context)

    def _training(
        self, working: OpenModel, chosen: dict[str, Treatment], parts: list[Path], context: RunContext
    ) -> QuantizedTraining | None:
        if self.settings.train is None:
            return None
        context.processes.wait()  # for what the first has rounded last
        cache, known = self.cache_args(working), not self.transforms.links
        return QuantizedTraining(self.settings.train, working, chosen, parts, cache, latent_known=known)

    def _quantized(
        self, model: OpenModel, context: RunContext
    ) -> tuple[OpenModel, dict[str, Treatment], list[Path], dict[str, Any] | None]:
        context.journal.mkdir(parents=True, exist_ok=True)
        working = self.working(model, context.seed, context)
        record = None
        if isinstance(self._assignment, MixedPrecision):
            chosen, record = self._assignment.chosen(working, self.transforms.ranges, context)
        else:
            chosen = self._assignment.of(working)
        embedding, wanted = self.settings.embeddings is not None, self.reads_text(model)
        if wanted:
            if wanted == ["diagnostics"]:
                context = replace(context, tokens=context.tokens[: self.settings.diagnostics])
            guard, cache = LayerGuard(self.settings.guard), self.cache_args(working)
            quantizer = BlockQuantizer(working, chosen, self.transforms, cache, guard, context, embedding=embedding)
        else:
            quantizer = WeightQuantizer(working, chosen, self.transforms, context, embedding=embedding)
        quantizer.run()
        return working, chosen, quantizer.parts, record

    def cache_args(self, model: OpenModel) -> QuantizationArgs | None:
        """What keys and values will be cached in; None for as they are computed."""
        wanted = self.settings.kv_cache
        return None if wanted is None else cache_args(wanted.numbers, wanted.scales, head_width(model.config))

    def _cache_problems(self, model: OpenModel) -> list[Problem]:
        if self.settings.kv_cache is None:
            return []
        where = f"{self._where}.kv_cache"
        try:
            model.attention_prefix(0)
        except SmeltError as error:
            return [Problem(where, f"{error}; remove the field")]
        if not takes_cache(block_calls(model.skeleton, 1, 4, torch.float32)[0]):
            kind = type(model.skeleton.blocks[0]).__name__
            return [
                Problem(where, f"{kind} is not called with a cache, so Smelt cannot see its keys; remove the field")
            ]
        return []

    def working(self, model: OpenModel, seed: int = 0, context: RunContext | None = None) -> OpenModel:
        """The same function, with the weights that are quantized: transforms change some, and a head needs its own."""
        changed = self.transforms.opened(model, seed, context)
        return with_own_head(changed) if changed.anatomy.head in self._assignment.of(changed) else changed

    def _embedding_problems(self, model: OpenModel) -> list[Problem]:
        if self.settings.embeddings is None or not self.working(model).is_tied:
            return []
        head = f"{model.anatomy.head} shares the input embedding's weight and cannot be left as it is"
        return [Problem(f"{self._where}.embeddings", f"{head}; quantize it, too (remove lm_head from ignore)")]

    def _chosen(self, model: OpenModel) -> list[tuple[LinearFacts, Treatment]]:
        return [(model.linears[name], treatment) for name, treatment in self._assignment.of(model).items()]

    def _write(self, model: OpenModel, chosen: dict[str, Treatment], parts: list[Path], target: Path) -> None:
        quantized = {model.linears[name].key for name in chosen}
        if self.settings.embeddings is not None:
            quantized.add(embedding_key(model))
        files = [SafetensorsFile(part) for part in parts]
        home = {name: file for file in files for name in file.tensors}
        of_module: dict[str, list[str]] = {}
        for name in sorted(home):
            of_module.setdefault(name.rpartition(".")[0], []).append(name)
        entries: list[Entry] = []
        for key in model.weights.names():
            names = of_module[key.removesuffix(".weight")] if key in quantized else [key]
            if key in quantized:  # a bias beside it has a name of its own
                names = [name for name in names if name.rpartition(".")[2] != "bias"]
            for name in names:
                if name in home:
                    entries.append((name, home[name].tensors[name], lambda name=name: home[name].load(name)))
                else:
                    info = model.weights.info(key)
                    entries.append((key, info, lambda key=key, info=info: model.weights.load(key).to(info.dtype)))
        config = dict(model.directory.config_data())
        if not model.is_tied:
            config = untied(config) if config.get("tie_word_embeddings", True) else config
        labels = {name: list(dict.fromkeys((model.linears[name].key.removesuffix(".weight"), name))) for name in chosen}
        schemes = {label: treatment.scheme for name, treatment in chosen.items() for label in labels[name]}
        tables: dict[str, Scheme] = {}
        if self.settings.embeddings is not None:
            key = embedding_key(model).removesuffix(".weight")
            tables = dict.fromkeys((key, model.skeleton.embedding_name), EMBEDDING)
        experts = next((treatment.scheme for name, treatment in chosen.items() if model.linears[name].is_expert), None)
        if experts is not None:
            schemes[_EXPERTS] = experts
        entries += [
            (name, file.tensors[name], lambda name=name, file=file: file.load(name))
            for name, file in home.items()
            if name.rpartition(".")[2] in CACHE_SCALES
        ]
        ignored = self._ignored(model, chosen)
        head = labels.get(model.anatomy.head)
        config["quantization_config"] = quantization_config(schemes, ignored, self.cache_args(model), tables, head)
        write_checkpoint(target, model.directory.path, config, entries, with_code=model.directory.trust_remote_code)

    def _ignored(self, model: OpenModel, chosen: dict[str, Treatment]) -> list[str]:
        """Matrices that stay as they are, by the names that loaders will match: checkpoint names, and the head's own.

        Routers are listed too: transformers has its own class for them, but vLLM makes them linears.
        """
        quantized = {model.linears[name].key for name in chosen}
        inside = model.skeleton.blocks_name + "."
        matrices = {name for name, _ in model.skeleton.model.named_modules() if is_linear(_)}
        left = [
            label.removesuffix(".weight")
            for name, key in model.names.items()
            for label in dict.fromkeys((key, name))  # some loaders match the one, some the other
            if key.endswith(".weight")
            and key not in quantized
            and len(model.weights.info(key).shape) == 2
            and (name.startswith(inside) or name.removesuffix(".weight") in matrices)
        ]
        head = model.anatomy.head
        return [*left, head] if head not in chosen and head not in left else left


def _sentence(told: dict[str, Any]) -> str:
    what, at_most = f"{told['scheme']} (group {told.get('group_size') or 'none'}", ""
    if "candidates" in told:
        what = f"the best of {', '.join(told['candidates'])} by {told['loss']} ({told['units']} units"
        at_most = "at most "
    return (
        f"quantize {told['linears']} linears to {what}, {told['rounding']}"
        f"{', ' + told['format'] if 'format' in told else ''}): {human_bytes(told['bytes_before'])} ->"
        f" {at_most}{human_bytes(told['bytes_after'])}, {at_most}{told['bits_per_weight']:.2f} bits per weight"
    )
