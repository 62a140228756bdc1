"""What `mkdocs build` needs to know of a repository that is itself the package `smelt`."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

_REPOSITORY = Path(__file__).parents[1]
_place = tempfile.TemporaryDirectory(prefix="smelt-docs-")


@event_priority(100)  # before mkdocstrings reads its own settings
def on_config(config: Any) -> Any:
    """Let the API page find `smelt.compress` and the other rooms, whatever the checkout's folder is called."""
    package = Path(_place.name) / "smelt"
    package.mkdir(exist_ok=True)
    for init in _REPOSITORY.glob("*/__init__.py"):
        link = package / init.parent.name
        if not link.exists() and init.parent.name not in ("benchmarks", "tests"):
            link.symlink_to(init.parent, target_is_directory=True)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_place.name]
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things as Sphinx does; the role before a name is not for readers."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)
