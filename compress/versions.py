"""Versions of what computes and writes."""

from __future__ import annotations

import platform
from importlib.metadata import version

_PACKAGES = ("smelt", "torch", "transformers", "compressed-tensors")


def versions(*more: str) -> dict[str, str]:
    """Of the packages that decide a result's bytes, of ``more`` packages, and of Python."""
    return {**{name: version(name) for name in (*_PACKAGES, *more)}, "python": platform.python_version()}
