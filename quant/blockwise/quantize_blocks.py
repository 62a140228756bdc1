"""A quantize step with calibration, block by block; each block reads the outputs of the quantized blocks before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...models.steps.block_loop import BlockJob, BlockResult, run_forward, streamed_model
from ...models.steps.parts import block_files, layers_of, load_part
from ...models.steps.record import LayerRecord
from ...models.steps.step import RunContext
from ...models.structure.anatomy import BlockAnatomy, SharedInput
from ...models.structure.open_model import LinearFacts, OpenModel
from ...system.hardware.resources import release_freed_memory
from ...system.storage.activation_store import ActivationStore
from ..activations import ActivationRounding, quantize_inputs
from ..grid import shared_scale
from ..layer_stats import LayerStats
from ..rounding.learned_weight import Learned
from ..stored.compressed_tensors import restore
from ..stored.kv_cache import KVRounding, RangesCache, with_cache
from ..stored.rounded import RoundedActivations
from ..transforms.links import LinkNames, block_weights, links_of
from .apply_transforms import Transforms, changed_beside, fill
from .assignment import Treatment, alike
from .block_passes import BlockPasses, observe_head
from .embedding import restored_embedding, round_embedding
from .group_quantizer import GroupQuantizer, ToRound, finished, input_rounding
from .guard import LayerGuard
from .unrounded import UnroundedInputs

# Linears, the tensors that the checkpoint stores for each, and its record.
Rounded = list[tuple[ToRound, tuple[dict[str, Tensor], LayerRecord]]]


@dataclass(frozen=True)
class _BlockState:
    """The results for a block, or for the head, so far.

    Attributes:
        stored: the contents of its file.
        records: the records of its layers.
    """

    stored: dict[str, Tensor] = field(default_factory=dict)
    records: list[LayerRecord] = field(default_factory=list)


@dataclass(frozen=True)
class _Block(_BlockState):
    """A block that is being quantized.

    Attributes:
        index: its number.
        store: its input hidden states.
        passes: the windows and the block.
        weights: its parameters, matrices as ``[rows, columns]``.
        held: context managers that end when the block is dropped.
    """

    index: int = field(kw_only=True)
    store: ActivationStore = field(kw_only=True)
    passes: BlockPasses = field(kw_only=True)
    weights: dict[str, Tensor] = field(kw_only=True)
    held: ExitStack = field(kw_only=True)

    @property
    def prefix(self) -> str:
        """The prefix of its linears' names."""
        return f"{self.passes.anatomy.name}."


