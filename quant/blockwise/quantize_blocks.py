"""The loop of a quantize step: block by block, each reading what the quantized blocks before it produce."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...models.steps.parts import layers_of, load_part, save_part
from ...models.steps.record import LayerRecord
from ...models.steps.step import RunContext
from ...models.streaming.streamed import StreamedModel
from ...models.structure.anatomy import BlockAnatomy, SharedInput
from ...models.structure.block_calls import BlockCall
from ...models.structure.open_model import LinearFacts, OpenModel
from ...system.activation_store import ActivationStore
from ...system.device import on
from ...system.resources import release_freed_memory
from ..activations import ActivationRounding, quantize_inputs
from ..grid import shared_scale
from ..layer_stats import LayerStats
from ..rounding.learned_weight import Learned
from ..rounding.signround import signround
from ..stored.kv_cache import KeysValues, RangesCache, with_cache
from ..stored.quantized_weight import restore
from ..stored.rounded import RoundedActivations
from ..transforms.links import block_weights, links_of
from .apply_transforms import Transforms, changed_beside, fill
from .assignment import Treatment, alike
from .block_passes import BlockPasses, observe_head
from .embedding import restored_embedding, round_embedding
from .group_quantizer import GroupQuantizer, ToRound, finished, input_rounding
from .guard import LayerGuard
from .unrounded import UnroundedInputs

# Linears, what the checkpoint stores for each, and what is told of it.
Rounded = list[tuple[ToRound, tuple[dict[str, Tensor], LayerRecord]]]


class BlockQuantizer:
    """Quantizes a model's blocks and head, and leaves each as a part in the journal.

    Args:
        model: the model, its residual stream already changed where a transform does that.
        chosen: what each linear is given, by name.
        transforms: what is done to each block's weights before they are rounded.
        cache: what keys and values are cached in, if not as they are computed.
        guard: what a layer may lose.
        context: the run around it.
        embedding: whether the input embedding is rounded.

    Attributes:
        parts: the files that it makes: the embedding's, one for each block, the head's.
    """

    def __init__(
        self,
        model: OpenModel,
        chosen: dict[str, Treatment],
        transforms: Transforms,
        cache: QuantizationArgs | None,
        guard: LayerGuard,
        context: RunContext,
        *,
        embedding: bool = False,
    ) -> None:
        self._cache = cache
        self._plain: ActivationStore | None = (
            None  # what the unrounded blocks make of the windows, for methods that need it
        )
        self._guard = guard
        self._model = model
        self._chosen = chosen
        self._transforms = transforms
        self._context = context
        # Edited weights come in float32, and are rounded from that.
        self._wide = model.is_edited or transforms.change_weights
        self._device = context.processes.device
        self._changes = RoundedActivations()
        self._streamed = StreamedModel(
            model.skeleton, model.weights, context.dtype, context.journal, self._changes, device=self._device
        )
        self._embedding = context.journal / "embedding.safetensors" if embedding else None
        self._blocks = [context.journal / f"block-{i:05d}.safetensors" for i in range(len(self._streamed))]
        self._head_part = context.journal / "head.safetensors" if model.anatomy.head in chosen else None
        self.parts = [part for part in (self._embedding, *self._blocks, self._head_part) if part is not None]

    def run(self) -> None:
        """Make all parts. A block that an earlier run finished is only run, so that the next one sees its outputs."""
        processes = self._context.processes
        _, finished_parts = processes.from_first(lambda: ({}, [part.exists() for part in self.parts]))
        if all(finished_parts):
            _, layers = processes.from_first(lambda: ({}, layers_of(self.parts)))
            self._recall(layers)
            return
        with on(self._device):
            self._run({part for part, there in zip(self.parts, finished_parts, strict=True) if there})

    def _run(self, finished_parts: set[Path]) -> None:
        streamed, processes = self._streamed, self._context.processes
        mine, table = processes.share(self._context.tokens), self._rounded_embedding(finished_parts)
        store = streamed.embed(mine, table)
        if any(t.method.by_block or t.options.reads_unrounded for t in self._chosen.values()):
            self._plain = streamed.embed(mine)
        del table
        try:
            for index in self._context.progress.track(range(len(streamed)), "quantizing blocks", len(streamed)):
                release_freed_memory()
                part = self._blocks[index]
                if part in finished_parts:
                    stored, layers = processes.from_first(lambda part=part: (load_part(part), layers_of([part])))
                    self._recall(layers)
                    stored = {name: tensor.to(self._device) for name, tensor in stored.items()}
                    with streamed.block(index) as block, ExitStack() as hooks:
                        if self._plain is not None:
                            streamed.run_block(index, block, self._plain)
                        self._install(block, index, stored, hooks)
                        if self._cache is not None:
                            prefix = self._model.attention_prefix(index)
                            local = {key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)}
                            self._changes.keys_values[index] = KeysValues.stored_as(self._cache, local)
                        streamed.run_block(index, block, store)
                else:
                    self._block(index, store)
            if self._head_part is not None and self._head_part not in finished_parts:
                self._head(store, self._head_part)
        finally:
            store.close()
            if self._plain is not None:
                self._plain.close()

    def _rounded_embedding(self, finished_parts: set[Path]) -> Tensor | None:
        """What tokens are looked up in, if not in the model's own embedding."""
        part = self._embedding
        if part is None:
            return None

        def make() -> tuple[dict[str, Tensor], None]:
            if part not in finished_parts:
                round_embedding(self._model, self._context.tokens, part)
            return load_part(part), None

        with torch.device("cpu"):
            stored, _ = self._context.processes.from_first(make)
            return restored_embedding({name: tensor.cpu() for name, tensor in stored.items()})

    def _recall(self, layers: list[dict[str, Any]]) -> None:
        """Which layers of a finished part, or of those that another process rounded, got the guard's fallback."""
        for record in layers:
            treatment = self._chosen.get(record["name"])  # the embedding has none
            other = None if treatment is None else self._guard.fallback(treatment)
            if other is not None and record["scheme"] == other.scheme.label:
                self._chosen[record["name"]] = other

    def _block(self, index: int, store: ActivationStore) -> None:
        anatomy, streamed = self._model.anatomy.blocks[index], self._streamed
        # Before the block is filled: looking for links fills it with weights of its own.
        with torch.device("cpu"):
            links = links_of(self._model, index) if self._transforms.links else ()
        read_in = torch.float32 if self._wide else streamed.dtype
        with streamed.block(index, read_in) as block, ExitStack() as hooks:
            weights = block_weights(block, read_in)
            if read_in != streamed.dtype:
                fill(block, weights, streamed.dtype)
            unrounded = UnroundedInputs(self._compared(anatomy), self._context.processes)
            hooks.callback(unrounded.close)

            def call(hidden: Tensor) -> BlockCall:
                return streamed.call(index, hidden)

            entering = self._plain
            if entering is not None:
                # The float block makes of float inputs what the rounded one is to make of its own.
                self._plain = entering.beside(entering.shape[2])
                hooks.callback(entering.close)
                unrounded.record(block, call, entering, self._plain)
            tokens, processes = self._context.tokens.numel(), self._context.processes
            passes = BlockPasses(block, anatomy, store, call, tokens, processes, unrounded)
            hooks.callback(passes.close)
            schemes = {
                name: self._chosen[f"{anatomy.name}.{name}"].scheme
                for group in anatomy.groups
                for name in group.linears
                if f"{anatomy.name}.{name}" in self._chosen
            }
            stored: dict[str, Tensor] = {}
            if self._transforms.links:
                self._transforms.apply(passes, links, weights, schemes, self._model.dtype)
                stored |= changed_beside(self._model, index, weights, schemes.keys())
                if entering is not None and unrounded:
                    unrounded.record(block, call, entering)  # the same linears read other numbers now
            records: list[LayerRecord] = []
            for phase in anatomy.phases():
                self._phase(passes, phase, weights, stored, records, hooks)
            self._learn(passes, index, weights, store, stored, records, hooks)
            if self._cache is not None:
                stored |= self._keys_values(block, index, store)
                passes.close()  # what was kept of attention was computed with keys and values as they are
            self._save(self._blocks[index], stored, records)
            if index + 1 < len(streamed) or self._head_part is not None:
                passes.advance()

    def _phase(
        self,
        passes: BlockPasses,
        phase: list[SharedInput],
        weights: dict[str, Tensor],
        stored: dict[str, Tensor],
        records: list[LayerRecord],
        hooks: ExitStack,
    ) -> None:
        prefix = f"{passes.anatomy.name}."
        wanted = self._rounded_alone(prefix, phase)
        hessian = any(self._chosen[prefix + name].method.needs_hessian for group in wanted for name in group.linears)
        widest = max(self._rounded_alone(prefix, passes.anatomy.groups), key=passes.columns, default=None)
        for group, stats in passes.observe(wanted, hessian=hessian):
            if group == widest:
                release_freed_memory()  # what comes now is the most that a block takes
            linears = {
                name: ToRound(facts := self._model.linears[prefix + name], self._weight(weights, name, facts))
                for name in group.linears
            }
            self._once(partial(self._rounded, prefix, linears, stats), stored, records)
        for group in wanted:
            for name in group.linears:
                self._use(passes.block.get_submodule(name), self._model.linears[prefix + name], stored, hooks)

    def _rounded_alone(self, prefix: str, groups: Iterable[SharedInput]) -> list[SharedInput]:
        kept = (
            (tuple(n for n in group.linears if self._is_rounded_alone(prefix + n)), group.phase) for group in groups
        )
        return [SharedInput(names, phase) for names, phase in kept if names]

    def _compared(self, anatomy: BlockAnatomy) -> dict[str, QuantizationArgs | None]:
        """The first linear of each group whose method asks what it reads in the unrounded model, and its inputs' rounding."""
        prefix = f"{anatomy.name}."
        return {
            group.linears[0]: self._chosen[prefix + group.linears[0]].scheme.activations
            for group in self._rounded_alone(prefix, anatomy.groups)
            if any(self._chosen[prefix + name].options.reads_unrounded for name in group.linears)
        }

    def _once(self, rounding: Callable[[], Rounded], stored: dict[str, Tensor], records: list[LayerRecord]) -> None:
        """Round in the first process, and let all know the result."""

        def make() -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
            tensors: dict[str, Tensor] = {}
            layers: list[dict[str, Any]] = []
            for linear, (each, record) in rounding():
                key = linear.facts.key.removesuffix("weight")
                tensors |= {key + local: tensor for local, tensor in each.items()}
                layers.append(record.as_data())
            return tensors, layers

        tensors, layers = self._context.processes.from_first(make)
        self._recall(layers)
        stored |= tensors
        records += [LayerRecord.of_data(layer) for layer in layers]

    def _save(self, part: Path, stored: dict[str, Tensor], records: list[LayerRecord]) -> None:
        if self._context.processes.leads:
            save_part(part, {name: tensor.cpu() for name, tensor in stored.items()}, records)

    def _is_rounded_alone(self, name: str) -> bool:
        return name in self._chosen and not self._chosen[name].method.by_block

    def _learn(
        self,
        passes: BlockPasses,
        index: int,
        weights: dict[str, Tensor],
        store: ActivationStore,
        stored: dict[str, Tensor],
        records: list[LayerRecord],
        hooks: ExitStack,
    ) -> None:
        """Round together the linears whose method works on the whole block."""
        prefix, block = f"{passes.anatomy.name}.", passes.block
        wanted = [
            SharedInput(kept, group.phase)
            for group in passes.anatomy.groups
            if (
                kept := tuple(
                    n for n in group.linears if prefix + n in self._chosen and not self._is_rounded_alone(prefix + n)
                )
            )
        ]
        if not wanted:
            return
        assert self._plain is not None
        passes.close()  # what was kept of the block's inside is not what it computes while it learns
        stats = {name: found for group, found in passes.survey(wanted) for name in group.linears}
        linears, roundings, layers = {}, {}, {}
        for group in wanted:
            treatments = [self._chosen[prefix + name] for name in group.linears]
            shared = shared_scale([weights[f"{name}.weight"] for name in group.linears], treatments[0].scheme.args)
            together = {n: self._weight(weights, n, self._model.linears[prefix + n]) for n in group.linears}
            for name, treatment in zip(group.linears, treatments, strict=True):
                facts, module = self._model.linears[prefix + name], block.get_submodule(name)
                linears[name] = ToRound(facts, together[name])
                roundings[name] = input_rounding(treatment.scheme, stats[name], [*together.values()], facts.dtype)
                layers[name] = Learned(
                    module,
                    treatment.scheme.args,
                    facts.dtype,
                    roundings[name],
                    isinstance(module, Conv1D),
                    shared,
                    linears[name].weight if self._wide else None,
                )
        options = next(t.options for t in self._chosen.values() if t.method.by_block)
        processes = self._context.processes
        with processes.collected(store) as inputs, processes.collected(self._plain) as targets:

            def learn() -> Rounded:
                learned = signround(
                    layers,
                    lambda hidden: self._streamed.call(index, hidden).run(block, hidden),
                    inputs.gather,
                    targets.gather,
                    inputs.shape[0],
                    options,
                )
                found: Rounded = []
                for name, linear in linears.items():
                    scheme = self._chosen[prefix + name].scheme
                    tensors, record = finished(linear, learned[name], scheme, stats[name], roundings[name])
                    self._guard.judge(record)
                    found.append((linear, (tensors, record)))
                return found

            self._once(learn, stored, records)
        for name, linear in linears.items():
            self._use(block.get_submodule(name), linear.facts, stored, hooks)

    def _rounded(self, prefix: str, linears: dict[str, ToRound], stats: LayerStats) -> Rounded:
        """Round the linears of a group; again with more bits where the guard says so."""

        def attempt() -> Rounded:
            found = []
            for names in alike({name: self._chosen[prefix + name] for name in linears}):
                members = [linears[name] for name in names]
                quantizer = GroupQuantizer(self._chosen[prefix + names[0]], self._transforms.ranges)
                found += zip(members, quantizer.round(members, stats), strict=True)
            return found

        found = attempt()
        failing = self._guard.failing([record for _, (_, record) in found])
        if not failing:
            return found
        # All that read the same input are stored alike; transformers wants one scheme for all experts.
        others = {
            linear.facts.name: self._guard.fallback(self._chosen[linear.facts.name])
            for linear, _ in found
            if not linear.facts.is_expert
        }
        if not others or None in others.values():
            for record in failing:
                record.notes.append(self._guard.told(record))
            return found
        worst = max(failing, key=lambda record: record.error or 0.0)
        self._chosen.update({name: other for name, other in others.items() if other is not None})
        again = attempt()
        for _, (_, record) in again:
            record.notes.append(
                f"stored as {record.scheme}, because at {worst.scheme} {worst.name}: {self._guard.told(worst)}"
            )
        return again

    def _weight(self, weights: dict[str, Tensor], name: str, facts: LinearFacts) -> Tensor:
        weight = weights[f"{name}.weight"]
        return weight if self._wide else weight.to(facts.dtype)

    def _keys_values(self, block: nn.Module, index: int, store: ActivationStore) -> dict[str, Tensor]:
        """Find the cache's scales on the block as it is now rounded, and compute with them from here on."""
        assert self._cache is not None
        ranges = RangesCache()
        if self._cache.dynamic is not True:
            for batch in store.batches():
                hidden = store.read(batch)
                with_cache(self._streamed.call(index, hidden), ranges).run(block, hidden)
            rounding = ranges.rounding(self._cache, self._model.dtype, self._context.processes)
        else:
            rounding = KeysValues.stored_as(self._cache, {})
        self._changes.keys_values[index] = rounding
        prefix = self._model.attention_prefix(index)
        return {prefix + name: tensor for name, tensor in rounding.stored().items()}

    def _head(self, store: ActivationStore, part: Path) -> None:
        facts = self._model.linears[self._model.anatomy.head]
        treatment = self._chosen[facts.name]
        tokens, processes = self._context.tokens.numel(), self._context.processes
        head = self._streamed.head()
        stats = observe_head(
            head,
            store,
            tokens,
            processes,
            hessian=treatment.method.needs_hessian,
            unrounded=self._plain if treatment.options.reads_unrounded else None,
            rounding=treatment.scheme.activations,
        )
        linear = ToRound(facts, head.module.weight.data)
        stored: dict[str, Tensor] = {}
        records: list[LayerRecord] = []
        self._once(partial(self._rounded, "", {facts.name: linear}, stats), stored, records)
        self._save(part, stored, records)

    def _install(self, block: nn.Module, index: int, stored: dict[str, Tensor], hooks: ExitStack) -> None:
        """Give a block everything that its part holds."""
        prefix = f"{self._model.anatomy.blocks[index].name}."
        for name, parameter in block.named_parameters():
            key = self._model.names[prefix + name]
            if key in stored and prefix + name.removesuffix(".weight") not in self._chosen:
                parameter.data = stored[key].to(parameter.dtype)
        for name in self._model.anatomy.blocks[index].linears:
            if name in self._chosen:
                self._use(block.get_submodule(name.removeprefix(prefix)), self._model.linears[name], stored, hooks)

    def _use(self, module: nn.Module, facts: LinearFacts, stored: dict[str, Tensor], hooks: ExitStack) -> None:
        """Let a linear compute with its stored weight, and with rounded inputs if the scheme rounds them."""
        scheme = self._chosen[facts.name].scheme
        prefix = facts.key.removesuffix("weight")
        local = {key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)}
        module.weight.data = restore(local, scheme).to(module.weight.dtype)  # type: ignore[union-attr, operator]
        if scheme.activations is not None:
            rounding = ActivationRounding.stored_as(scheme.activations, local)
            hooks.callback(quantize_inputs(module, rounding).remove)
