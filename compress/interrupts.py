"""Ctrl-C that is never lost.

Python drops an exception that is raised inside a destructor or a weak reference's callback, and some
libraries catch everything: an interrupt that falls there would vanish, and the work go on for hours.
So an interrupt is also remembered, and raised again before the next piece of long work.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_heard = threading.Event()


@contextlib.contextmanager
def remembered_interrupts() -> Iterator[None]:
    """Within it, `raise_lost_interrupt` raises again what was swallowed on the way.

    Only in the main thread, and only if an interrupt does what it does by default: a job in the background
    of a shell is started with interrupts ignored, and stays so.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _heard.clear()
    before = signal.signal(signal.SIGINT, _hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _heard.clear()


def raise_lost_interrupt() -> None:
    """Raise `KeyboardInterrupt` if one came earlier and did not end the work."""
    if _heard.is_set() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def _hear(_signal: int, _frame: FrameType | None) -> None:
    _heard.set()
    raise KeyboardInterrupt
