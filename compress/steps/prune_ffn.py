"""The prune step for feed-forward channels: which stay in each block, and what the rest do to make up for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...prune.channels import channel_scores, refitted
from ...quant.layer_stats import LayerStats, output_error
from ...runtime.device import on
from ...runtime.machine import human_bytes
from ..activations import BATCH_TOKENS, ActivationStore
from ..anatomy import SharedInput
from ..checkpoint import Entry, write_checkpoint
from ..errors import Problem, SmeltError
from ..links import as_rows
from ..narrower import FeedForward, narrower
from ..open_model import OpenModel
from ..recipe import Prune
from ..resources import Cost, compute_dtype, release_freed_memory
from ..safetensors_file import SafetensorsFile
from ..streamed import StreamedModel
from .block_passes import BlockPasses
from .group_quantizer import LayerRecord
from .parts import layers_of, load_part, save_part
from .step import RunContext, StepRecord

_TRIED_LENGTH, _TRIED_DIFFERENCE = 16, 1e-3
# Widths that kernels and groups of scales like.
_MULTIPLE, _SMALL_MULTIPLE, _SMALL = 64, 8, 512
_KEPT = "kept_channels"


class PruneFfnStep:
    """Take channels out of every feed-forward layer, the same number of each.

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
        self._score = settings.score or "activation"
        assert settings.ratio is not None
        self._ratio = settings.ratio

    @property
    def label(self) -> str:
        update = "" if self.settings.update is None else " + least squares"
        return f"{self._ratio:.0%} of ffn fewer by {self._score}{update}"

    def check(self, model: OpenModel) -> list[Problem]:
        try:
            layers = FeedForward.find(model)
        except SmeltError as error:
            return [Problem(f"{self._where}.structure", str(error))]
        left = self._left(layers)
        if left < 1:
            what = f"leaves none of {layers.width} feed-forward channels; take a smaller share"
            return [Problem(f"{self._where}.ratio", what)]
        if left == layers.width:
            what = (
                f"takes none of {layers.width} feed-forward channels, which go in {_multiple(layers.width)}s; take more"
            )
            return [Problem(f"{self._where}.ratio", what)]
        try:
            narrower(model, layers, left)
        except SmeltError as error:
            return [Problem(f"{self._where}.structure", str(error))]
        return []

    def outlook(self, model: OpenModel) -> OpenModel:
        layers = FeedForward.find(model)
        return narrower(model, layers, self._left(layers))

    def plan(self, model: OpenModel) -> dict[str, Any]:
        layers = FeedForward.find(model)
        before, after = model.weights.nbytes, self.outlook(model).weights.nbytes
        left = self._left(layers)
        return {
            "step": "prune",
            "structure": "ffn",
            "score": self._score,
            "update": self.settings.update,
            "width_before": layers.width,
            "width_after": left,
            "bytes_before": before,
            "bytes_after": after,
            "checkpoint_bytes": after,
            "stays_packed": True,
            "sentence": f"prune feed-forward layers from {layers.width} to {left} channels by {self._score}:"
            f" {human_bytes(before)} -> {human_bytes(after)}",
        }

    def cost(self, model: OpenModel, windows: int, length: int) -> Cost:
        layers = FeedForward.find(model)
        tokens, number = windows * length, compute_dtype(model.dtype).itemsize
        numel, square = model.largest_block(), layers.width**2
        hidden = model.skeleton.hidden_size
        matrices = 4 * square * 4 + layers.width * hidden * 4 * 3 if self.settings.update else 0
        passing = max(BATCH_TOKENS, length) * 4 * layers.width * number
        memory = max(numel * number + max(matrices, passing), model.embedding_bytes())
        operations = sum(4.0 * tokens * model.block_numel(i) for i in range(len(model.anatomy.blocks)))
        if self.settings.update:
            operations += len(model.anatomy.blocks) * (2.0 * tokens * square + layers.width**3)
        return Cost(int(memory), int(2 * model.weights.nbytes + tokens * (hidden + layers.width) * number), operations)

    def run(self, model: OpenModel, context: RunContext, target: Path) -> StepRecord:
        layers = FeedForward.find(model)

        def tried() -> tuple[dict[str, Tensor], None]:
            self._try_layout(model, layers, context)
            return {}, None

        context.processes.from_first(tried)
        parts = self._parts(model, layers, context)
        files = [SafetensorsFile(part) for part in parts]
        kept = {index: file.load(_KEPT) for index, file in enumerate(files)}
        after = narrower(model, layers, kept, {name: file for file in files for name in file.tensors if name != _KEPT})
        entries: list[Entry] = []
        for name in after.weights.names():
            info = after.weights.info(name)
            entries.append((name, info, lambda name=name, info=info: after.weights.load(name).to(info.dtype)))
        config, trust = after.directory.config_data(), model.directory.trust_remote_code
        write_checkpoint(target, model.directory.path, config, entries, with_code=trust)
        done = f"feed-forward layers have {self._left(layers)} of {layers.width} channels"
        return StepRecord(
            "prune", self.settings.model_dump(mode="json"), layers_of(parts), list(model.anatomy.unknown), None, [done]
        )

    def help(self, model: OpenModel, context: RunContext) -> None:
        context.processes.wait()  # for what the first tries
        self._parts(model, FeedForward.find(model), context)

    def _left(self, layers: FeedForward) -> int:
        """How many channels stay; a multiple of what kernels and groups like."""
        multiple = _multiple(layers.width)
        return round(layers.width * (1 - self._ratio) / multiple) * multiple

    def _try_layout(self, model: OpenModel, layers: FeedForward, context: RunContext) -> None:
        """See, with any channels, that the narrower model computes what the whole one does when the rest are not read."""
        generator = torch.Generator().manual_seed(context.seed)
        left = self._left(layers)
        kept = {
            index: torch.randperm(layers.width, generator=generator)[:left].sort().values
            for index in range(len(model.anatomy.blocks))
        }
        tokens = context.tokens[:1, :_TRIED_LENGTH]
        found = []
        with torch.no_grad():
            for each, masked in ((model, True), (narrower(model, layers, kept), False)):
                streamed = StreamedModel(each.skeleton, each.weights, torch.float32, context.journal)
                store = streamed.embed(tokens)
                for index in range(len(streamed)):
                    with streamed.block(index) as block:
                        if masked:
                            reader = block.get_submodule(layers.reader)
                            unread = torch.ones(layers.width, dtype=torch.bool)
                            unread[kept[index]] = False
                            as_rows(reader, reader.weight.data)[:, unread] = 0  # type: ignore[union-attr, arg-type]
                        streamed.run_block(index, block, store)
                found.append(store.read(slice(None)))
                store.close()
        if (found[0] - found[1]).norm() > _TRIED_DIFFERENCE * found[0].norm():
            raise SmeltError(
                f"{self._where}: {type(model.skeleton.model).__name__} arranges its feed-forward channels in a way that Smelt"
                " does not follow; they cannot be pruned"
            )

    def _parts(self, model: OpenModel, layers: FeedForward, context: RunContext) -> list[Path]:
        """Go through the blocks in order; each reads what the pruned ones before it give."""
        context.journal.mkdir(parents=True, exist_ok=True)
        processes = context.processes
        streamed = StreamedModel(model.skeleton, model.weights, context.dtype, context.journal, device=processes.device)
        parts = [context.journal / f"block-{i:05d}.safetensors" for i in range(len(streamed))]
        _, finished = processes.from_first(lambda: ({}, [part.exists() for part in parts]))
        if all(finished):
            return parts
        with on(processes.device):
            store = streamed.embed(processes.share(context.tokens))
            try:
                for index in context.progress.track(range(len(streamed)), "pruning feed-forward layers", len(streamed)):
                    release_freed_memory()
                    if finished[index]:
                        stored, _ = processes.from_first(lambda index=index: (load_part(parts[index]), None))
                        with streamed.block(index) as block:
                            self._use(block, model, layers, index, stored)
                            streamed.run_block(index, block, store)
                    else:
                        self._block(model, layers, index, streamed, store, parts[index], context)
            finally:
                store.close()
        return parts

    def _block(
        self,
        model: OpenModel,
        layers: FeedForward,
        index: int,
        streamed: StreamedModel,
        store: ActivationStore,
        part: Path,
        context: RunContext,
    ) -> None:
        anatomy, processes = model.anatomy.blocks[index], context.processes
        facts = model.linears[f"{anatomy.name}.{layers.reader}"]
        with streamed.block(index) as block:
            passes = BlockPasses(
                block, anatomy, store, lambda hidden: streamed.call(index, hidden), context.tokens.numel(), processes
            )
            try:
                phase = next(group.phase for group in anatomy.groups if layers.reader in group.linears)
                observed = passes.observe(
                    [SharedInput((layers.reader,), phase)], hessian=self.settings.update is not None, energy=True
                )
                ((_, stats),) = list(observed)

                def make() -> tuple[dict[str, Tensor], dict[str, Any]]:
                    reader = block.get_submodule(layers.reader)
                    whole = as_rows(reader, model.weights.load(facts.key)).to(processes.device)
                    kept, weight, record = self._pruned(whole, layers, index, model, stats)
                    narrow = as_rows(reader, weight.to(facts.dtype)).contiguous()
                    return {_KEPT: kept, facts.key: narrow}, record.as_data()

                stored, record = processes.from_first(make)
                if processes.leads:
                    cpu = {name: tensor.cpu() for name, tensor in stored.items()}
                    save_part(part, cpu, [LayerRecord.of_data(record)])
                if index + 1 < len(streamed):
                    self._use(block, model, layers, index, stored)
                    passes.advance()
            finally:
                passes.close()

    def _pruned(
        self, weight: Tensor, layers: FeedForward, index: int, model: OpenModel, stats: LayerStats
    ) -> tuple[Tensor, Tensor, LayerRecord]:
        """Which channels stay, what their reader becomes, and what is told of it."""
        name = f"{model.anatomy.blocks[index].name}.{layers.reader}"
        assert stats.energy is not None
        if not stats.energy.isfinite().all():
            raise SmeltError(f"{name}: its inputs on the calibration text are not finite; use other text")
        scores = channel_scores(self._score, weight, stats.energy)
        kept = scores.topk(self._left(layers)).indices.sort().values
        narrow, notes = weight.float()[:, kept], list[str]()
        if self.settings.update is not None:
            assert stats.hessian is not None
            narrow, notes = refitted(weight, stats.hessian, kept)
        whole = torch.zeros_like(weight, dtype=torch.float32)
        whole[:, kept] = narrow
        error = output_error(weight, whole, stats)
        rounded = None if error is None else float(f"{error:.4g}")
        return kept, narrow, LayerRecord(name, (weight.shape[0], len(kept)), self.label, rounded, notes)

    def _use(
        self, block: torch.nn.Module, model: OpenModel, layers: FeedForward, index: int, stored: dict[str, Tensor]
    ) -> None:
        """Let a block compute what its narrower self will: with zeros where channels are gone."""
        reader = block.get_submodule(layers.reader)
        key = model.linears[f"{model.anatomy.blocks[index].name}.{layers.reader}"].key
        target = as_rows(reader, reader.weight.data)  # type: ignore[union-attr, arg-type]
        target.zero_()
        target[:, stored[_KEPT].to(target.device)] = as_rows(reader, stored[key]).to(target.device, target.dtype)


def _multiple(width: int) -> int:
    return _SMALL_MULTIPLE if width < _SMALL else _MULTIPLE
