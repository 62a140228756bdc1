"""Every kernel on small inputs, against float64, and fifty times back to back with the same bits."""

from __future__ import annotations

from ..cases import cases_of
from ..job import Job
from ..place import Place

WORKERS = 4  # nothing is timed; most of a case is spent drawing inputs and computing in float64


def jobs(place: Place) -> list[Job]:
    """A job for each case."""
    return cases_of(place, large=False)
