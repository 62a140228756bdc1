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
# What each does by default. A launcher ends processes with the second when one of them has failed.
_USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextlib.contextmanager
def remembered_interrupts() -> Iterator[None]:
    """Within it, `raise_lost_interrupt` raises again what was swallowed on the way.

    Only in the main thread, and only if an interrupt does what it does by default: a job in the background
    of a shell is started with interrupts ignored, and stays so. A termination is an interrupt, too: what is
    half-done is put away.
    """
    ours = threading.current_thread() is threading.main_thread()
    usual = {number: does for number, does in _USUAL.items() if ours and signal.getsignal(number) is does}
    if usual:
        _heard.clear()
    for number in usual:
        signal.signal(number, _hear)
    try:
        yield
    finally:
        for number, does in usual.items():
            signal.signal(number, does)
        if usual:
            _heard.clear()


def raise_lost_interrupt() -> None:
    """Raise `KeyboardInterrupt` if one came earlier and did not end the work."""
    if _heard.is_set() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def _hear(_signal: int, _frame: FrameType | None) -> None:
    _heard.set()
    raise KeyboardInterrupt
