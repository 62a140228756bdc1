"""Versions of what computes and writes."""

from __future__ import annotations

import platform
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("smelt", "torch", "transformers", "compressed-tensors")


def versions(*more: str) -> dict[str, str]:
    """Of the packages that decide a result's bytes, of ``more`` packages, and of Python."""
    return {**{name: _version(name) for name in (*_PACKAGES, *more)}, "python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        # A checkout that is only on Python's path, as on a machine where nothing can be installed.
        project = Path(__file__).parents[1] / "pyproject.toml"
        if name != "smelt" or not project.exists():
            return "not installed"
        return tomllib.loads(project.read_text())["project"]["version"]
