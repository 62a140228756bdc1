"""The quantize step: block by block, each block reading what the quantized blocks before it produce."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...quant.activations import quantize_inputs
from ...quant.quantized_weight import restore
from ...quant.rounding import METHODS
from ...quant.scheme import LOADABLE_EXPERTS, Scheme, resolve
from ..activations import BATCH_TOKENS, ActivationStore
from ..anatomy import SharedInput, is_linear
from ..checkpoint import Entry, quantization_config, write_checkpoint
from ..errors import Problem
from ..open_model import LinearFacts, OpenModel
from ..recipe import Quantize
from ..recipe_file import nearest_name
from ..resources import Cost, compute_dtype, release_freed_memory
from ..safetensors_file import SafetensorsFile, save_tensors
from ..streamed import StreamedModel
from .block_passes import BlockPasses, observe_head
from .group_quantizer import GroupQuantizer, LayerRecord
from .step import RunContext, StepRecord

_HEAD = "lm_head"


class QuantizeStep:
    """Quantize a model's linears.

    Args:
        settings: the recipe's section.
        where: how messages name this step.
    """

    def __init__(self, settings: Quantize, where: str) -> None:
        self.settings = settings
        self.where = where
        self.scheme: Scheme = resolve(settings.scheme, settings.group_size)
        self.method = METHODS[settings.rounding.method]
        self.options = settings.rounding.settled()

    def chosen(self, model: OpenModel) -> list[LinearFacts]:
        """The linears that targets name and ignore does not."""
        return [
            facts
            for facts in model.linears.values()
            if self._named(facts, self.settings.targets, model) and not self._named(facts, self.settings.ignore, model)
        ]

    def check(self, model: OpenModel) -> list[Problem]:
        problems = []
        everything = list(model.linears.values())
        for field, patterns in (("targets", self.settings.targets), ("ignore", self.settings.ignore)):
            for pattern in patterns:
                if not any(self._named(facts, [pattern], model) for facts in everything):
                    hint = nearest_name(pattern, [facts.name for facts in everything])
                    problems.append(
                        Problem(f"{self.where}.{field}", f"{pattern!r} matches no linear of the model{hint}")
                    )
        chosen = self.chosen(model)
        if not chosen and not problems:
            problems.append(Problem(f"{self.where}.targets", "everything is ignored, so nothing would be quantized"))
        problems += self._shape_problems(chosen)
        for facts in chosen:
            if facts.name == model.anatomy.head and model.is_tied:
                problems.append(
                    Problem(
                        f"{self.where}.ignore",
                        f"{facts.name} shares its weight with the input embedding; add {_HEAD} to ignore",
                    )
                )
        experts = [facts for facts in chosen if facts.is_expert]
        if experts and not self.scheme.experts_reload:
            problems.append(
                Problem(
                    f"{self.where}.scheme",
                    f"transformers does not reload experts ({experts[0].name}) stored as {self.scheme.name}; use"
                    f" {', '.join(LOADABLE_EXPERTS)}",
                )
            )
        problems += self._expert_problems(model, {facts.name for facts in chosen})
        if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            problems.append(
                Problem("model", f"its weights are {model.dtype}; convert it to bfloat16, float16 or float32")
            )
        elif self.scheme.args.num_bits == 4 and self.scheme.args.type == "float" and model.dtype != torch.bfloat16:
            problems.append(
                Problem(
                    f"{self.where}.scheme",
                    f"{self.scheme.name} reloads as bfloat16 whatever the model is, and this one is"
                    f" {str(model.dtype).removeprefix('torch.')}; convert the model to bfloat16 first or use W4A16",
                )
            )
        strange = sorted({facts.kind for facts in chosen if facts.kind != "Linear"})
        if strange:
            problems.append(
                Problem(
                    f"{self.where}.targets",
                    f"this model's weights are {strange[0]} modules, which transformers does not load from"
                    f" compressed-tensors checkpoints; {type(model.skeleton.model).__name__} cannot be quantized yet",
                )
            )
        return problems

    def _expert_problems(self, model: OpenModel, chosen: set[str]) -> list[Problem]:
        """transformers fuses a block's experts as it loads them, and restores them only if all are quantized."""
        left = [facts.name for facts in model.linears.values() if facts.is_expert and facts.name not in chosen]
        if not left:
            return []
        return [
            Problem(
                f"{self.where}.ignore",
                f"leaves the expert {left[0]} as it is; transformers reloads a quantized mixture of experts only if all of"
                " its experts are quantized, so let targets and ignore name none of them apart",
            )
        ]

    def plan(self, model: OpenModel) -> dict[str, Any]:
        chosen = self.chosen(model)
        stored = sum(self._stored_bytes(facts) for facts in chosen)
        before = sum(facts.numel * facts.dtype.itemsize for facts in chosen)
        numbers = sum(facts.numel for facts in chosen)
        return {
            "step": "quantize",
            "scheme": self.scheme.name,
            "group_size": self.scheme.args.group_size,
            "format": self.scheme.format,
            "rounding": self.settings.rounding.method,
            "linears": len(chosen),
            "bits_per_weight": 8 * stored / numbers if numbers else 0.0,
            "bytes_before": before,
            "bytes_after": stored,
            "checkpoint_bytes": model.weights.nbytes - before + stored,
        }

    def cost(self, model: OpenModel, windows: int, length: int) -> Cost:
        tokens = windows * length
        batch = max(BATCH_TOKENS, length)
        chosen = {facts.name for facts in self.chosen(model)}
        number = compute_dtype(model.dtype).itemsize
        memory, operations, kept, sequential = 0, 0.0, 0, 0
        for index, anatomy in enumerate(model.anatomy.blocks):
            numel = model.block_numel(index)
            facts = [model.linears[name] for name in anatomy.linears]
            rounding = 0
            for group in anatomy.groups:
                mine = [model.linears[f"{anatomy.name}.{n}"] for n in group.linears if f"{anatomy.name}.{n}" in chosen]
                size, columns = sum(f.numel for f in mine), model.linears[f"{anatomy.name}.{group.linears[0]}"].columns
                if self.method.needs_hessian:
                    # The weight as it shrinks, its result and a copy in the stored type; the Hessian, its factor and its inverse.
                    rounding = max(rounding, size * (4 + 4 + 2) + 4 * columns * columns * 4)
                    operations += tokens * columns * columns + size * columns + columns**3
                    sequential += columns if mine else 0
                else:
                    rounding = max(rounding, size * (4 + 4 + 4 + 2))
            # The block, then whichever is more: rounding one group, or one batch's activations inside the block.
            passing = batch * (2 * max(f.rows for f in facts) + 2 * max(f.columns for f in facts)) * number
            memory = max(memory, numel * number + max(rounding, passing))
            tails = [model.linears[f"{anatomy.name}.{tail.linear}"].columns for tail in anatomy.tails]
            kept = max(kept, model.skeleton.hidden_size + sum(tails))
            operations += 2 * numel * tokens * 1.5
        head = model.linears[model.anatomy.head]
        if head.name in chosen:
            hessian = 4 * head.columns * head.columns * 4 if self.method.needs_hessian else 0
            memory = max(memory, head.numel * (2 * head.dtype.itemsize + 4 * 5) + hessian)
            sequential += head.columns
        hidden = tokens * kept * number
        memory = max(memory, model.embedding_bytes())
        plan = self.plan(model)
        disk = plan["bytes_after"] + plan["checkpoint_bytes"] + hidden
        return Cost(int(memory), int(disk), operations, sequential)

    def run(self, model: OpenModel, context: RunContext, target: Path) -> StepRecord:
        context.journal.mkdir(parents=True, exist_ok=True)
        chosen = {facts.name: facts for facts in self.chosen(model)}
        streamed = StreamedModel(model.skeleton, model.weights, context.dtype, context.journal)
        head = chosen.get(model.anatomy.head)
        parts = [context.journal / f"block-{i:05d}.safetensors" for i in range(len(streamed))]
        if head is not None:
            parts.append(context.journal / "head.safetensors")
        if not all(part.exists() for part in parts):
            self._quantize(model, streamed, chosen, parts, context)
        return self._write(model, chosen, parts, target)

    def _quantize(
        self,
        model: OpenModel,
        streamed: StreamedModel,
        chosen: dict[str, LinearFacts],
        parts: list[Path],
        context: RunContext,
    ) -> None:
        quantizer = GroupQuantizer(self.scheme, self.method, self.options)
        store = streamed.embed(context.tokens)
        try:
            # A block that an earlier run finished is not quantized again, only run, so that the next one sees its outputs.
            for index in context.progress.track(range(len(streamed)), "quantizing blocks", len(streamed)):
                anatomy = model.anatomy.blocks[index]
                release_freed_memory()
                with streamed.block(index) as block, ExitStack() as hooks:
                    if parts[index].exists():
                        stored = _load_part(parts[index])
                        for name in anatomy.linears:
                            if name in chosen:
                                self._install(block, anatomy.name, chosen[name], stored, hooks)
                    else:
                        passes = BlockPasses(block, anatomy, store, lambda hidden, i=index: streamed.call(i, hidden))
                        hooks.callback(passes.close)
                        self._quantize_block(passes, chosen, quantizer, parts[index], hooks)
                        passes.advance()
                        continue
                    streamed.run_block(index, block, store)
            if len(parts) > len(streamed) and not parts[-1].exists():
                self._quantize_head(model, streamed, chosen[model.anatomy.head], store, quantizer, parts[-1])
        finally:
            store.close()

    def _quantize_block(
        self,
        passes: BlockPasses,
        chosen: dict[str, LinearFacts],
        quantizer: GroupQuantizer,
        part: Path,
        hooks: ExitStack,
    ) -> None:
        block, anatomy = passes.block, passes.anatomy
        stored: dict[str, Tensor] = {}
        records: list[LayerRecord] = []
        for phase in anatomy.phases():
            wanted = [
                SharedInput(kept, group.phase)
                for group in phase
                if (kept := tuple(n for n in group.linears if f"{anatomy.name}.{n}" in chosen))
            ]
            for group, stats in passes.observe(wanted, hessian=self.method.needs_hessian):
                facts = [chosen[f"{anatomy.name}.{name}"] for name in group.linears]
                modules = [block.get_submodule(name) for name in group.linears]
                for fact, (tensors, record) in zip(facts, quantizer.round(modules, facts, stats), strict=True):
                    prefix = fact.key.removesuffix("weight")
                    stored |= {prefix + local: tensor for local, tensor in tensors.items()}
                    records.append(record)
            for group in wanted:
                for name in group.linears:
                    self._install(block, anatomy.name, chosen[f"{anatomy.name}.{name}"], stored, hooks)
        _save_part(part, stored, records)

    def _quantize_head(
        self,
        model: OpenModel,
        streamed: StreamedModel,
        facts: LinearFacts,
        store: ActivationStore,
        quantizer: GroupQuantizer,
        part: Path,
    ) -> None:
        stats = observe_head(streamed.head(), store, hessian=self.method.needs_hessian)
        holder = nn.Linear(facts.columns, facts.rows, bias=False, device="meta")
        holder.weight = nn.Parameter(model.weights.load(facts.key), requires_grad=False)
        ((tensors, record),) = quantizer.round([holder], [facts], stats)
        prefix = facts.key.removesuffix("weight")
        _save_part(part, {prefix + local: tensor for local, tensor in tensors.items()}, [record])

    def _install(
        self, block: nn.Module, block_name: str, facts: LinearFacts, stored: dict[str, Tensor], hooks: ExitStack
    ) -> None:
        """Let the block compute with the stored weight, and with rounded inputs if the scheme rounds them."""
        module = block.get_submodule(facts.name.removeprefix(block_name + "."))
        prefix = facts.key.removesuffix("weight")
        local = {key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)}
        module.weight.data = restore(local, self.scheme).to(module.weight.dtype)  # type: ignore[union-attr, operator]
        if self.scheme.activations is not None:
            hooks.callback(quantize_inputs(module, self.scheme.activations).remove)

    def _write(self, model: OpenModel, chosen: dict[str, LinearFacts], parts: list[Path], target: Path) -> StepRecord:
        by_key = {facts.key for facts in chosen.values()}
        files = [SafetensorsFile(part) for part in parts]
        home = {name: file for file in files for name in file.tensors}
        of_module: dict[str, list[str]] = {}
        for name in sorted(home):
            of_module.setdefault(name.rpartition(".")[0], []).append(name)
        entries: list[Entry] = []
        for key in model.weights.names():
            if key not in by_key:
                entries.append((key, model.weights.info(key), lambda key=key: model.weights.load(key)))
                continue
            for name in of_module[key.removesuffix(".weight")]:
                entries.append((name, home[name].tensors[name], lambda name=name: home[name].load(name)))
        config = dict(model.directory.config_data())
        config["quantization_config"] = quantization_config(self.scheme, self._ignored(model, chosen))
        write_checkpoint(target, model.directory.path, config, entries, with_code=model.directory.trust_remote_code)
        layers = [record for file in files for record in json.loads(file.metadata["layers"])]
        return StepRecord("quantize", self.settings.model_dump(mode="json"), layers, list(model.anatomy.unknown))

    def _ignored(self, model: OpenModel, chosen: dict[str, LinearFacts]) -> list[str]:
        """Matrices that stay as they are, by the names that loaders will match: checkpoint names, and the head's own.

        Routers are listed too: transformers has its own class for them, but vLLM makes them linears.
        """
        quantized = {facts.key for facts in chosen.values()}
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

    def _stored_bytes(self, facts: LinearFacts) -> int:
        return self.scheme.stored_bytes(facts.rows, facts.columns, facts.dtype.itemsize)

    def _shape_problems(self, chosen: list[LinearFacts]) -> list[Problem]:
        by_sentence: dict[str, list[str]] = {}
        for facts in chosen:
            sentence = self.scheme.shape_problem(facts.rows, facts.columns)
            if sentence:
                by_sentence.setdefault(sentence, []).append(facts.name)
        return [
            Problem(
                f"{self.where}.group_size" if self.scheme.accepts_group_size else f"{self.where}.scheme",
                f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {sentence},"
                " or add these layers to ignore",
            )
            for sentence, names in by_sentence.items()
        ]

    def _named(self, facts: LinearFacts, patterns: list[str], model: OpenModel) -> bool:
        key = facts.key.removesuffix(".weight")
        for pattern in patterns:
            if pattern == _HEAD:
                if facts.name == model.anatomy.head:
                    return True
            elif pattern == "Linear":
                return True
            elif pattern.startswith("re:"):
                if re.match(pattern[3:], facts.name) or re.match(pattern[3:], key):
                    return True
            elif pattern in (facts.name, key):
                return True
        return False


def _save_part(path: Path, stored: dict[str, Tensor], records: list[LayerRecord]) -> None:
    layers = json.dumps([record.as_data() for record in records])
    save_tensors(path, stored, {"format": "pt", "layers": layers})


def _load_part(path: Path) -> dict[str, Tensor]:
    file = SafetensorsFile(path)
    return {name: file.load(name) for name in file.tensors}
