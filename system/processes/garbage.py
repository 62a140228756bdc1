"""How often a process of Smelt looks for garbage."""

from __future__ import annotations

import atexit
import gc

_OLD_EVERY = 100  # passes over the younger objects


def collect_old_seldom() -> None:
    """Pass over long-lived objects seldom, and not at all when the process ends.

    torch, transformers and what they import are a million objects that live as long as the process. Passing over them time and again
    takes half a second of a start, and once more at the end takes more than a second. For programs of ours only: whoever
    imports Smelt decides for himself. Young objects, which almost all garbage is, are looked at as often as before.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _OLD_EVERY)
    atexit.register(gc.freeze)