class BlockQuantizer(BlockJob):
    """Quantizes a model's blocks and head, and saves each as a part in the journal.

    Args:
        model: the model, with its residual stream already rotated where a transform does that.
        chosen: each linear's treatment, by name.
        transforms: what is done to each block's weights before they are rounded.
        cache: how keys and values are cached, if they are quantized.
        guard: limits on a layer's error.
        context: the run around it.
        embedding: whether the input embedding is rounded.

    Attributes:
        parts: the files that it makes: the embedding's, one for each block, the head's.
    """

    description = "quantizing blocks"

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
        # Hidden states of the unrounded model, for methods that need them.
        self._plain: ActivationStore | None = None
        self._guard = guard
        self._model = model
        self._chosen = chosen
        self._alone = {name for name, treatment in chosen.items() if not treatment.method.by_block}
        self._transforms = transforms
        self._context = context
        # Edited weights are in float32, and are rounded from that.
        self._wide = model.is_edited or transforms.change_weights
        self._changes = RoundedActivations()
        self._streamed = streamed_model(model, context, self._changes)
        self._embedding = context.journal / "embedding.safetensors" if embedding else None
        self.files = block_files(context.journal, len(self._streamed))
        if model.anatomy.head in chosen:
            self.files.append(context.journal / "head.safetensors")
        self.parts = [*self.files] if self._embedding is None else [self._embedding, *self.files]

    def run(self) -> None:
        """Make all parts."""
        processes = self._context.processes
        _, layers = processes.broadcast(lambda: ({}, layers_of([part for part in self.parts if part.exists()])))
        self._recall(layers)
        try:
            run_forward(self, self._streamed, self._context)
        finally:
            if self._plain is not None:
                self._plain.close()

    def begin(self) -> Tensor | None:
        """Embed the unrounded model's inputs, if needed, and round the embedding."""
        if any(t.method.by_block or t.options.reads_unrounded for t in self._chosen.values()):
            self._plain = self._streamed.embed(self._context.processes.share(self._context.tokens))
        return self._rounded_embedding()

    def _rounded_embedding(self) -> Tensor | None:
        """The embedding table to use, if not the model's own."""
        part = self._embedding
        if part is None:
            return None

        def make() -> tuple[dict[str, Tensor], None]:
            if not part.exists():
                round_embedding(self._model, self._context.tokens, part)
            return load_part(part), None

        with torch.device("cpu"):
            stored, _ = self._context.processes.broadcast(make)
            return restored_embedding({name: tensor.cpu() for name, tensor in stored.items()})

    def _recall(self, layers: list[dict[str, Any]]) -> None:
        """Restore which layers of a finished part, or of one that another process rounded, got the guard's fallback."""
        for record in layers:
            treatment = self._chosen.get(record["name"])  # the embedding has none
            other = None if treatment is None else self._guard.fallback(treatment)
            if other is not None and record["scheme"] == other.scheme.label:
                self._chosen[record["name"]] = other

    @contextmanager
    def restore(self, index: int, stored: dict[str, Tensor]) -> Iterator[nn.Module]:
        """A block with everything that its part holds."""
        with self._streamed.block(index) as block, ExitStack() as held:
            if self._plain is not None:
                self._streamed.run_block(index, block, self._plain)
            self._install(block, index, stored, held)
            if self._cache is not None:
                prefix = self._model.attention_prefix(index)
                local = {key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)}
                self._changes.keys_values[index] = KVRounding.stored_as(self._cache, local)
            yield block

    @contextmanager
    def work(self, index: int, store: ActivationStore) -> Iterator[BlockResult]:
        """Quantize a block, or the head after them."""
        if index == len(self._streamed):
            yield self._head(store)
            return
        anatomy, streamed = self._model.anatomy.blocks[index], self._streamed
        # Before the block is filled: finding links fills it with random weights.
        with torch.device("cpu"):
            links = links_of(self._model, index) if self._transforms.links else ()
        read_in = torch.float32 if self._wide else streamed.dtype
        with streamed.block(index, read_in) as block, ExitStack() as held:
            weights = block_weights(block, read_in)
            if read_in != streamed.dtype:
                fill(block, weights, streamed.dtype)
            unrounded = held.enter_context(closing(UnroundedInputs(self._compared(anatomy), self._context.processes)))
            call = partial(streamed.call, index)
            entering = self._plain
            if entering is not None:
                # The target for the rounded block: the float block's outputs for float inputs.
                self._plain = entering.beside(entering.shape[2])
                held.callback(entering.close)
                unrounded.record(block, call, entering, self._plain)
            tokens, processes = self._context.tokens.numel(), self._context.processes
            passes = held.enter_context(closing(BlockPasses(block, anatomy, store, call, tokens, processes, unrounded)))
            this = _Block(index=index, store=store, passes=passes, weights=weights, held=held)
            if self._transforms.links:
                self._transform(this, links)
                if entering is not None and unrounded:
                    unrounded.record(block, call, entering)  # the same linears have other inputs now
            self._round(this)
            yield BlockResult(this.stored, this.records, passes.advance)

    def _transform(self, this: _Block, links: tuple[LinkNames, ...]) -> None:
        """Move scales within a block."""
        names = self._model.anatomy.blocks[this.index].local_names(self._chosen)
        schemes = {local: self._chosen[name].scheme for name, local in names.items()}
        self._transforms.apply(this.passes, links, this.weights, schemes, self._model.dtype)
        this.stored.update(changed_beside(self._model, this.index, this.weights, schemes.keys()))
        # What the block computes from now on is what it would compute if it was restored.
        self._install_beside(this.passes.block, this.index, this.stored)

    def _round(self, this: _Block) -> None:
        """Round all chosen linears of a block; it computes with the result from then on."""
        for phase in this.passes.anatomy.phases():
            self._phase(this, phase)
        self._learn(this)
        if self._cache is not None:
            this.stored.update(self._keys_values(this))
            this.passes.close()  # stored attention outputs were computed with unrounded keys and values

    def _phase(self, this: _Block, phase: list[SharedInput]) -> None:
        passes, prefix = this.passes, this.prefix
        wanted = passes.anatomy.wanted_groups(self._alone, phase)
        hessian = any(self._chosen[prefix + name].method.needs_hessian for group in wanted for name in group.linears)
        widest = max(passes.anatomy.wanted_groups(self._alone), key=passes.columns, default=None)
        for group, stats in passes.observe(wanted, hessian=hessian):
            if group == widest:
                release_freed_memory()  # what follows is a block's memory peak
            linears = {name: self._to_round(this, name) for name in group.linears}
            self._once(this, partial(self._rounded, prefix, linears, stats))
        self._use_all(this, wanted)

    def _to_round(self, this: _Block, name: str) -> ToRound:
        facts, weight = self._model.linears[this.prefix + name], this.weights[f"{name}.weight"]
        return ToRound(facts, weight if self._wide else weight.to(facts.dtype))

    def _compared(self, anatomy: BlockAnatomy) -> dict[str, QuantizationArgs | None]:
        """The first linear of each group whose method needs its inputs in the unrounded model, and how its inputs are rounded."""
        prefix = f"{anatomy.name}."
        return {
            group.linears[0]: self._chosen[prefix + group.linears[0]].scheme.activations
            for group in anatomy.wanted_groups(self._alone)
            if any(self._chosen[prefix + name].options.reads_unrounded for name in group.linears)
        }

    def _once(self, found: _BlockState, rounding: Callable[[], Rounded]) -> None:
        """Round in the first process, and broadcast the result."""

        def make() -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
            tensors: dict[str, Tensor] = {}
            layers: list[dict[str, Any]] = []
            for linear, (each, record) in rounding():
                key = linear.facts.key.removesuffix("weight")
                tensors |= {key + local: tensor for local, tensor in each.items()}
                layers.append(record.as_data())
            return tensors, layers

        tensors, layers = self._context.processes.broadcast(make)
        self._recall(layers)
        found.stored.update(tensors)
        found.records.extend(LayerRecord.of_data(layer) for layer in layers)

    def _learn(self, this: _Block) -> None:
        """Round together the linears whose method works on the whole block."""
        passes, prefix = this.passes, this.prefix
        wanted = passes.anatomy.wanted_groups(self._chosen.keys() - self._alone)
        if not wanted:
            return
        assert self._plain is not None
        passes.close()  # the block's stored activations do not hold while it learns
        stats = {name: found for group, found in passes.statistics(wanted) for name in group.linears}
        linears: dict[str, ToRound] = {}
        layers: dict[str, Learned] = {}
        for group in wanted:
            together = {name: self._to_round(this, name) for name in group.linears}
            linears |= together
            layers |= self._learned(this, together, stats)
        method, options = next((t.method, t.options) for t in self._chosen.values() if t.method.by_block)
        assert method.block is not None
        round_block = method.block
        processes = self._context.processes
        with processes.collected(this.store) as inputs, processes.collected(self._plain) as targets:

            def learn() -> Rounded:
                learned = round_block(
                    layers,
                    lambda hidden: self._streamed.call(this.index, hidden).run(passes.block, hidden),
                    inputs.gather,
                    targets.gather,
                    inputs.shape[0],
                    options,
                )
                found: Rounded = []
                for name, linear in linears.items():
                    scheme, rounding = self._chosen[prefix + name].scheme, layers[name].activations
                    tensors, record = finished(linear, learned[name], scheme, stats[name], rounding)
                    self._guard.judge(record)
                    found.append((linear, (tensors, record)))
                return found

            self._once(this, learn)
        self._use_all(this, wanted)

    def _learned(self, this: _Block, linears: dict[str, ToRound], stats: dict[str, LayerStats]) -> dict[str, Learned]:
        """The learned rounding of linears that share their inputs."""
        weights = [this.weights[f"{name}.weight"] for name in linears]
        shared = shared_scale(weights, self._chosen[this.prefix + next(iter(linears))].scheme.args)
        found = {}
        for name, linear in linears.items():
            scheme, module = self._chosen[this.prefix + name].scheme, this.passes.block.get_submodule(name)
            together = [each.weight for each in linears.values()]
            found[name] = Learned(
                module,
                scheme.args,
                linear.facts.dtype,
                input_rounding(scheme, stats[name], together, linear.facts.dtype),
                isinstance(module, Conv1D),
                shared,
                linear.weight if self._wide else None,
            )
        return found

    def _rounded(self, prefix: str, linears: dict[str, ToRound], stats: LayerStats) -> Rounded:
        """Round the linears of a group, and again with more bits where the guard requires it."""

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
        # Linears with the same input are stored alike; transformers requires one scheme for all experts.
        others = {
            linear.facts.name: self._guard.fallback(self._chosen[linear.facts.name])
            for linear, _ in found
            if not linear.facts.is_expert
        }
        if not others or None in others.values():
            for record in failing:
                record.notes.append(self._guard.sentence(record))
            return found
        worst = max(failing, key=lambda record: record.error or 0.0)
        self._chosen.update({name: other for name, other in others.items() if other is not None})
        again = attempt()
        for _, (_, record) in again:
            record.notes.append(
                f"stored as {record.scheme}, because at {worst.scheme} {worst.name}: {self._guard.sentence(worst)}"
            )
        return again

    def _keys_values(self, this: _Block) -> dict[str, Tensor]:
        """Calibrate the KV cache's scales on the block as rounded so far, and compute with them from here on."""
        assert self._cache is not None
        ranges, index = RangesCache(), this.index
        if self._cache.dynamic is not True:
            for batch in this.store.batches():
                hidden = this.store.read(batch)
                with_cache(self._streamed.call(index, hidden), ranges).run(this.passes.block, hidden)
            rounding = ranges.rounding(self._cache, self._model.dtype, self._context.processes)
        else:
            rounding = KVRounding.stored_as(self._cache, {})
        self._changes.keys_values[index] = rounding
        prefix = self._model.attention_prefix(index)
        return {prefix + name: tensor for name, tensor in rounding.stored().items()}

    def _head(self, store: ActivationStore) -> BlockResult:
        facts = self._model.head
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
        linear, found = ToRound(facts, head.module.weight.data), _BlockState()
        self._once(found, partial(self._rounded, "", {facts.name: linear}, stats))
        return BlockResult(found.stored, found.records)

    def _install(self, block: nn.Module, index: int, stored: dict[str, Tensor], held: ExitStack) -> None:
        """Load everything that its part holds into a block."""
        self._install_beside(block, index, stored)
        for name, local in self._model.anatomy.blocks[index].local_names(self._chosen).items():
            self._use(block.get_submodule(local), self._model.linears[name], stored, held)

    def _install_beside(self, block: nn.Module, index: int, stored: dict[str, Tensor]) -> None:
        """Load what its part holds besides the linears that are rounded."""
        prefix = f"{self._model.anatomy.blocks[index].name}."
        for name, parameter in block.named_parameters():
            key = self._model.names[prefix + name]
            if key in stored and prefix + name.removesuffix(".weight") not in self._chosen:
                parameter.data = stored[key].to(parameter.dtype)

    def _use_all(self, this: _Block, groups: Iterable[SharedInput]) -> None:
        for group in groups:
            for name in group.linears:
                module, facts = this.passes.block.get_submodule(name), self._model.linears[this.prefix + name]
                self._use(module, facts, this.stored, this.held)

    def _use(self, module: nn.Module, facts: LinearFacts, stored: dict[str, Tensor], held: ExitStack) -> None:
        """Let a linear compute with its stored weight, and with rounded inputs if the scheme rounds them."""
        scheme = self._chosen[facts.name].scheme
        prefix = facts.key.removesuffix("weight")
        local = {key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)}
        module.weight.data = restore(local, scheme).to(module.weight.dtype)  # type: ignore[union-attr, operator]
        if scheme.activations is not None:
            rounding = ActivationRounding.stored_as(scheme.activations, local)
            held.callback(quantize_inputs(module, rounding).remove)
