"""Parallel compilation of many launches for this machine's GPU, before they are checked, timed or needed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
import triton

from ....system.progress import Log
from .launch import GENERAL, Launch, may_overlap, noted

_EVERY = 25  # kernels between two log lines


@contextmanager
def compiling(log: Log) -> Iterator[Callable[[Launch], None]]:
    """Compile launches on all processors available to this process; afterwards these and equivalent launches are compiled.

    Args:
        log: gets progress, how many kernels did not compile, and the first error.

    Yields:
        A function that takes a launch; launches that share a compilation are compiled once.
    """
    begun, known = time.monotonic(), set[tuple[Any, ...]]()
    failures: list[BaseException] = []

    def take(launch: Launch) -> None:
        kind = identity(launch)
        if kind in known:
            return
        known.add(kind)
        try:
            launch.warm()
        except Exception as error:  # launching it raises the error again
            failures.append(error)

    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Most of a compilation does not hold the GIL.
    with ThreadPoolExecutor(processors) as pool, triton.AsyncCompileMode(pool, ignore_errors=True) as mode:
        try:
            yield take
            for i, _ in enumerate(as_completed(mode.raw_futures), 1):
                if i % _EVERY == 0:
                    log(f"compiled {i} of {len(mode.raw_futures)} kernels, {time.monotonic() - begun:.0f} s")
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            mode.raw_futures.clear()
            raise
        failures += [error for error in (future.exception() for future in mode.raw_futures) if error is not None]
    if failures:
        first = f"{type(failures[0]).__name__}: {(str(failures[0]).strip().splitlines() or [''])[-1]}"
        log(f"{len(failures)} of {len(known)} did not compile ahead; the first: {first[:200]}")


def precompile(launches: Iterable[Launch], log: Log) -> None:
    """The same for given launches, with tensors or on ``meta``."""
    with compiling(log) as take:
        for launch in launches:
            take(launch)


def precompile_work(works: Iterable[Callable[[], object]], log: Log) -> None:
    """The same for the launches of ``works``; torch's operators in them do run, on uninitialized memory."""
    with compiling(log) as take, noted(take):
        for work in works:
            work()


def identity(launch: Launch) -> tuple[Any, ...]:
    """A key that is equal for launches that share a compilation."""

    def kind(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype
        return value if value is None or value == 1 else value % 16 == 0

    kinds = tuple((name, str(kind(value))) for name, value in launch.arguments.items() if name not in GENERAL)
    constants = tuple(sorted((name, str(value)) for name, value in launch.constants.items()))
    return (id(launch.function), kinds, constants, launch.warps, launch.stages, may_overlap())
