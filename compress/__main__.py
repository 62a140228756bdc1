"""The ``smelt`` command, and ``python -m smelt.compress`` for launchers that start a module."""

from __future__ import annotations

import sys

from ..system.interrupts import end_when_interrupted

_CONTINUE = ("run", "eval", "sweep", "distill", "verify")  # where they were interrupted


def main() -> None:
    """Entry point: handles interrupts before the command line and its imports are loaded."""
    end_when_interrupted(continues=len(sys.argv) > 1 and sys.argv[1] in _CONTINUE, fresh="--fresh" in sys.argv)
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
