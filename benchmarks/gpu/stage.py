"""A stage of what a GPU is asked: ``check``, ``numbers``, ``tune`` or ``serve``; each ends inside nine minutes.

A stage that is cut keeps what it has and says what it lacks; run again with the same sources, it goes on.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import goals
from .pool import PartOutcome, PartRunner, PoolSettings
from .results import SHIPPED, Entry, Results, source_hash

# The most important first. What tuning changes is measured again where tiles are others now.
STAGES = {
    "check": tuple(
        ("check", part) for part in ("compile_all", "small_cases", "engine_tests", "end_to_end", "large_cases")
    ),
    "numbers": tuple(
        ("numbers", part) for part in ("ceilings", "decode", "attention", "linears", "rows", "decode_others")
    ),
    "tune": (("tune", "tuning"), *(("numbers", part) for part in ("decode", "attention", "linears", "decode_others"))),
    "serve": (("serve", "serving"),),
}
LIMIT_S = 510.0
_PART_LIMIT_S = {"tuning": 300.0}  # so that what it changed is measured again in the same stage
_SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def main() -> None:
    """Run a stage; exit with 1 if something is wrong or missing."""
    given = _parsed()
    deadline = time.monotonic() + given.limit
    # Whoever is stopped ends its workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    given.output.mkdir(parents=True, exist_ok=True)
    log = given.output / f"gpu_{given.stage}.log"
    # Checkpoints go with the folder, whatever ends this but SIGKILL.
    with tempfile.TemporaryDirectory(prefix="smelt-", dir=given.scratch) as scratch:
        settings = PoolSettings(
            log, (*_worker_options(given), "--scratch", scratch, "--output", str(given.output)), only=given.only
        )
        sys.exit(_sanitized(given, settings, deadline) if given.sanitizer else _staged(given, settings, deadline))


def _staged(given: argparse.Namespace, settings: PoolSettings, deadline: float) -> int:
    files: dict[str, Results] = {}
    outcomes: dict[str, PartOutcome] = {}
    limit: float = given.limit
    for stage, part in STAGES[given.stage]:
        print(f"\n{part}", flush=True)

        def open_results(facts: dict[str, Any], stage: str = stage) -> Results:
            if stage not in files:
                decides = {**facts, "quick": given.quick}
                noted = {"command": f"benchmarks/gpu/run.sh {stage}", "commit": given.commit, "source": source_hash()}
                files[stage] = Results(given.output, stage, decides, noted)
            return files[stage]

        until = min(deadline, time.monotonic() + _PART_LIMIT_S.get(part, limit))
        outcomes[part] = PartRunner(f"benchmarks.gpu.parts.{part}", settings, until, _say).run(open_results)
        if outcomes[part].lacking:
            print(f"{part}: {outcomes[part].lacking}", flush=True)
    return _summary(given, files, outcomes, settings.log)


def _summary(given: argparse.Namespace, files: dict[str, Results], outcomes: dict[str, PartOutcome], log: Path) -> int:
    """Print what is wrong, missing and reached; 1 if not all is well."""
    lacking = [f"{name}: {o.reached} of {o.of or '?'} jobs, {o.lacking}" for name, o in outcomes.items() if o.lacking]
    bad = 0
    for stage, results in files.items():
        # Goals are for a whole run's models on a GPU.
        measured = [] if given.rehearse or given.quick else results.kept()
        results.missing, results.goals = _missing(stage, results, outcomes), goals.of(measured)
        results.write()
        bad += sum(entry.state == "failed" or bool(entry.problems) for entry in results.entries.values())
        if results.goals:
            print(f"\n{'goal':<72}{'wanted':>8}{'reached':>9}")
        for goal in results.goals:
            reached = "-" if goal["reached"] is None else format(goal["reached"], ".2f")
            print(f"{goal['goal']:<72}{goal['wanted']:>8.2f}{reached:>9}")
        print(f"\n{results.path}")
    for line in lacking:
        print(f"missing: {line}")
    print(f"{bad} jobs failed or found something wrong; {log} has whole tracebacks")
    return 1 if bad or lacking else 0


def _missing(stage: str, results: Results, outcomes: dict[str, PartOutcome]) -> list[str]:
    """What a file lacks of all its stage's jobs, whichever were chosen now; of parts that did not run, what it lacked before."""
    found = [line for line in results.missing if line.partition(":")[0] not in outcomes]
    for name, outcome in outcomes.items():
        if (stage, name) not in STAGES[stage]:
            continue
        undone = results.undone(outcome.name, outcome.jobs)
        if undone or not outcome.jobs:
            count = f"{undone} of {len(outcome.jobs)} jobs" if outcome.jobs else "its jobs"
            found.append(f"{name}: {count} not done{f', {outcome.lacking}' if outcome.lacking else ''}")
    return found


