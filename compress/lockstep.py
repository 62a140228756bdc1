"""A checkpoint in transformers beside the same in ours, compared block by block as both are run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import decompress_module
from compressed_tensors.quantization import QuantizationStatus
from torch import Tensor, nn

from ..system.errors import SmeltError
from .activations import ActivationStore
from .compressed import CompressedModel
from .resources import release_freed_memory
from .streamed import StreamedModel


class Lockstep:
    """transformers' model and ours, which share the tokens they read.

    compressed-tensors restores what transformers keeps packed, as it would for anyone, but only while a block
    runs and not all at once: so the dense model need not fit in memory.

    Args:
        checkpoint: what both were loaded from.
        loaded: transformers' model.
        ours: our view of the checkpoint.
        view: the same, to be run.
    """

    def __init__(self, checkpoint: Path, loaded: nn.Module, ours: CompressedModel, view: StreamedModel) -> None:
        self._checkpoint = checkpoint
        self._loaded = loaded
        self._ours = ours
        self._view = view

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of transformers' model and of ours.

        Raises:
            SmeltError: the embedding, or a linear that transformers kept as one, does not hold bit for bit what ours does.
        """
        model, loaded = self._ours.model, self._loaded
        blocks = loaded.get_submodule(model.skeleton.blocks_name)
        assert isinstance(blocks, nn.ModuleList)
        inside = set(blocks.modules())
        _restore(module for module in loaded.modules() if module not in inside)
        # compressed-tensors would restore everything at the first call.
        everything_at_once = getattr(loaded, "ct_decompress_hook", None)
        if everything_at_once is not None:
            everything_at_once.remove()
        embedding = model.skeleton.embedding_name
        outside = {embedding: model.names[f"{embedding}.weight"]}
        prefix = f"{model.skeleton.blocks_name}."
        outside |= {f.name: f.key for f in model.linears.values() if not f.name.startswith(prefix)}
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
            restored.extend(_restore(block.modules()))
            with self._view.block(index) as mine:
                for name in linears:
                    self._compare(name, mine.get_submodule(name.removeprefix(prefix)).weight)  # type: ignore[arg-type]
                self._view.run_block(index, mine, store)

        def after(*_: Any) -> None:
            for module in restored:
                module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
            restored.clear()
            release_freed_memory()

        hooks.callback(block.register_forward_pre_hook(before).remove)
        hooks.callback(block.register_forward_hook(after).remove)

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
    """Restore the weights of those modules that hold them packed."""
    packed = [m for m in modules if getattr(m, "quantization_status", None) == QuantizationStatus.COMPRESSED]
    for module in packed:
        decompress_module(module)
    return [module for module in packed if hasattr(module, "weight")]
