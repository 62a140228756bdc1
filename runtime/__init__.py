"""The runtime that serves compressed checkpoints, and plain ones.

```python
from smelt.runtime import Engine, SamplingParams

engine = Engine("runs/quickstart/checkpoint")
for output in engine.generate(["Once upon a time"], SamplingParams(max_tokens=50, temperature=0)):
    print(output.outputs[0].text)
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..system.errors import RuntimeProblem
from .engine.setup.config import EngineConfig
from .requests.params import SamplingParams

if TYPE_CHECKING:
    from .engine.engine import Engine, QueueFull
    from .requests.output import Completion, RequestOutput

__all__ = ["Completion", "Engine", "EngineConfig", "QueueFull", "RequestOutput", "RuntimeProblem", "SamplingParams"]

_HOMES = {
    "Completion": ".requests.output",
    "Engine": ".engine.engine",
    "QueueFull": ".engine.engine",
    "RequestOutput": ".requests.output",
}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import, which small functions should not need.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
