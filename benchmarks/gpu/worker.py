"""Does one part's jobs, as it is asked for them; the process may die of one, and whoever asked starts another.

Jobs' names come on standard input, a line each; what is known goes as lines of JSON to the file descriptor that was
given; whatever else is printed, whole tracebacks too, goes to the log that standard output and error are.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Until standard input ends, or the device has stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("--answers", type=int, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    answers = os.fdopen(given.answers, "w", buffering=1)

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    try:
        part = importlib.import_module(given.part)
        missing = _missing(getattr(part, "IMPORTS", ()))
        if missing:
            answer(refused=f"this Python lacks {', '.join(missing)}; see python -m benchmarks.gpu.wheels --help")
            return
        from .place import Place

        options = {name: getattr(given, name) for name in ("quick", "runs", "scratch", "output")}
        place = Place.here(rehearses=given.rehearse, **options)
        jobs = {job.key: job for job in part.jobs(place)}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        answer(refused=one_line(error) if isinstance(error, Exception) else str(error))
        return
    listed = [[job.key, job.about, job.limit_s, job.fresh] for job in jobs.values()]
    name = getattr(part, "NAME", given.part.rpartition(".")[2])
    answer(name=name, facts=place.facts(), jobs=listed, workers=getattr(part, "WORKERS", 1))
    for line in sys.stdin:
        key = json.loads(line)
        print(f"\n--- {given.part}: {key}", flush=True)
        failed = None
        try:
            for row in jobs[key].run(place):
                answer(row=row)
        except Exception as error:
            traceback.print_exc()
            failed = one_line(error)
        gc.collect()
        alive = place.alive()
        sys.stdout.flush()
        answer(failed=failed if alive else f"{failed or 'done'}; the device had stopped", alive=alive)
        if not alive:
            print("the device had stopped; this process ends", flush=True)
            answers.close()
            os._exit(1)  # what would be taken down is broken


def _missing(names: tuple[str, ...]) -> list[str]:
    """Those that cannot be imported, and why."""
    found = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            lacking = error.name or name
            found.append(lacking if lacking == name else f"{lacking} (for {name})")
    return found


def one_line(error: Exception) -> str:
    """What went wrong, shortened; the log has all of it."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


if __name__ == "__main__":
    main()
