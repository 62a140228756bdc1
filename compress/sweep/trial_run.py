"""Running one trial of a sweep, on this machine or in a cluster."""

from __future__ import annotations

from pathlib import Path

from ...system.errors import SmeltError, in_one_line
from ..pipeline.pipeline import run
from .trials import Trial


def run_trial(trial: Trial, shared: Path, fresh: bool, progress: bool) -> str | None:
    """Make one checkpoint; return the reason if it failed, else None."""
    try:
        run(trial.recipe, fresh=fresh, progress=progress, calibration_cache=shared)
    except SmeltError as error:
        return str(error)
    except Exception as error:  # out of memory, errors of libraries; other trials may succeed
        return f"{type(error).__name__}: {in_one_line(error)}"
    return None
