"""A rank besides the first: it has its share of a model, and computes the steps that the first one schedules."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

from ...system.errors import SmeltError
from ..cache_types import BY_NAME
from ..decoder.batch import Batch
from ..parallel.launch import ends_with, joined_at, joined_by_environment, launched_count, launched_rank
from ..parallel.ranks import RankLost, Ranks
from ..parallel.stages import divided
from .config import EngineConfig
from .host_blocks import HostBlocks
from .loading import load_model
from .reserve import host_slots, reserve
from .workers import StepMessage, check_same, each_loaded, here, kind, least, on_gpu


def work(ranks: Ranks) -> None:
    """Load this rank's share of the first one's model, and compute its steps until it stops.

    Raises:
        SmeltError: the model cannot be loaded on some rank, or the first one is gone.
    """
    given = ranks.broadcast_data(None)
    config = here(EngineConfig(**given["config"]))
    torch.set_num_threads(given["threads"])
    place = divided(ranks, config.tp, config.pp)
    with each_loaded(ranks):
        opened, model = load_model(Path(given["checkpoint"]), config, log=lambda _: None, place=place)
    check_same(ranks, opened)
    kept = model.kept(BY_NAME[config.kv_dtype].torch_dtype(model.dtype))
    length = min(config.max_length or model.spec.max_length, model.spec.max_length)
    with each_loaded(ranks):
        reservation = reserve(model, config, max_length=length, kv_dtype=kept)
    model.stream_layers(reservation.layers)
    store = model.keys_values(least(ranks, reservation.blocks), config.block_size, kept)
    host = None
    if config.host_cache_bytes:
        directory = None if config.host_cache_directory is None else Path(config.host_cache_directory)
        with each_loaded(ranks):
            slots = host_slots(config.host_cache_bytes, reservation, on_disk=directory is not None)
        host = HostBlocks(store, least(ranks, slots), directory)
    while (message := StepMessage.received(ranks)) is not None:
        if host is not None:
            host.swap(message.plan)
        store.copy(message.plan.copies)
        model(Batch(message.runs, config.block_size), store)


def work_unless_first(config: EngineConfig) -> None:
    """If a launcher has started this process as another rank than the first, be that rank until the first one stops, and exit.

    Args:
        config: the engine's, for where it computes.
    """
    if config.ranks == 1 or launched_count() == 1 or launched_rank() == 0:
        return
    on_gpu(config)
    try:
        work(joined_by_environment(kind(config)))
    except RankLost as problem:
        print(f"smelt: {problem}", file=sys.stderr)
        raise SystemExit(1) from None
    raise SystemExit(0)


def main() -> int:
    """What the first rank starts: ``python -m smelt.runtime.engine.worker PARENT PLACE RANK COUNT DEVICE``."""
    parent, place, rank, count, device = sys.argv[1:]
    ends_with(int(parent))
    # The first rank ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    try:
        work(joined_at(Path(place), int(rank), int(count), device))
    except RankLost:
        return 1  # the first one says so, or is gone
    except SmeltError as problem:
        print(f"smelt: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
