"""Progress with the time left: bars on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from .interrupts import raise_lost_interrupt

T = TypeVar("T")

# Between two lines of a log.
_PAUSE = 30.0

# Gets each message for the user of long work, one line at a time.
Log = Callable[[str], object]


class Progress:
    """Shows how far long work is. Where standard error is no terminal, only of what takes long.

    Args:
        enabled: False for silence in any case.

    Attributes:
        enabled: whether it speaks at once, as on a terminal.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled and sys.stderr.isatty()
        self._logs = enabled and not self.enabled

    def track(
        self, items: Sequence[T] | Iterable[T], description: str | Callable[[], str], total: int | None = None
    ) -> Iterator[T]:
        """Yield ``items`` while showing a bar; an interrupt ends it before the next item at the latest.

        Args:
            items: what is worked on.
            description: what is done, or a function that says so before each item.
            total: how many items there are, if ``items`` has no length.
        """
        for item in self._shown(items, description, total):
            raise_lost_interrupt()
            yield item
            raise_lost_interrupt()

    def _shown(
        self, items: Sequence[T] | Iterable[T], description: str | Callable[[], str], total: int | None
    ) -> Iterator[T]:
        if self._logs:
            yield from _logged(items, description, total)
            return
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
            text = description if callable(description) else lambda: description
            task = bar.add_task(text(), total=total)
            for item in bar.track(items, total=total, task_id=task):
                bar.update(task, description=text())
                yield item

    def say(self, text: str) -> None:
        """One line about what begins now."""
        if self.enabled:
            print(text, file=sys.stderr)


def _logged(items: Sequence[T] | Iterable[T], description: str | Callable[[], str], total: int | None) -> Iterator[T]:
    """The same items, with a line when some time has passed."""
    if total is None and isinstance(items, Sequence):
        total = len(items)
    begun = said = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - said >= _PAUSE:
            said = now
            what = description if isinstance(description, str) else description()
            left = (
                "" if total is None else f" of {total}, about {(now - begun) / done * (total - done) / 60:.0f} min left"
            )
            print(f"smelt: {what}: {done}{left}", file=sys.stderr, flush=True)
        yield item
