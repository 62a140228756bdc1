"""The ``smelt`` command, and ``python -m smelt.compress`` for launchers that start a module."""

from __future__ import annotations

from ..system.interrupts import end_when_interrupted


def main() -> None:
    """Entry point: handles interrupts before the command line and its imports are loaded."""
    end_when_interrupted()
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
