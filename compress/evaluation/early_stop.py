"""Answering items in random order, in parts, until what is claimed of the models is known."""

from __future__ import annotations

import random
from collections.abc import Iterator

# Fewer are not worth another start of an engine.
FIRST = 64
_SEED = 0


def parts(count: int, first: int = FIRST) -> Iterator[list[int]]:
    """Items in random order, which is always the same; each part but the first is as large as all before it.

    Args:
        count: of the items.
        first: how many the first part has.

    Yields:
        Some items' numbers, ascending.
    """
    order = random.Random(_SEED).sample(range(count), count)
    done, size = 0, first
    while done < count:
        yield sorted(order[done : done + size])
        done += size
        size = done
