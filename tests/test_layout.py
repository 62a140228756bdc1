"""The arrows between the rooms of the house, and what every file must have."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOMS = ("compress", "quant", "prune", "distill", "runtime", "models", "system")
ALLOWED = {
    "compress": {"distill", "quant", "prune", "runtime", "models", "system"},
    "distill": {"quant", "prune", "models", "system"},
    "runtime": {"quant", "models", "system"},
    "quant": {"models", "system"},
    "prune": {"quant", "models", "system"},
    "models": {"system"},
    "system": set(),
}
FILES = [path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))]


def _rooms_used(path: Path) -> set[str]:
    used = set()
    depth = len(path.relative_to(REPOSITORY).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth and node.module:
            used.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("smelt."):
            pytest.fail(f"{path} imports {node.module} by its full name; imports between rooms are relative")
    return used


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_arrows_point_one_way(path: Path) -> None:
    room = path.relative_to(REPOSITORY).parts[0]
    assert _rooms_used(path) - {room} <= ALLOWED[room]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_public_functions_are_documented_and_typed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a file says what its one subject is"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name
        # What Triton compiles has blocks and compile-time constants, for which Python has no types.
        compiled = isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(d) for d in node.decorator_list
        )
        if isinstance(node, ast.FunctionDef) and not compiled:
            arguments = [a for a in (*node.args.args, *node.args.kwonlyargs) if a.annotation is None]
            assert not arguments, f"{node.name} has arguments without types"


def test_every_package_is_listed_for_installation() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    for room in ROOMS:
        for init in (REPOSITORY / room).rglob("__init__.py"):
            name = "smelt." + ".".join(init.parent.relative_to(REPOSITORY).parts)
            assert f'"{name}"' in text, name
