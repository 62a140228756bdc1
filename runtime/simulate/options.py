"""An engine's options, as far as they decide which sequences run when."""

from __future__ import annotations

from dataclasses import dataclass

from ..blocks.block_cache import BlockCache
from ..blocks.host_tier import HostTier
from ..scheduling.admission import PeakAdmission
from ..scheduling.policies.table import POLICIES
from ..scheduling.scheduler import Scheduler
from ..scheduling.swapping import SwapMode, Swapping, TransferCost


@dataclass(frozen=True)
class SimulatedEngine:
    """An engine's options, named as in :class:`EngineConfig`, and the sizes of its cache.

    Attributes:
        blocks: of the KV cache.
        host_blocks: in host memory.
        transfer: the time of copies between them; needed if there are any.
        output_known: whether admission and ``shortest`` know each request's output length, as a perfect predictor would.
        max_tokens: what requests ask for at most; None if each asks for what it generates.
    """

    blocks: int
    policy: str = "fcfs"
    admission: str = "predicted"
    swap: SwapMode = "auto"
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    host_blocks: int = 0
    transfer: TransferCost | None = None
    output_known: bool = False
    max_tokens: int | None = None

    def scheduler(self, *, enable_prefix_caching: bool) -> Scheduler:
        """The scheduler that such an engine has."""
        host = HostTier(self.host_blocks) if self.host_blocks else None
        cache = BlockCache(self.blocks, self.block_size, enable_prefix_caching=enable_prefix_caching, host=host)
        swapping = None
        if host is not None and self.transfer is not None:
            swapping = Swapping(self.swap, self.block_size, self.transfer)
        return Scheduler(
            cache,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            policy=POLICIES[self.policy](),
            admission=PeakAdmission(cache) if self.admission == "predicted" else None,
            swapping=swapping,
        )
