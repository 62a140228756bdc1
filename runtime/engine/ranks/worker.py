"""A rank besides the first: it has its share of a model, and computes the steps that the first one schedules."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import torch

from ....system.errors import SmeltError
from ....system.processes.child_processes import ends_with, is_left
from ...decoder.prompt_states import prompt_states
from ...parallel.launch import joined_at, joined_by_environment, launched_count, launched_rank
from ...parallel.ranks import RankLost, Ranks
from ...parallel.stages import divided
from ..drafters.draft_model import DraftModel
from ..setup.config import EngineConfig
from ..setup.loading import on_device_of
from .share import EngineShare
from .workers import FailedTogether, StatesMessage, here, kind, on_gpu, received


def work(ranks: Ranks) -> None:
    """Load this rank's share of the first one's model, and compute its steps until it stops.

    Raises:
        SmeltError: the model cannot be loaded on some rank, or the first one is gone.
    """
    given = ranks.broadcast_data(None)
    config = here(EngineConfig(**given["config"]))
    torch.set_num_threads(given["threads"])
    place = divided(ranks, config.tp, config.pp, config.cp)
    share = EngineShare.load(Path(given["checkpoint"]), config, place, log=lambda _: None)
    device = on_device_of(share.model)
    while (message := received(ranks)) is not None:
        if isinstance(message, StatesMessage):
            with device:
                for _ in prompt_states(share.model, message.prompts, budget=message.budget):
                    pass
            continue
        if share.host is not None:
            share.host.swap(message.plan)
        share.store.copy(message.plan.copies)
        model = share.model
        if message.drafts:
            assert isinstance(share.draft_model, DraftModel), "the first rank says so only of a part of the model"
            model = share.draft_model.model
        with device:
            model(model.batch(message.runs, config.block_size), share.store)


def work_unless_first(config: EngineConfig) -> None:
    """If a launcher has started this process as another rank than the first, be that rank until the first one stops, and exit.

    Args:
        config: the engine's, for where it computes.
    """
    if config.ranks == 1 or launched_count() == 1 or launched_rank() == 0:
        return
    on_gpu(config)
    try:
        ranks = joined_by_environment(kind(config))
        work(ranks)
        ranks.end()
    except RankLost as problem:
        print(f"smelt: {problem}", file=sys.stderr)
        raise SystemExit(1) from None
    raise SystemExit(0)


def main() -> int:
    """What the first rank starts: ``python -m smelt.runtime.engine.ranks.worker PARENT PLACE RANK COUNT DEVICE``."""
    parent, place, rank, count, device = sys.argv[1:]
    ends_with(int(parent), Path(place).parent)
    # The first rank ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    try:
        work(joined_at(Path(place), int(rank), int(count), device))
    except RankLost:  # the first one says so, or is gone
        if is_left(int(parent)):
            shutil.rmtree(Path(place).parent, ignore_errors=True)
        return 1
    except FailedTogether:
        return 1
    except SmeltError as problem:
        print(f"smelt: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
    finally:
        # At once: taking torch apart takes seconds, in which the first rank waits to learn how this one has ended.
        sys.stderr.flush()
        os._exit(status)
