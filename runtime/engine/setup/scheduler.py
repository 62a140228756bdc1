"""An engine's scheduler, as its options want it."""

from __future__ import annotations

from ...blocks.block_cache import BlockCache
from ...blocks.host_tier import HostTier
from ...scheduling.admission import PeakAdmission
from ...scheduling.policies.table import POLICIES
from ...scheduling.scheduler import Scheduler
from ...scheduling.swapping import Swapping
from .config import EngineConfig
from .host_blocks import HostBlocks


def scheduler_of(config: EngineConfig, blocks: int, host: HostBlocks | None) -> Scheduler:
    """A scheduler with an empty cache.

    Args:
        config: the engine's options.
        blocks: of the cache.
        host: its blocks in host memory; None if it swaps none.
    """
    swapping = None
    if host is not None:
        swapping = Swapping(config.swap, config.block_positions, host.measured_cost())
    cache = BlockCache(
        blocks,
        config.block_positions,
        enable_prefix_caching=config.enable_prefix_caching,
        host=None if host is None else HostTier(host.slots),
    )
    return Scheduler(
        cache,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        policy=POLICIES[config.policy](),
        admission=PeakAdmission(cache) if config.admission == "predicted" else None,
        swapping=swapping,
    )
