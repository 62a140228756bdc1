"""Gives jobs to worker processes, keeps their results, and starts another behind one that died.

Nothing here imports torch: whatever a kernel does to the device or to its process, this one goes on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .results import REPOSITORY, Entry, Results

_STARTS_S = 120.0  # a worker imports torch and transformers, and asks the driver for the device


@dataclass(frozen=True)
class PoolSettings:
    """How workers are started.

    Attributes:
        log: the file that gets their output.
        options: of :mod:`worker`, besides the part.
        prefix: what comes before their command, such as compute-sanitizer's.
        environment: variables besides this process's.
        only: what jobs' names must contain; of several texts with ``|`` between them, one.
    """

    log: Path
    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    only: str = ""


class Gone(Exception):  # noqa: N818 - an end, not a mistake of ours
    """A worker's process ended, or did not answer in time."""


class PoolWorker:
    """One process.

    Args:
        part: the module.
        settings: how it is started.

    Raises:
        Gone: it did not start.
    """

    def __init__(self, part: str, settings: PoolSettings) -> None:
        reading, writing = os.pipe()
        self._log = settings.log.open("ab")
        command = [*settings.prefix, sys.executable, "-u", "-m", "benchmarks.gpu.worker", part]
        self._process = subprocess.Popen(
            [*command, "--answers", str(writing), *settings.options],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(writing,),
            env=dict(os.environ) | dict(settings.environment),
            cwd=REPOSITORY,
        )
        os.close(writing)
        self._answers = reading
        self._unread = b""
        self.used = False
        try:
            self.hello = self.answer(time.monotonic() + _STARTS_S)
        except Gone:
            self.stop()
            raise

    def ask(self, key: str) -> None:
        """For a job."""
        stdin: IO[bytes] | None = self._process.stdin
        assert stdin is not None
        self.used = True
        try:
            stdin.write(json.dumps(key).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise Gone(self._ended()) from None

    def answer(self, until: float) -> dict[str, Any]:
        """Its next message.

        Raises:
            Gone: the process has ended, or said nothing until then.
        """
        while b"\n" not in self._unread:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise Gone("it took too long")
            received = os.read(self._answers, 1 << 16)
            if not received:
                raise Gone(self._ended())
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def stop(self) -> int:
        """End it; its exit status, negative for a signal."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        os.close(self._answers)
        self._log.close()
        return self._process.returncode

    def end(self) -> None:
        """Let it end now, without waiting for that."""
        self._process.kill()

    def kill(self) -> None:
        """End it now."""
        self.end()
        self.stop()

    def _ended(self) -> str:
        try:
            status = self._process.wait(15)
        except subprocess.TimeoutExpired:
            return "its process stopped answering"
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"its process ended ({name})"


@dataclass
class PartOutcome:
    """What became of a part.

    Attributes:
        facts: of the device; None if no worker started.
        reached: jobs that were done, now or before.
        of: all of them; None if nobody could list them.
        name: of the part.
        jobs: all that it has, chosen now or not.
        lacking: why not all were reached.
    """

    facts: dict[str, Any] | None = None
    reached: int = 0
    of: int | None = None
    name: str = ""
    jobs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lacking: str = ""


class PartRunner:
    """One part of a stage, with as many workers as it bears.

    Args:
        module: its jobs.
        settings: how workers are started.
        deadline: :func:`time.monotonic` at which everything stops.
        report: gets each job's entry at its end.
    """

    def __init__(
        self, module: str, settings: PoolSettings, deadline: float, report: Callable[[Entry], object] = lambda _: None
    ) -> None:
        self._module, self._settings, self._deadline, self._report = module, settings, deadline, report
        self._name = ""
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, dict[str, Any], float, bool]] = deque()
        self._workers: set[PoolWorker] = set()
        self._outcome = PartOutcome()

    def run(self, open_results: Callable[[dict[str, Any]], Results]) -> PartOutcome:
        """Do what is left to do.

        Args:
            open_results: from the device's facts, where rows are kept.
        """
        if time.monotonic() >= self._deadline:
            self._outcome.lacking = "out of time"
            return self._outcome
        try:
            first = PoolWorker(self._module, self._settings)
        except Gone as error:
            self._outcome.lacking = f"no worker started: {error}; see {self._settings.log}"
            return self._outcome
        if "refused" in first.hello:
            first.stop()
            self._outcome.lacking = first.hello["refused"]
            return self._outcome
        self._name = first.hello["name"]
        self._outcome.facts = first.hello["facts"]
        self._results = open_results(first.hello["facts"])
        jobs = [job for job in first.hello["jobs"] if any(text in job[0] for text in self._settings.only.split("|"))]
        self._outcome.of = len(jobs)
        self._outcome.name, self._outcome.jobs = self._name, [(job[0], job[1]) for job in first.hello["jobs"]]
        self._waiting.extend(job for job in jobs if not self._results.is_done(self._name, job[0], job[1]))
        self._outcome.reached = len(jobs) - len(self._waiting)
        if not self._waiting:
            first.stop()
            return self._outcome
        count = min(first.hello["workers"], len(self._waiting))
        threads = [
            threading.Thread(target=self._work, args=(first if i == 0 else None,), daemon=True) for i in range(count)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # somebody wants all to end now; rows are on the disk
            for worker in list(self._workers):
                worker.end()
            raise
        if self._outcome.reached < len(jobs) and not self._outcome.lacking:
            self._outcome.lacking = "out of time"
        return self._outcome

    def _work(self, worker: PoolWorker | None) -> None:
        """One thread's: jobs in turn, by one process after another."""
        try:
            while time.monotonic() < self._deadline:
                with self._lock:
                    if not self._waiting:
                        break
                    key, about, limit_s, fresh = self._waiting.popleft()
                if worker is not None and fresh and worker.used:
                    worker.stop()
                    worker = None
                try:
                    worker = worker or PoolWorker(self._module, self._settings)
                    self._workers.add(worker)
                except Gone as error:
                    self._outcome.lacking = f"no worker started again: {error}; see {self._settings.log}"
                    break
                if not self._one(worker, key, about, limit_s):
                    worker = None
        finally:
            if worker is not None:
                worker.stop()

    def _one(self, worker: PoolWorker, key: str, about: dict[str, Any], limit_s: float) -> bool:
        """Have a job done; whether the process can do another."""
        with self._lock:
            entry = self._results.begun(self._name, key, about)
        begun = time.monotonic()
        until = min(begun + limit_s, self._deadline)
        lives = True
        try:
            worker.ask(key)
            while entry.state == "cut":
                message = worker.answer(until)
                with self._lock:
                    entry.seconds = round(time.monotonic() - begun, 1)
                    if "row" in message:
                        entry.rows.append(message["row"])
                    else:
                        entry.state, entry.why = ("failed", message["failed"]) if message["failed"] else ("done", "")
                        lives = message["alive"]
                    self._results.write()
            if not lives:
                worker.stop()
        except Gone as error:
            worker.kill()
            lives = False
            with self._lock:
                entry.why = str(error)
                # A job that time for all ran out on has not failed.
                if time.monotonic() < self._deadline:
                    entry.state = "failed"
                    if "too long" in entry.why:
                        entry.why = f"it took more than {limit_s:.0f} s, and was stopped"
                self._results.write()
        with self._lock:
            self._outcome.reached += entry.state != "cut"
            self._report(entry)
        return lives
