"""Every name that a benchmark imports from Smelt or from another benchmark is there: most of them run for hours, and rarely."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path

import pytest

from ..tiny import REPOSITORY

FILES = sorted((REPOSITORY / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_imported_names_exist(path: Path) -> None:
    package = ".".join(path.parent.relative_to(REPOSITORY).parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        name = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
        if name.split(".")[0] not in ("smelt", "benchmarks"):
            continue
        if name == "benchmarks.peers" or path.parent.name == "peers":
            continue  # scripts of other environments
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in ("smelt", "benchmarks"):
                raise
            pytest.skip(f"needs {error.name}")
        for alias in node.names:
            if not hasattr(module, alias.name):
                import_module(f"{name}.{alias.name}")
