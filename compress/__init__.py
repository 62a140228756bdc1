"""The front door of Smelt: recipes, the pipeline that runs them, and the command line.

from smelt.compress import Recipe, run, quantize

result = run(Recipe.load("recipes/quickstart.yaml"))
print(result.checkpoint, result.report.summary())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..system.errors import SmeltError
    from .evaluation.evaluate import evaluate
    from .evaluation.result import ReportData
    from .in_memory import quantize
    from .inspection import inspect
    from .merging import merge
    from .pipeline import RunResult, run
    from .recipe import Evaluate, Recipe
    from .training import for_training
    from .transformers_plugin import config_for

__all__ = [
    "Evaluate",
    "Recipe",
    "ReportData",
    "RunResult",
    "SmeltError",
    "config_for",
    "evaluate",
    "for_training",
    "inspect",
    "merge",
    "quantize",
    "run",
]

_HOMES = {
    "Evaluate": ".recipe",
    "Recipe": ".recipe",
    "ReportData": ".evaluation.result",
    "RunResult": ".pipeline",
    "SmeltError": "..system.errors",
    "config_for": ".transformers_plugin",
    "evaluate": ".evaluation.evaluate",
    "for_training": ".training",
    "inspect": ".inspection",
    "merge": ".merging",
    "quantize": ".in_memory",
    "run": ".pipeline",
}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import, which `smelt --help` must not cost.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
