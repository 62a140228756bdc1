"""Who imports whom in the package: the edges that :mod:`tests.test_layout` checks."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
# From the front door down. A room imports only from those after it; prune and distill are neighbours.
ROOMS = ("compress", "prune", "distill", "runtime", "quant", "models", "system")
FILES = [path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))]
ALL_FILES = [*FILES, *(path for top in ("tests", "benchmarks") for path in sorted((REPOSITORY / top).rglob("*.py")))]


@dataclass(frozen=True)
class Import:
    """One name that a file imports from another file of the package, both relative to the repository."""

    source: Path
    target: Path
    name: str

    def __str__(self) -> str:
        return f"{self.source} imports {self.name} from {self.target}"


def imports_of(path: Path) -> list[Import]:
    """All of a file's imports from the package, wherever they stand in it."""
    here = path.relative_to(REPOSITORY)
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        assert not (node.module or "").startswith("smelt"), f"{here}:{node.lineno}: imports within Smelt are relative"
        if node.level:
            folder = REPOSITORY.joinpath(*here.parts[: len(here.parts) - node.level], *(node.module or "").split("."))
            for alias in node.names:
                target = _file(folder / alias.name) or _file(folder)
                assert target is not None, f"{here}:{node.lineno}: {alias.name} is nowhere"
                found.append(Import(here, target.relative_to(REPOSITORY), alias.name))
    return found


def _file(module: Path) -> Path | None:
    for path in (module.with_suffix(".py"), module / "__init__.py"):
        if path.is_file():
            return path
    return None


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The groups of nodes each of which reaches all others of its group (Tarjan's strongly connected components)."""
    graph: dict[str, set[str]] = {}
    for source, target in edges:
        if source != target:
            graph.setdefault(source, set()).add(target)
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for node in list(graph):
        if node not in order:
            _visit(node, graph, order, low, stack, found)
    return found


def _visit(
    node: str,
    graph: Mapping[str, set[str]],
    order: dict[str, int],
    low: dict[str, int],
    stack: list[str],
    found: list[list[str]],
) -> None:
    order[node] = low[node] = len(order)
    stack.append(node)
    for following in sorted(graph.get(node, ())):
        if following not in order:
            _visit(following, graph, order, low, stack, found)
            low[node] = min(low[node], low[following])
        elif following in stack:
            low[node] = min(low[node], order[following])
    if low[node] == order[node]:
        group = stack[stack.index(node) :]
        del stack[stack.index(node) :]
        if len(group) > 1:
            found.append(sorted(group))
