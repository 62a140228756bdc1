"""``python -m smelt.compress``: the command line, for launchers that start a module."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
