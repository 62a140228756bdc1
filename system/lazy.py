"""Functions that are imported when they are first called: torch takes seconds, and tables that name them do not need it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def later(package: str, module: str, name: str | None = None) -> Callable[..., Any]:
    """A function of another module, imported when it is called.

    Args:
        package: the caller's ``__package__``.
        module: its file in it.
        name: of the function; that of the file by default.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(f".{module}", package), name or module)(*arguments, **named)

    return call
