"""Memory for weights, activations and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ....system.errors import RuntimeProblem
from ....system.hardware.device import device_named, free_memory
from ....system.hardware.machine import human_bytes
from ...decoder.model import Model
from ...decoder.parallel.context_parallel import ring_bytes
from ..drafters.draft_weights import DraftWeights
from ..setup.config import EngineConfig

_SUMS = 64 << 20


@dataclass(frozen=True)
class Reservation:
    """An engine's memory.

    Attributes:
        weights, activations, cache: bytes.
        adapters: bytes that LoRA adapters may take.
        layers: bytes of offloaded layers that may stay in memory.
        blocks: cache blocks.
        positions: the cache's capacity in positions.
        per_sequence: positions of the longest sequence.
    """

    weights: int
    activations: int
    cache: int
    adapters: int
    layers: int
    blocks: int
    positions: int
    per_sequence: int

    def of_blocks(self, blocks: int) -> Reservation:
        """The same with fewer blocks."""
        each = self.cache // self.blocks  # 0 of a stage without attention
        return replace(self, cache=blocks * each, blocks=blocks, positions=self.positions // self.blocks * blocks)

    def sentence(self) -> str:
        """A summary for messages."""
        return (
            f"reserved {human_bytes(self.weights)} for weights, {human_bytes(self.cache)} for keys and values"
            f" ({self.positions} positions, {self.positions / self.per_sequence:.1f} sequences of {self.per_sequence}),"
            f" about {human_bytes(self.activations)} for activations"
        )


def reserve(
    model: Model,
    config: EngineConfig,
    *,
    max_model_len: int,
    kv_cache_dtype: torch.dtype,
    drafter: DraftWeights | None = None,
    states: int = 0,
) -> Reservation:
    """Divide the free memory; the weights are loaded already.

    Args:
        model: loaded.
        config: of the engine.
        max_model_len: the most tokens of a sequence.
        kv_cache_dtype: the KV cache dtype.
        drafter: what drafts, loaded already; None if it has no weights.
        states: how many states of its layers a draft head on the first rank reads.

    Raises:
        RuntimeProblem: the cache does not fit; the message shows the sizes.
    """
    max_num_seqs, max_num_batched_tokens, block_size = (
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.block_size,
    )
    positions = config.block_positions
    spec = model.spec
    weights = model.resident_bytes() + (0 if drafter is None else drafter.nbytes)
    block = model.operators.block_bytes(model.cached_heads, spec.head_size, block_size, kv_cache_dtype)
    block += 0 if drafter is None else drafter.block_bytes(positions)
    most = max_num_seqs * (-(-max_model_len // positions) + config.draft_branches)
    # Of logits: every draft token has one, too.
    rows = max_num_seqs if config.drafter is None else max(max_num_seqs, max_num_batched_tokens)
    if model.device.type == "cpu":
        activations = _guessed(model, max_model_len, max_num_batched_tokens, rows)
    else:
        from ...gpu.memory import measured_activations

        # Steps and their graphs have their own memory. In addition: logits, and scores and tokens of filtered rows;
        # the tokens of each sequence, and its table, here and there.
        activations = 2 * measured_activations(model, max_num_batched_tokens, max_num_seqs, block_size) + _SUMS
        activations += rows * 12 * spec.vocabulary
        activations += max_num_seqs * (4 * max_model_len + 12 * -(-max_model_len // block_size))
    if drafter is not None:
        activations += drafter.step_bytes(max_num_batched_tokens)
    if max(model.stages.count, model.context.count) > 1:  # collected, and on their way
        activations += 3 * max_num_batched_tokens * states * spec.hidden * model.dtype.itemsize
    if model.context.count > 1:
        shared = max(model.cached_heads, default=0)
        heads = -(-spec.most_heads // model.ranks.count)
        activations += ring_bytes(max_num_batched_tokens, heads, shared, spec.head_size)
    # Besides the weights, which are there.
    free = free_memory(model.device)
    kept = activations + (config.adapter_bytes or 0)
    if config.memory_bytes is not None:
        room = config.memory_bytes - weights - kept
    else:
        room = int(free * config.memory_utilization) - kept
    allowed = config.kv_cache_memory_bytes
    if allowed is None:
        # The rest is for layers that need not be read for each step.
        allowed = room // 2 if model.offloads else room
    blocks = most if block == 0 else min(most, max(0, allowed) // block)
    if blocks == 0 or blocks * block > free - kept:
        needed = max(1, blocks) * block
        adapters = f", adapters {human_bytes(config.adapter_bytes)}" if config.adapter_bytes else ""
        raise RuntimeProblem(
            f"the KV cache does not fit: {human_bytes(free)} are free besides {human_bytes(weights)} of weights, activations take about"
            f" {human_bytes(activations)}{adapters} and the cache {human_bytes(needed)} (a block of {positions} positions is"
            f" {human_bytes(block)}); lower max_model_len, max_num_seqs, max_num_batched_tokens or kv_cache_memory_bytes"
        )
    left = (free if config.memory_bytes is None else config.memory_bytes - weights) - activations - blocks * block
    layers = max(0, room - blocks * block) if model.offloads else 0
    adapters = max(0, left - layers) if config.adapter_bytes is None else config.adapter_bytes
    return Reservation(
        weights, activations, blocks * block, adapters, layers, blocks, blocks * positions, max_model_len
    )


def share_of(config: EngineConfig, count: int) -> EngineConfig:
    """The configuration of one of several engines: an even part of the memory that they may take, or that is free now.

    Args:
        config: of one engine alone.
        count: how many there are.
    """
    if count == 1:
        return config
    memory = free_memory(device_named(config.device)) if config.memory_bytes is None else config.memory_bytes
    part = memory // count
    if config.adapter_bytes is None:
        # What an engine alone would leave for them.
        config = replace(config, adapter_bytes=int(part * (1 - config.memory_utilization)))
    return replace(config, memory_bytes=part)


def host_slots(wanted: int, reservation: Reservation, *, on_disk: bool = False) -> int:
    """The number of blocks for so many bytes of host memory.

    Args:
        wanted: the bytes.
        reservation: of the cache, whose blocks they are.
        on_disk: whether they go to a disk, so that memory does not limit them.

    Raises:
        RuntimeProblem: there is no room for one, or less memory is free.
    """
    block = reservation.cache // reservation.blocks
    if block == 0:  # a stage without attention
        return wanted
    free = free_memory(torch.device("cpu"))
    if on_disk and wanted >= block:
        return wanted // block
    if not block <= wanted <= free:
        raise RuntimeProblem(
            f"host_cache_bytes is {human_bytes(wanted)}; it must be at least a cache block ({human_bytes(block)}) and at most"
            f" the free host memory ({human_bytes(free)})"
        )
    return wanted // block


def _guessed(model: Model, max_model_len: int, max_num_batched_tokens: int, rows: int) -> int:
    """An upper bound for a step's memory on a CPU."""
    spec = model.spec
    widest = max(4 * spec.hidden, spec.most_heads * spec.head_size)
    # A long prompt's mask or, where scores are capped, its scores; and its gathered keys and values.
    attending = max_num_batched_tokens * max_model_len * (8 * spec.most_heads if spec.score_cap else 5)
    gathered = 2 * max(max_model_len, 16384) * max(spec.cached_heads, default=0) * spec.head_size * model.dtype.itemsize
    return max_num_batched_tokens * widest * 8 * 4 + rows * spec.vocabulary * 4 * 3 + attending + gathered
