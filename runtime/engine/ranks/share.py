"""A process' share of an engine: its part of the model, and of the cache. All ranks load theirs in step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from ....system.errors import RuntimeProblem
from ....system.hardware.machine import human_bytes
from ....system.progress import Log
from ...cache_types import BY_NAME, cache_type_of, names_for
from ...decoder.model import Model
from ...decoder.parts.kv_cache import KeysValues
from ...native.library import kernels
from ...parallel.stages import RankPlace
from ...weights.checkpoint import Checkpoint
from ..drafters.draft_weights import DraftWeights
from ..drafters.load_drafter import load_drafter
from ..setup.config import EngineConfig
from ..setup.host_blocks import HostBlocks
from ..setup.loading import load_model
from .reserve import Reservation, host_slots, reserve
from .workers import check_same, each_loaded, least


@dataclass(frozen=True)
class TokenCost:
    """What computing a token takes, on all ranks together.

    Attributes:
        bytes: of weights that a single token reads.
        operations: additions and multiplications of the linears, for a prompt's token.
    """

    bytes: int
    operations: float


@dataclass(frozen=True)
class EngineShare:
    """What a process needs to compute steps.

    Attributes:
        opened: the checkpoint, for its config and tokenizer.
        model: this process' part.
        max_model_len: the most tokens of a sequence.
        reservation: of this process' memory.
        store: this process' keys and values.
        host: its cache blocks in host memory; None if there are none.
        cost: of a token, on all ranks together.
        draft_model: what proposes tokens, if the configuration names something with weights.
    """

    opened: Checkpoint
    model: Model
    max_model_len: int
    reservation: Reservation
    store: KeysValues
    host: HostBlocks | None
    cost: TokenCost
    draft_model: DraftWeights | None

    @classmethod
    def load(cls, checkpoint: str | Path, config: EngineConfig, place: RankPlace, *, log: Log) -> Self:
        """Load it.

        Args:
            checkpoint: a Hugging Face directory.
            config: of the engine.
            place: this process' among those that compute the model.
            log: gets messages for the user.

        Raises:
            SmeltError: it cannot be read, or served, or does not fit in memory, on this rank or another.
        """
        world = place.world
        if place.ranks.count > 1 and config.device == "cpu":
            compiled = kernels(log) if config.native else None
            if not place.ranks.share_memory(compiled) and compiled is not None:
                log("the ranks share no memory and add up by gloo, so that steps take longer")
        with each_loaded(world):
            opened, model = load_model(checkpoint, config, log=log, place=place)
        check_same(world, opened)
        with each_loaded(world):
            draft_model = load_drafter(config, opened, model, place, log=log)
        # Which states other ranks' layers leave for a draft head, which the first rank has.
        after = tuple(world.broadcast_data(None if draft_model is None else list(draft_model.after)) or ())
        longest = model.spec.max_length
        length = min(config.max_model_len or longest, longest)
        if config.max_model_len is not None and config.max_model_len > longest:
            log(
                f"max_model_len is {config.max_model_len}, and the model has {longest} positions: sequences get no longer than these"
            )
        kept = model.kept(BY_NAME[config.kv_cache_dtype].torch_dtype(model.dtype))
        with each_loaded(world):
            _check_cache(model, kept, config)
        with each_loaded(world, together=True):
            found = reserve(
                model, config, max_model_len=length, kv_cache_dtype=kept, drafter=draft_model, states=len(after)
            )
        reservation = found.of_blocks(least(world, found.blocks))
        if model.cache_scheme is not None:
            log(model.cache_scheme.sentence(kept))
        log(reservation.sentence())
        model.stream_layers(reservation.layers)
        store = model.keys_values(reservation.blocks, config.block_size, kept)
        if after and (place.stages.index > 0 or (config.cp > 1 and world.rank > 0)):
            model.leave_states(after, store, lambda *_: None)
        host = None
        if config.host_cache_bytes:
            directory = None if config.host_cache_directory is None else Path(config.host_cache_directory)
            with each_loaded(world):
                slots = host_slots(config.host_cache_bytes, reservation, on_disk=directory is not None)
            slots = least(world, slots)
            with each_loaded(world):
                host = HostBlocks(store, slots, directory)
            where = "host memory" if directory is None else str(directory)
            log(f"reserved {human_bytes(slots * host.block_bytes)} of {where} for {slots} cache blocks")
        each = world.gather_data([model.bytes_per_token(), model.operations_per_token()])
        # Of those that divide sequences, one computes a token.
        cost = TokenCost(
            sum(read for read, _ in each) // config.cp, sum(operations for _, operations in each) / config.cp
        )
        return cls(opened, model, length, reservation, store, host, cost, draft_model)


def _check_cache(model: Model, kept: torch.dtype, config: EngineConfig) -> None:
    scheme, kv_cache_dtype, operators = model.cache_scheme, config.kv_cache_dtype, model.operators
    if scheme is not None and kv_cache_dtype not in ("auto", scheme.kv_cache_dtype):
        raise RuntimeProblem(
            f"kv_cache_dtype is {kv_cache_dtype}, but the checkpoint itself rounds keys and values to {scheme.kv_cache_dtype}; leave kv_cache_dtype at auto"
        )
    if operators.name not in cache_type_of(kept).operators:
        others = [name for name in names_for(operators.name) if name != "auto"]
        raise RuntimeProblem(
            f"kv_cache_dtype {kv_cache_dtype} is for GPUs with Smelt's kernels; use {' or '.join(others)} on this device"
        )
    if config.block_size % operators.block_multiple:
        raise RuntimeProblem(
            f"block_size is {config.block_size}; on a GPU it must be a multiple of {operators.block_multiple}"
        )