def _say(entry: Entry) -> None:
    """A job's end, for the terminal."""
    if entry.state != "done":
        print(f"{'FAILED' if entry.state == 'failed' else 'cut'} {entry.key}: {entry.why}", flush=True)
    for problem in entry.problems:
        print(f"WRONG {entry.key}: {problem}", flush=True)
    for row in entry.rows:
        # Checks that found nothing wrong are counted at the end.
        if "problem" not in row:
            print(f"{entry.key}: {', '.join(f'{name} {_short(value)}' for name, value in row.items())}", flush=True)


def _short(value: Any) -> str:
    return format(value, ".4g") if isinstance(value, float) else str(value)


def _sanitized(given: argparse.Namespace, settings: PoolSettings, deadline: float) -> int:
    """Small cases under compute-sanitizer, each kernel in processes of its own, so that what it finds has a name."""
    from smelt.runtime.kernels.tools.registry import KERNELS

    report = given.output / f"gpu_{given.sanitizer}.txt"
    report.write_text("")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for kernel in KERNELS:
            logs = Path(folder) / kernel.name
            command = ("compute-sanitizer", "--tool", given.sanitizer, "--error-exitcode", "9")
            its = PoolSettings(
                settings.log,
                # Each launch is many times as slow, and two that race are found by the tool.
                (*settings.options, "--runs", "2"),
                (*command, "--log-file", f"{logs}.%p"),
                # Memory that torch keeps for later would hide what is read behind a tensor's end.
                (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
                only="|".join(f"{kernel.name}: {text}" for text in given.only.split("|")),
            )

            def open_results(facts: dict[str, Any], kernel: str = kernel.name) -> Results:
                return Results(Path(folder), kernel, facts, {}, str)

            outcome = PartRunner("benchmarks.gpu.parts.small_cases", its, deadline, _say).run(open_results)
            found = "".join(path.read_text() for path in sorted(Path(folder).glob(f"{kernel.name}.*")))
            with report.open("a") as file:
                file.write(f"--- {kernel.name}\n{found}\n")
            summaries = [line.strip("= ") for line in found.splitlines() if "SUMMARY" in line]
            clean = bool(summaries) and all(re.search(r"\b0 (errors|hazards)", line) for line in summaries)
            bad += not clean or bool(outcome.lacking)
            said = "clean" if clean else "; ".join(dict.fromkeys(summaries)) or "no summary"
            lacking = f", {outcome.lacking}" if outcome.lacking else ""
            print(f"{kernel.name}: {said}; {outcome.reached} of {outcome.of or '?'} cases{lacking}", flush=True)
    print(f"\n{report}")
    return 1 if bad else 0


def _worker_options(given: argparse.Namespace) -> tuple[str, ...]:
    found = ["--rehearse"] if given.rehearse else []
    return (*found, "--quick") if given.quick else tuple(found)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--output", type=Path, default=SHIPPED, help="where results and the log go")
    parser.add_argument(
        "--scratch", type=Path, help="where random models of 16 GB are written meanwhile, e.g. /dev/shm"
    )
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""), help="noted in results; also $COMMIT")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which everything stops")
    parser.add_argument("--only", default="", help="only jobs whose names contain this, or one of several: A|B")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see whether it runs")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU, in Triton's interpreter")
    parser.add_argument("--sanitizer", choices=_SANITIZERS, help="check only: small cases under compute-sanitizer")
    given = parser.parse_args()
    if given.sanitizer and given.stage != "check":
        parser.error(f"--sanitizer is for the stage check, not for {given.stage}")
    if given.sanitizer and not shutil.which("compute-sanitizer"):
        parser.error("compute-sanitizer is not on the PATH; it comes with CUDA's toolkit")
    if given.rehearse and given.output == SHIPPED:
        parser.error("a rehearsal's results are none: give --output another folder")
    given.output = given.output.resolve()  # workers run in the repository's folder
    given.scratch = given.scratch and given.scratch.resolve()
    print(shlex.join(["benchmarks/gpu/run.sh", *sys.argv[1:]]), flush=True)
    return given


if __name__ == "__main__":
    main()
