"""A checkpoint loaded by transformers and by Smelt, compared block by block as both run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import decompress_module
from compressed_tensors.quantization import QuantizationStatus
from torch import Tensor, nn

from ...models.streaming.streamed import StreamedModel
from ...quant.stored.compressed import CompressedModel
from ...quant.stored.dense_weights import DenseWeights
from ...system.errors import SmeltError
from ...system.hardware.resources import release_freed_memory
from ...system.storage.activation_store import ActivationStore


class Lockstep:
    """transformers' model and ours, run on the same tokens.

    compressed-tensors dequantizes what transformers keeps packed, but only while a block runs and not all at once, so
    the dense model need not fit in memory.

    Args:
        checkpoint: the checkpoint that both were loaded from.
        loaded: transformers' model.
        ours: our view of the checkpoint.
        view: the same, to be run.
    """

    def __init__(self, checkpoint: Path, loaded: nn.Module, ours: CompressedModel, view: StreamedModel) -> None:
        self._checkpoint = checkpoint
        self._loaded = loaded
        self._ours = ours
        self._view = view
        self._known: set[object] = set()
        self._packed = {
            facts.name: facts.key
            for facts in ours.model.linears.values()
            if isinstance(ours.weights, DenseWeights) and facts.key in ours.weights.packed
        }

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of transformers' model and of ours.

        Raises:
            SmeltError: the embedding, or a linear that transformers did not fuse, differs from ours in any bit.
        """
        model, loaded = self._ours.model, self._loaded
        blocks = loaded.get_submodule(model.skeleton.blocks_name)
        assert isinstance(blocks, nn.ModuleList)
        inside = set(blocks.modules())
        _restore(module for module in loaded.modules() if module not in inside)
        # compressed-tensors would dequantize everything at the first call.
        everything_at_once = getattr(loaded, "ct_decompress_hook", None)
        if everything_at_once is not None:
            everything_at_once.remove()
        outside = {model.skeleton.embedding_name: model.embedding_key, model.head.name: model.head.key}
        for name, key in outside.items():
            self._compare(name, self._ours.weights.load(key))
        store = self._view.embed(tokens)
        with ExitStack() as hooks:
            hooks.callback(store.close)
            for index, block in enumerate(blocks):
                self._follow(index, block, store, hooks)
            theirs: Tensor = loaded(input_ids=tokens, use_cache=False).logits
            return theirs, self._view.head()(store.read(slice(None)))

    def _follow(self, index: int, block: nn.Module, store: ActivationStore, hooks: ExitStack) -> None:
        """Compare block ``index`` with ours, and run ours, whenever transformers runs its own."""
        prefix = f"{self._ours.model.skeleton.blocks_name}.{index}."
        linears = [f.name for f in self._ours.model.linears.values() if f.name.startswith(prefix)]
        restored: list[nn.Module] = []

        def before(*_: Any) -> None:
            same = [name for name in linears if self._is_restored_alike(name)]
            restored.extend(_restore(block.modules()))
            lent = {name: self._loaded.get_submodule(name).weight for name in same}
            with self._view.block(index, lent=lent) as mine:  # type: ignore[arg-type]
                for name in linears:
                    if name not in lent:
                        self._compare(name, mine.get_submodule(name.removeprefix(prefix)).weight)  # type: ignore[arg-type]
                self._view.run_block(index, mine, store)

        def after(*_: Any) -> None:
            for module in restored:
                module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
            restored.clear()
            release_freed_memory()

        hooks.callback(block.register_forward_pre_hook(before).remove)
        hooks.callback(block.register_forward_hook(after).remove)

    def _is_restored_alike(self, name: str) -> bool:
        """Whether transformers holds a linear's stored tensors bit for bit, and dequantizes them as we do.

        Then dequantizing a second time could only give the same. The first of each shape and format is always
        dequantized by both.
        """
        if name not in self._packed:
            return False
        assert isinstance(self._ours.weights, DenseWeights)
        try:
            module = self._loaded.get_submodule(name)
        except AttributeError:  # an expert, fused with its neighbours
            return False
        parts, scheme = self._ours.weights.parts(self._packed[name])
        group, theirs = scheme.config_group(["Linear"]), getattr(module, "quantization_scheme", None)
        if theirs is None or (theirs.weights, theirs.format) != (group.weights, group.format):
            return False
        for local, ours in parts.items():
            held = getattr(module, local, None)
            if not isinstance(held, Tensor) or held.dtype != ours.dtype or not torch.equal(held.cpu(), ours):
                return False
        kind = (scheme.label, tuple((local, tensor.shape) for local, tensor in parts.items()))
        first = kind not in self._known
        self._known.add(kind)
        return not first

    def _compare(self, name: str, ours: Tensor) -> None:
        try:
            theirs = self._loaded.get_submodule(name).weight
        except AttributeError:  # an expert, fused with its neighbours
            return
        if not torch.equal(theirs.cpu(), ours.to(theirs.dtype)):  # type: ignore[union-attr, operator, arg-type]
            raise SmeltError(
                f"{self._checkpoint}: {name} reloads with other weights; nothing was published, please report this"
            )


def _restore(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Dequantize the weights of modules that hold them packed."""
    packed = [m for m in modules if getattr(m, "quantization_status", None) == QuantizationStatus.COMPRESSED]
    for module in packed:
        decompress_module(module)
    return [module for module in packed if hasattr(module, "weight")]
