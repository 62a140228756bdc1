"""How commands end: an exit status, and one sentence on standard error for an error."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import typer

from ....system.errors import SmeltError
from ....system.interrupts import end_without_a_word, remembered_interrupts, sentence
from ....system.interrupts import status as interrupted_status
from ....system.storage.files import disk_error

P = ParamSpec("P")


def reporting_errors(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn exceptions into one sentence on standard error and an exit status."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with remembered_interrupts():
                status = command(*args, **kwargs) or 0
        except SmeltError as error:
            status = _end(str(error), 1)
        except KeyboardInterrupt:
            status = _end(sentence(), interrupted_status())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
                raise
            status = _end(str(disk_error(error, Path(str(error.filename or "the output")), 0)), 1)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
                raise
            advice = "rerun the same command to continue; --dry-run prints what it needs"
            status = _end(f"out of memory; lower calibrate.samples or free memory: {advice}", 1)
        raise typer.Exit(status)

    return guarded


def _end(text: str, status: int) -> int:
    end_without_a_word()
    return say(text, status)


def say(text: str, status: int) -> int:
    """Print an error; returns the status."""
    # Only one of several processes prints it; torch knows which once they have connected.
    package = (__package__ or "").removesuffix(".compress.commands.common")
    processes = sys.modules.get(f"{package}.system.processes.process_group")
    if processes is None or processes.first_to_fail():
        for line in text.split("\n"):
            print(f"smelt: {line}", file=sys.stderr)
    return status


def passed(report: Any, gates: list[Any]) -> int:
    """Report which gates failed, and by how much."""
    fallen = [why for gate in gates for why in gate.fallen(report)]
    for why in fallen:
        say(why, 1)
    return 1 if fallen else 0


def not_certified(report: Any, claims: list[str]) -> int:
    """Report which claims were not certified of some model."""
    from ...evaluation.guarantee import Guarantee, uncompared

    status = 0
    baseline = next((model for model in report.models if model.role == "baseline"), None)
    for model in report.candidates:
        known = [] if model.against is None else model.against.guarantees
        for claim in claims:
            of_claim = [each for each in known if each.claim == claim]
            lost = [] if baseline is None else uncompared(baseline, model, Guarantee.parse(claim))
            for task in lost:
                why = f"{task} of {model.name} is not compared: the baseline did not answer the same items"
                status = say(f"guarantee {claim!r}: {why}", 1)
            if not of_claim and not lost:
                status = say(f"guarantee {claim!r}: {model.name} has nothing that it is about; it was not measured", 1)
            for each in of_claim:
                if each.verdict != "certified":
                    status = say(f"guarantee {claim!r} of {model.name} is not certified: {each.verdict}", 1)
    return status


def make_directory(path: Path) -> None:
    """Create the output directory.

    Raises:
        SmeltError: it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SmeltError(f"output: {path} cannot be created ({error.strerror}); choose another") from None
