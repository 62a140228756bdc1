"""Smelt's user interface: recipes, the pipeline that runs them, and the command line.

```python
from smelt.compress import run

result = run("recipes/quickstart.yaml")
print(result.checkpoint, result.report.summary())
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..models.directory.inspection import Inspection, inspect
    from ..system.errors import SmeltError
    from .adapters.merge_adapter import Merged, merge
    from .evaluation.evaluate import evaluate
    from .evaluation.scoring.on_server import RemoteModel
    from .evaluation.settings import Evaluate
    from .integrations.peft import for_training
    from .integrations.transformers import config_for
    from .pipeline.in_memory import quantize
    from .pipeline.pipeline import RunResult, run
    from .recipe.recipe import Recipe
    from .results.report import ReportData
    from .verification.verify import Finding, verify

__all__ = [
    "Evaluate",
    "Finding",
    "Inspection",
    "Merged",
    "Recipe",
    "RemoteModel",
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
    "verify",
]

_HOMES = {
    "Evaluate": ".evaluation.settings",
    "Finding": ".verification.verify",
    "Inspection": "..models.directory.inspection",
    "Merged": ".adapters.merge_adapter",
    "RemoteModel": ".evaluation.scoring.on_server",
    "Recipe": ".recipe.recipe",
    "ReportData": ".results.report",
    "RunResult": ".pipeline.pipeline",
    "SmeltError": "..system.errors",
    "config_for": ".integrations.transformers",
    "evaluate": ".evaluation.evaluate",
    "for_training": ".integrations.peft",
    "inspect": "..models.directory.inspection",
    "merge": ".adapters.merge_adapter",
    "quantize": ".pipeline.in_memory",
    "run": ".pipeline.pipeline",
    "verify": ".verification.verify",
}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import, which `smelt --help` must not wait for.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
