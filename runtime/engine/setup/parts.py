"""What an engine has loaded, from which its drafter and its executor are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....system.progress import Log
from ...decoder.model import Model
from ...decoder.parts.batch import Run
from ...decoder.parts.kv_cache import KeysValues
from ...speculation.stepwise import Verifying
from .config import EngineConfig
from .host_blocks import HostBlocks
from .loading import on_device_of


@dataclass(frozen=True)
class EngineParts:
    """A loaded engine.

    Attributes:
        model: the model.
        store: its KV cache.
        blocks: how many blocks that has.
        ends: tokens that end a sequence.
        config: the options.
        max_model_len: the most tokens of a sequence.
        host: the cache's blocks in host memory; None if plans swap none.
        log: gets messages for the user.
        divided: lets other ranks compute their share of tokens that a part of the model drafts; None if there are none.
    """

    model: Model
    store: KeysValues
    blocks: int
    ends: frozenset[int]
    config: EngineConfig
    max_model_len: int
    host: HostBlocks | None = None
    log: Log = lambda _: None
    divided: Callable[[list[Run]], None] | None = None

    @property
    def verifying(self) -> Verifying:
        """What its drafter needs of it."""
        config, vocabulary = self.config, self.model.spec.vocabulary
        return Verifying(vocabulary, self.ends, config.seed, config.max_num_batched_tokens, on_device_of(self.model))
