"""Ctrl-C that is never lost, and never ends the process with a crash.

Python drops an exception that is raised inside a destructor or a weak reference's callback, and some
libraries catch everything: an interrupt that falls there would vanish, and the work go on for hours.
So an interrupt is also remembered, and raised again before the next piece of long work.

A library in C++ that is just being loaded does not expect an exception at all: torch then ends in an abort or a
segmentation fault. While anything is imported an interrupt therefore ends the process at once. That is as safe as the
`kill -9` that all of Smelt's output survives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_received = threading.Event()
_continues, _fresh = threading.Event(), threading.Event()
_said = threading.Event()
_last = [int(signal.SIGINT)]  # the signal that came last
_IMPORTING = "<frozen importlib._bootstrap>"


def sentence() -> str:
    """What a command says that is interrupted."""
    if not _continues.is_set():
        return "interrupted"
    return (
        f"interrupted; the same command{' without --fresh' if _fresh.is_set() else ''} continues where this one stopped"
    )


def status() -> int:
    """The exit status of a command that is interrupted: 128 and the signal's number, as a shell has it."""
    return 128 + _last[0]


def end_when_interrupted(*, continues: bool, fresh: bool = False) -> None:
    """From here on an interrupt or a termination ends the process at once, with a sentence and a status.

    Args:
        continues: whether the same command goes on where it was interrupted.
        fresh: whether it starts over, as it would again.

    For commands, before anything large is imported. A signal that the parent ignores stays ignored: a shell starts its
    background jobs like that.
    """
    if continues:
        _continues.set()
    if fresh:
        _fresh.set()
    for number, usual in _USUAL.items():
        if signal.getsignal(number) is usual:
            signal.signal(number, _end)


@contextlib.contextmanager
def remembered_interrupts() -> Iterator[None]:
    """Within it, an interrupt is a `KeyboardInterrupt`, and `raise_lost_interrupt` raises again one that was swallowed.

    Only in the main thread, and only if an interrupt does what it does by default: a job in the background
    of a shell is started with interrupts ignored, and stays so. A termination is an interrupt, too: what is
    half-done is put away.
    """
    ours = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _USUAL if ours}
    taken = {number: does for number, does in before.items() if does in (_USUAL[number], _end)}
    if taken:
        _received.clear()
    for number in taken:
        signal.signal(number, _hear)
    try:
        yield
    finally:
        for number, does in taken.items():
            signal.signal(number, does)
        if taken:
            _received.clear()


def raise_lost_interrupt() -> None:
    """Raise `KeyboardInterrupt` if one came earlier and did not end the work."""
    if _received.is_set() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@contextlib.contextmanager
def waiting_interrupts() -> Iterator[None]:
    """Within it an interrupt or a termination waits for the end, so that nothing is left half-done; a second one does not.

    Only in the main thread, and only where they are heard.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before: dict[int, Any] = {number: handler for number, handler in known.items() if callable(handler)}
    came: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            before[number](number, frame)

    for number in before:
        signal.signal(number, hear)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if len(came) == 1:
            before[came[0]](came[0], None)


def end_without_a_word() -> None:
    """From here on an interrupt that ends the process adds no sentence: why it ends is being said.

    A launcher terminates the process that has just said that another one is gone.
    """
    _said.set()


def _hear(number: int, frame: FrameType | None) -> None:
    _last[0] = number
    if _is_importing(frame):
        _end(number, frame)
    _received.set()
    raise KeyboardInterrupt


def _end(number: int, _frame: FrameType | None) -> None:
    _last[0] = number
    # Of several processes that a launcher started, one says why.
    if not _said.is_set() and os.environ.get("RANK", "0") == "0":
        os.write(2, f"smelt: {sentence()}\n".encode())
    os._exit(status())


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False


# What each does by default. A launcher ends processes with the second when one of them has failed.
_USUAL: dict[int, Callable[..., object] | int] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
