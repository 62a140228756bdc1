"""Running one trial of a sweep, here or on a machine of a cluster."""

from __future__ import annotations

from pathlib import Path

from ...system.errors import SmeltError
from ..pipeline.pipeline import run
from .trials import Trial


def run_trial(trial: Trial, shared: Path, fresh: bool, progress: bool) -> str | None:
    """Make one checkpoint; the sentence why not, if so."""
    try:
        run(trial.recipe, fresh=fresh, progress=progress, calibration_cache=shared)
    except SmeltError as error:
        return str(error)
    except Exception as error:  # memory that ran out, a library's own; the other trials may do better
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None
