"""How many tokens an engine drafts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from ...speculation.drafter import Drafter
from ...speculation.fixed_length import FixedDrafts
from ...speculation.length import AdaptiveDrafts
from ...speculation.lookup_first import lookup_of, weights_of
from ...speculation.times_by_rows import TimesByRows
from ..setup.config import EngineConfig
from .executor import Executor

# How many tokens are drafted at most if the number adapts, by weights and where they are looked up.
_MOST, _MOST_FOUND = 8, 16
# Steps of these rows are measured at the start, as long as it takes no longer.
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MEASURING_SECONDS = 2.0


def drafting_of(config: EngineConfig, drafter: Drafter, executor: Executor) -> FixedDrafts:
    """How many tokens a drafter proposes.

    Args:
        config: of the engine.
        drafter: the drafter.
        executor: whose steps are measured if the number adapts; its cache holds nothing yet.
    """
    lookup, weights = lookup_of(drafter), weights_of(drafter)
    if isinstance(config.draft_tokens, int):
        where = None if weights is None else lookup
        return FixedDrafts(config.draft_tokens, config.draft_branches, drafter.longest_branch, where)
    drafting = None
    if weights is not None:
        drafting = _measured(partial(executor.timed, drafts=True), config.max_num_seqs)
    verifying = _measured(partial(executor.timed, drafts=False), config.max_num_batched_tokens)
    branches, longest = config.draft_branches, drafter.longest_branch
    return AdaptiveDrafts(
        _MOST if weights is not None else _MOST_FOUND,
        verifying,
        drafting,
        drafter.unprepared,
        branches,
        longest,
        lookup=lookup,
        most_found=_MOST_FOUND,
        ends_by_odds=not executor.drafts_at_once,
    )


def _measured(compute: Callable[[int], Tensor], most: int) -> TimesByRows:
    """Times of a model's steps, by rows."""
    times, begun = TimesByRows(), time.perf_counter()
    for rows in _ROWS:
        if rows > most or (rows > 2 and time.perf_counter() - begun > _MEASURING_SECONDS):
            break
        took = []
        for _ in range(3 if times.is_known else 5):  # the first ones are slow
            started = time.perf_counter()
            compute(rows).cpu()
            took.append(time.perf_counter() - started)
        times.measured(rows, statistics.median(took))
    return times
