"""Engines in the formats that no goal of a single sequence names, after all that matters more."""

from __future__ import annotations

from ..job import Job
from ..place import Place
from . import decode

IMPORTS, NAME = decode.IMPORTS, "decode"


def jobs(place: Place) -> list[Job]:
    """One each, as in :mod:`decode`."""
    return decode.of(place, () if place.rehearses or place.quick else decode.RUNS[2:])
