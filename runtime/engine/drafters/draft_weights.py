"""What drafts with weights."""

from __future__ import annotations

from typing import Protocol

from ...speculation.stepwise import StepwiseDrafter
from ..setup.parts import EngineParts


class DraftWeights(Protocol):
    """What drafts with weights: a model, or a draft head.

    Attributes:
        nbytes: of its weights, besides those that it shares with the verifier.
        is_part: whether its layers are the verifier's own.
        after: after how many of the verifier's layers it reads states; none if it reads tokens alone.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def is_part(self) -> bool: ...

    @property
    def after(self) -> tuple[int, ...]: ...

    def block_bytes(self, block_size: int) -> int:
        """Bytes that it adds to a cache block."""
        ...

    def step_bytes(self, tokens: int) -> int:
        """Bytes that it adds to a step of the model, of so many tokens."""
        ...

    def drafter(self, parts: EngineParts) -> StepwiseDrafter:
        """The drafter.

        Args:
            parts: of the engine, whose model verifies.
        """
        ...
