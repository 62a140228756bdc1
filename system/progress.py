"""Progress bars with the time left, on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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

    def track(
        self, items: Sequence[T] | Iterable[T], description: str | Callable[[], str], total: int | None = None
    ) -> Iterator[T]:
        """Yield ``items`` while showing a bar; an interrupt ends it before the next item at the latest.

        Args:
            items: what is worked on.
            description: what is done, or what tells it anew before each item.
            total: how many items there are, if they do not tell.
        """
        for item in self._shown(items, description, total):
            raise_lost_interrupt()
            yield item
            raise_lost_interrupt()

    def _shown(
        self, items: Sequence[T] | Iterable[T], description: str | Callable[[], str], total: int | None
    ) -> Iterator[T]:
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
            told = description if callable(description) else lambda: description
            task = bar.add_task(told(), total=total)
            for item in bar.track(items, total=total, task_id=task):
                bar.update(task, description=told())
                yield item

    def say(self, text: str) -> None:
        """One line about what begins now."""
        if self.enabled:
            print(text, file=sys.stderr)
