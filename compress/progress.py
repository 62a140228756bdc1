"""Progress bars with the time left, on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from .interrupts import raise_lost_interrupt

T = TypeVar("T")


class Progress:
    """Shows how far long work is. Quiet unless standard error is a terminal.

    Args:
        enabled: False for silence in any case.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled and sys.stderr.isatty()

    def track(self, items: Sequence[T] | Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
        """Yield ``items`` while showing a bar; an interrupt ends it before the next item at the latest."""
        for item in self._shown(items, description, total):
            raise_lost_interrupt()
            yield item
            raise_lost_interrupt()

    def _shown(self, items: Sequence[T] | Iterable[T], description: str, total: int | None) -> Iterator[T]:
        if not self.enabled:
            yield from items
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            yield from bar.track(items, total=total, description=description)  # type: ignore[arg-type]

    def say(self, text: str) -> None:
        """One line about what begins now."""
        if self.enabled:
            print(text, file=sys.stderr)
