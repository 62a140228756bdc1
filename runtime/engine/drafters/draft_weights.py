"""What drafts with weights."""

from __future__ import annotations

from typing import Protocol

from ...decoder.model import Model
from ...decoder.parts.kv_cache import KeysValues
from ...speculation.stepwise import StepwiseDrafter
from ..setup.config import EngineConfig
from ..setup.host_blocks import HostBlocks


class DraftWeights(Protocol):
    """What drafts with weights: a model, or a draft head.

    Attributes:
        nbytes: of its weights, besides those that it shares with the verifier.
        is_part: whether its layers are the verifier's own.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def is_part(self) -> bool: ...

    def block_bytes(self, block_size: int) -> int:
        """Bytes that it adds to a cache block."""
        ...

    def step_bytes(self, tokens: int) -> int:
        """Bytes that it adds to a step of the model, of so many tokens."""
        ...

    def drafter(
        self,
        model: Model,
        store: KeysValues,
        blocks: int,
        ends: frozenset[int],
        config: EngineConfig,
        *,
        max_model_len: int,
        host: HostBlocks | None,
    ) -> StepwiseDrafter:
        """The drafter.

        Args:
            model: the verifier.
            store: its keys and values.
            blocks: how many blocks they have.
            ends: tokens that end a sequence.
            config: of the engine.
            max_model_len: the most tokens of a sequence.
            host: holds the verifier's blocks that are swapped out; None if none are.
        """
        ...
