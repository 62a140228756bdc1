"""How much oneDNN and torch remember of the shapes that they have multiplied."""

from __future__ import annotations

import os

_ENTRIES = "64"


def limit_primitive_caches() -> None:
    """Let oneDNN and torch keep fewer of the kernels that they prepare for each number of rows, of which prompts have hundreds.

    By default both keep 1,024, which took 0.8 GB for four small weights by 500 numbers of rows (64: 0.08 GB, in no more time; by hand,
    torch 2.13). They read this when they multiply for the first time in a process; what the environment says comes first.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, _ENTRIES)
