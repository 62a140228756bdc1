"""A rank that says that it is here, and ends before it connects: what test_processes starts."""

from __future__ import annotations

import os
import sys
import time

from smelt.runtime.parallel.launch import FileStore

if __name__ == "__main__":
    _, place, rank, count, _ = sys.argv[1:]
    FileStore(place, int(count)).set(f"smelt: rank {rank} is here", "")
    time.sleep(1)  # in which the first rank sees that, and begins to connect
    os._exit(3)
