"""Running a model with inputs, keys and values rounded as in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import nn

from ...models.structure.block_calls import BlockCall
from ..activations import ActivationRounding, quantize_inputs
from .kv_cache import KVRounding, RoundedCache, with_cache


class RoundedActivations:
    """Changes to a :class:`StreamedModel`: inputs of linears, and keys and values, are rounded.

    Args:
        inputs: the input roundings, by linear name.
        keys_values: the KV cache roundings, by block index. May be extended while the model runs.
    """

    def __init__(
        self,
        inputs: Mapping[str, ActivationRounding] | None = None,
        keys_values: dict[int, KVRounding] | None = None,
    ) -> None:
        self._inputs = inputs or {}
        self.keys_values = keys_values or {}

    @contextmanager
    def to_block(self, prefix: str, block: nn.Module) -> Iterator[None]:
        """Round the inputs of a block's linears."""
        with ExitStack() as hooks:
            for name, rounding in self._inputs.items():
                if name.startswith(prefix):
                    hooks.enter_context(quantize_inputs(block.get_submodule(name.removeprefix(prefix)), rounding))
            yield

    def to_call(self, index: int, call: BlockCall) -> BlockCall:
        """Give a block a cache that rounds."""
        return with_cache(call, RoundedCache(self.keys_values[index])) if index in self.keys_values else call

    def to_head(self, name: str, head: nn.Module) -> None:
        """Round the inputs of the output head."""
        if name in self._inputs:
            quantize_inputs(head, self._inputs[name])
