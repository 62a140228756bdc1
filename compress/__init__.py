"""The front door of Smelt: recipes, the pipeline that runs them, and the command line.

from smelt.compress import Recipe, run, quantize

result = run(Recipe.load("recipes/quickstart.yaml"))
print(result.checkpoint, result.report.terminal())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import SmeltError

if TYPE_CHECKING:
    from .in_memory import quantize
    from .inspection import inspect
    from .pipeline import RunResult, run
    from .recipe import Recipe
    from .report import Report

__all__ = ["Recipe", "Report", "RunResult", "SmeltError", "inspect", "quantize", "run"]

_HOMES = {
    "Recipe": ".recipe",
    "Report": ".report",
    "RunResult": ".pipeline",
    "inspect": ".inspection",
    "quantize": ".in_memory",
    "run": ".pipeline",
}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import, which `smelt --help` must not cost.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
