"""The house: which room may import which, no circles, no crowded folders, and what every file must have."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house import ALL_FILES, FILES, REPOSITORY, ROOMS, Import, circles, imports_of

MOST_FILES = 20
FLOORS = {"compress": 5, "prune": 4, "distill": 4, "runtime": 3, "quant": 2, "models": 1, "system": 0}
IMPORTS = [each for path in FILES for each in imports_of(path)]


def _room(path: Path) -> str:
    return path.parts[0]


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_down(room: str) -> None:
    """Floors may be skipped, never climbed; neighbours on a floor do not know each other."""
    wrong = [
        str(each)
        for each in IMPORTS
        if _room(each.source) == room != _room(each.target) and FLOORS[_room(each.target)] >= FLOORS[room]
    ]
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not circles((str(each.source), str(each.target)) for each in IMPORTS)


def test_no_folders_import_each_other_in_a_circle() -> None:
    """A package's ``__init__.py`` is its front door: it may know all folders within."""

    def is_front_door(each: Import) -> bool:
        return each.source.name == "__init__.py"

    assert not circles(
        (str(each.source.parent), str(each.target.parent)) for each in IMPORTS if not is_front_door(each)
    )


def test_circles_are_found() -> None:
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "d")]) == [["a", "b", "c"]]
    assert circles([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")]) == []


def test_no_folder_is_crowded() -> None:
    counts: dict[str, int] = {}
    for path in ALL_FILES:
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(REPOSITORY))
            counts[folder] = counts.get(folder, 0) + 1
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_tests_mirror_the_folders() -> None:
    folders = {path.parent.relative_to(REPOSITORY) for path in FILES}
    tests = [path.parent.relative_to(REPOSITORY / "tests") for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert {str(each) for each in tests if each not in folders} <= {".", "benchmarks", "gpu"}


@pytest.mark.parametrize("room", ROOMS)
def test_tests_stand_in_the_room_that_they_test(room: str) -> None:
    """Of what a test imports from the package, something is of its room, or of compress, which runs all of them."""
    wrong = []
    for path in (REPOSITORY / "tests" / room).rglob("test_*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
        rooms = {name.split(".")[1] for name in names if name and name.startswith("smelt.")}
        if rooms and not rooms & {room, "compress"}:
            wrong.append(str(path.relative_to(REPOSITORY)))
    assert wrong == []


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


def test_public_classes_have_names_of_their_own() -> None:
    where: dict[str, list[str]] = {}
    for path in ALL_FILES:
        if "tests" not in path.relative_to(REPOSITORY).parts:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    where.setdefault(node.name, []).append(str(path.relative_to(REPOSITORY)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_every_package_is_listed_for_installation() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    for room in ROOMS:
        for init in (REPOSITORY / room).rglob("__init__.py"):
            name = "smelt." + ".".join(init.parent.relative_to(REPOSITORY).parts)
            assert f'"{name}"' in text, name
        folders = {path.parent for path in (REPOSITORY / room).rglob("*.py")}
        assert all((folder / "__init__.py").is_file() for folder in folders if folder.name != "builtin_tasks")
