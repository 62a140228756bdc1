"""Draft heads for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ....system.errors import RuntimeProblem
from ....system.progress import Log
from ...decoder.model import Model
from ...speculation.eagle.draft_head import DraftHead
from ...speculation.eagle.features import Features
from ...speculation.eagle.head_checkpoint import HeadCheckpoint
from ...speculation.eagle.head_drafter import HeadCache, HeadDrafter
from ...weights.checkpoint import Checkpoint
from ..setup.config import EngineConfig
from ..setup.loading import load_operators
from ..setup.parts import EngineParts

# Tokens whose states wait on a CPU, to be fused in one product: the weights are read once for all of them.
_MOST_WAITING = 256


@dataclass(frozen=True)
class LoadedHead:
    """A draft head.

    Attributes:
        head: the head.
    """

    head: DraftHead
    is_part = False

    @classmethod
    def load(cls, path: Path, config: EngineConfig, opened: Checkpoint, verifier: Model, *, log: Log) -> Self:
        """Load one for a model.

        Args:
            path: its directory.
            config: of the engine.
            opened: the verifier's checkpoint.
            verifier: the model that verifies, or this rank's part of it.
            log: gets messages for the user.

        Raises:
            SmeltError: it cannot be read, or does not fit the verifier.
        """
        if config.compile:
            raise RuntimeProblem(
                f"drafter is {path}, a draft head, which reads what is between layers that compile joins; leave compile out"
            )
        head = DraftHead(
            HeadCheckpoint(path), verifier, opened, load_operators(verifier.dtype, config, log=log, drafts=True)
        )
        where = ", ".join(map(str, head.after))
        log(
            f"a draft head of one layer reads what the model leaves after {where} of {len(verifier.spec.layers)} layers"
        )
        return cls(head)

    @property
    def after(self) -> tuple[int, ...]:
        """After how many of the verifier's layers it reads states."""
        return self.head.after

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, besides those that it shares with the verifier."""
        return self.head.nbytes

    def block_bytes(self, block_size: int) -> int:
        """Bytes that it adds to a cache block."""
        return self.head.block_bytes(block_size)

    def step_bytes(self, tokens: int) -> int:
        """Bytes that it adds to a step of the model."""
        return self.head.step_bytes(tokens + self._most_waiting)

    @property
    def _most_waiting(self) -> int:
        """A GPU's graphs reuse the memory of a step's states."""
        return _MOST_WAITING if self.head.device.type == "cpu" else 0

    def drafter(self, parts: EngineParts) -> HeadDrafter:
        """The drafter, for which the model's steps leave features from here on."""
        head, model, config = self.head, parts.model, parts.config
        features = Features(
            head.fuse, parts.blocks, config.block_positions, head.hidden, head.dtype, head.device,
            most_waiting=self._most_waiting if parts.host is None else 0,
        )  # fmt: skip
        model.leave_states(head.after, parts.store, features.write, waits=head.fuse_waits)
        if parts.host is not None:
            parts.host.hold(features.by_block())
        cache = HeadCache(head.keys_values(parts.blocks, config.block_positions), parts.blocks)
        return HeadDrafter(head, cache, features, parts.verifying, longest=parts.max_model_len)
