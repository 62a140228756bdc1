"""Every kernel on the shapes of real models, against float64, and fifty times back to back with the same bits."""

from __future__ import annotations

from ..cases import cases_of
from ..job import Job
from ..place import Place

WORKERS = 2  # float64 of the largest head takes 4 GB, and its product as much again


def jobs(place: Place) -> list[Job]:
    """A job for each case."""
    return cases_of(place, large=True)
