"""Compiling many launches at once for the GPU that is here, before they are checked or timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from .launch import GENERAL, Launch
from .targets import Target, target_of

# Each process holds a context on the GPU.
_MOST_PROCESSES = 16


def precompile(launches: Sequence[Callable[[Target], Launch]], told: Callable[[str], object]) -> None:
    """Compile on all processors that this process may use; launches then find the results in Triton's cache.

    Args:
        launches: each makes one, on ``meta``; they go to other processes, so they are methods of values, no closures.
        told: hears how many did not compile, and why the first did not.
    """
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(min(_MOST_PROCESSES, here), mp_context=get_context("spawn")) as pool:
        failures = [failure for failure in pool.map(_compiled, launches, chunksize=2) if failure]
    if failures:
        told(f"{len(failures)} of {len(launches)} did not compile ahead; the first: {failures[0]}")


def _compiled(launch: Callable[[Target], Launch]) -> str | None:
    try:
        launch(target_of(torch.device("cuda"))).warm()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"[:200]
    return None


def identity(launch: Launch) -> tuple[Any, ...]:
    """What two launches must share for one compilation to serve both."""

    def kind(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype
        return value if value is None or value == 1 else value % 16 == 0

    kinds = tuple((name, str(kind(value))) for name, value in launch.arguments.items() if name not in GENERAL)
    return (kinds, tuple(sorted((name, str(v)) for name, v in launch.constants.items())), launch.warps, launch.stages)
