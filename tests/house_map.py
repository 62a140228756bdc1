"""Writes CONTRIBUTING's map of the folders from the packages' docstrings.

    python -m tests.house_map [--check]

It is beside `test_layout.py`, which holds the rooms to their order, and needs nothing but the standard library. The rooms come
in the order of pyproject's list of packages, then what is not part of the package; rooms may be nested to any depth.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "CONTRIBUTING.md"
# Folders that are no packages, and so have no docstring.
PLAIN = {
    "recipes": "YAML recipes, each one a thing that people run.",
    "docs": "Guides, one page a concept; `make docs` builds them.",
    "tests": "They mirror the folders; `tests/gpu` needs a GPU, everything else passes without one.",
}
_MARKED = re.compile(r"(<!-- map -->\n).*?(<!-- map end -->)", re.DOTALL)


def packages(root: Path = REPOSITORY) -> list[Path]:
    """Every package: rooms in pyproject's order, each followed by what is in it, then the folders that are not installed."""
    listed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    rooms = list(dict.fromkeys(name.split(".")[1] for name in listed))
    rooms += sorted({init.parent.name for init in root.glob("*/__init__.py")} - {*rooms, *PLAIN})
    return [init.parent for room in rooms for init in sorted((root / room).rglob("__init__.py"), key=_place)]


def _place(init: Path) -> tuple[str, ...]:
    return init.parent.parts


def subject(package: Path) -> str:
    """The first paragraph of a package's docstring, on one line.

    Raises:
        ValueError: it has none.
    """
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{package / '__init__.py'} has no docstring; say what the folder holds")
    return " ".join(docstring.split("\n\n")[0].split()).replace("``", "`")


def written(root: Path = REPOSITORY) -> str:
    """The map: a nested list."""
    lines = []
    for package in packages(root):
        parts = package.relative_to(root).parts
        lines.append(f"{'  ' * (len(parts) - 1)}- `{parts[-1]}/`: {subject(package)}\n")
    lines += [f"- `{name}/`: {what}\n" for name, what in PLAIN.items()]
    return "".join(lines)


def filled(text: str, root: Path = REPOSITORY) -> str:
    """A document with the map between its marks."""
    return _MARKED.sub(lambda found: f"{found[1]}{written(root)}{found[2]}", text)


def main() -> None:
    """Write the map, or check it."""
    parser = argparse.ArgumentParser(prog="python -m tests.house_map", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    given = parser.parse_args()
    before = DOCUMENT.read_text(encoding="utf-8")
    after = filled(before)
    if after != before and not given.check:
        DOCUMENT.write_text(after, encoding="utf-8")
    print(f"{'stale' if given.check else 'written'}: {DOCUMENT.name if after != before else 'nothing'}")
    sys.exit(given.check and after != before)


if __name__ == "__main__":
    main()
