"""Random requests for tests of the simulator."""

from __future__ import annotations

import random

from smelt.runtime.requests.trace import Arrival


def random_traffic(count: int, pause: float = 3.0, seed: int = 0) -> list[Arrival]:
    """Short and long requests with exponential pauses of this mean, in seconds."""
    draw = random.Random(seed)
    at, found = 0.0, []
    for _ in range(count):
        found.append(Arrival(at, draw.randint(1, 200), draw.choice([1, 5, 40, 150])))
        at += draw.expovariate(1 / pause)
    return found
