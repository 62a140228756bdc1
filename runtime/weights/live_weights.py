"""A checkpoint in memory: unquantized weights by name, with their configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...system.errors import RuntimeProblem
from .matrix import Matrix


class LiveWeights:
    """Stands in for a :class:`Checkpoint` whose weights are in memory, such as those of a model in training.

    Args:
        config: the Hugging Face configuration.
        dtype: the model's compute dtype.
        names: of the tensors, as in a checkpoint.
        load: returns a tensor by name.
    """

    cache_args = None
    path = Path("the weights in memory")

    def __init__(self, config: Any, dtype: torch.dtype, names: Iterable[str], load: Callable[[str], Tensor]) -> None:
        self.config, self.dtype = config, dtype
        self._names, self._load = frozenset(names), load

    def check(self) -> None:
        """Nothing to check: a working model has all its tensors."""

    def place_together(self, names: Sequence[str]) -> None:
        """Nothing to do: weights are copied."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._names

    def tensor(self, name: str) -> Tensor:
        """A copy of a tensor: later changes of the weights do not affect it."""
        if name not in self._names:
            raise RuntimeProblem(f"{self.path} do not include {name}")
        return self._load(name).detach().clone()

    def optional(self, name: str) -> Tensor | None:
        """A tensor, or None if there is none."""
        return self.tensor(name) if self.has(name) else None

    def has_matrix(self, name: str) -> bool:
        """Whether there is a weight of linear ``name``."""
        return self.has(f"{name}.weight")

    def matrix(self, name: str, kind: str = "Linear") -> Matrix:
        """The weight of linear ``name``, or of another kind of module."""
        return Matrix.plain(self.tensor(f"{name}.weight"))
