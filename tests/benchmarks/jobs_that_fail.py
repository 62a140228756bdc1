"""A part of a stage whose jobs fail in every way that kernels make jobs fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from benchmarks.gpu.job import Job, Row
from benchmarks.gpu.place import Place


def jobs(_: Place) -> list[Job]:
    """In this order."""
    return [
        Job("works", _works),
        Job("raises", _raises),
        Job("dies", _dies),
        Job("hangs", _hangs, limit_s=1),
        Job("finds something wrong", _finds),
        Job("stops the device", _stops_the_device),
        Job("works, too", _works, {"tile": 8}),
    ]


def _works(_: Place) -> Iterator[Row]:
    yield {"value": 1}
    yield {"value": 2}


def _raises(_: Place) -> Iterator[Row]:
    yield {"value": 3}
    raise ValueError("an illegal\nmemory access")


def _dies(_: Place) -> Iterator[Row]:
    yield {"value": 4}
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs(_: Place) -> Iterator[Row]:
    time.sleep(600)
    yield {}


def _finds(_: Place) -> Iterator[Row]:
    yield {"problem": "outputs are wrong"}


def _stops_the_device(_: Place) -> Iterator[Row]:
    """An illegal access is found out by whoever looks next."""
    Place.alive = lambda self: False  # type: ignore[method-assign]
    yield {"value": 5}
