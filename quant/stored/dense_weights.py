"""A compressed checkpoint seen as dense weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...models.checkpoint.stored_shapes import restored_shape
from ...models.checkpoint.weights import CheckpointWeights
from ...system.storage.tensor_files import TensorInfo
from ..scheme import Scheme
from .compressed_tensors import restore

# Stored with an attention's weights: the scales of its KV cache, which are not weights.
CACHE_SCALES = ("k_scale", "v_scale", "k_zero_point", "v_zero_point")


class DenseWeights:
    """A compressed checkpoint seen as dense weights: each is restored when it is loaded.

    Args:
        stored: the stored tensors.
        scheme_of: how a module is stored, by its name in the checkpoint.
    """

    def __init__(self, stored: CheckpointWeights, scheme_of: Callable[[str], Scheme]) -> None:
        self._stored = stored
        self._scheme_of = scheme_of
        self.packed: dict[str, list[str]] = {}
        self._beside: set[str] = set()
        by_module: dict[str, list[str]] = {}
        for name in stored.names():
            by_module.setdefault(name.rpartition(".")[0], []).append(name)
        for module, parts in by_module.items():
            if f"{module}.weight_scale" in parts:
                self.packed[f"{module}.weight"] = [p for p in parts if p.rpartition(".")[2].startswith("weight")]
                self._beside |= {p for p in parts if p.rpartition(".")[2].startswith("input_")}
            self._beside |= {p for p in parts if p.rpartition(".")[2] in CACHE_SCALES}

    def names(self) -> list[str]:
        hidden = {part for parts in self.packed.values() for part in parts} | self._beside
        return [name for name in self._stored.names() if name not in hidden] + list(self.packed)

    def info(self, name: str) -> TensorInfo:
        if name not in self.packed:
            return self._stored.info(name)
        prefix = name.removesuffix("weight")
        scale = self._stored.info(f"{prefix}weight_scale").dtype
        # Scales in the format's dtype do not show the weight's dtype, and compressed-tensors restores bfloat16.
        dtype = scale if scale in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16
        return TensorInfo(dtype, restored_shape(self._stored, prefix.removesuffix(".")))

    def load(self, name: str) -> Tensor:
        if name not in self.packed:
            return self._stored.load(name)
        return restore(*self.parts(name))

    def parts(self, name: str) -> tuple[dict[str, Tensor], Scheme]:
        """The stored tensors of a packed weight, by local name, and its scheme."""
        prefix = name.removesuffix("weight")
        parts = {part.removeprefix(prefix): self._stored.load(part) for part in self.packed[name]}
        return parts, self._scheme_of(prefix.removesuffix("."))

    @property
    def nbytes(self) -> int:
        """Bytes of the dense weights."""
        return sum(self.info(name).nbytes for name in self.names())
