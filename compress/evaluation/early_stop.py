"""Answering items in random order, in parts, until what is claimed of the models is known."""

from __future__ import annotations

import random
from collections.abc import Iterator

# Fewer are not worth another start of an engine.
FIRST = 64
_SEED = 0


def parts(count: int) -> Iterator[list[int]]:
    """Numbers of items in random order, which is always the same; each part, ascending, is as large as all before it."""
    order = random.Random(_SEED).sample(range(count), count)
    done, size = 0, FIRST
    while done < count:
        yield sorted(order[done : done + size])
        done += size
        size = done
