"""What a stage is made of: jobs, each of which is done in a process that may die of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .place import Place

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One thing to check or to measure.

    A part of a stage is a module with ``jobs(place)``, which lists its jobs, the most important first; ``IMPORTS``, modules
    that must be importable before any of them begins; ``WORKERS``, how many may run at once; and ``NAME``, what results call the part, if that
    is not its module's name.

    Attributes:
        key: its name, of which a part has only one.
        run: does it, and yields rows as they are known; a failed check has a row with a ``problem``.
        about: what else decides its rows, such as a tile: where that has changed, it is done again.
        limit_s: seconds after which it is stopped.
        fresh: whether it wants a process that has done nothing before, because jobs leave memory behind.
    """

    key: str
    run: Callable[[Place], Iterator[Row]]
    about: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 60.0
    fresh: bool = False
