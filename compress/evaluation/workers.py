"""Starting and asking the processes that measure speed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any

from ...system.errors import RuntimeProblem, SmeltError

_END_SECONDS = 3.0


class Worker:
    """A process that measures; see :mod:`.speed_worker`. Use as a context manager.

    Args:
        name: of what it measures, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "smelt.compress.evaluation.speed_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            process_group=0,  # not interrupted by Ctrl-C: its parent ends it
        )

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        """Send a command and return its answer.

        Raises:
            SmeltError: the process failed or died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"do": do, **command}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            reason = f"exit status {status}"
            if status == -9:
                reason = "the system killed it, probably for lack of memory; lower the speed's concurrency or prompt"
            raise RuntimeProblem(f"speed of {self._name}: the measuring process died ({reason})")
        answer = json.loads(line)
        if "error" in answer:
            raise SmeltError(f"speed of {self._name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it never read its last request
                self._process.stdin.close()
        try:
            # With the end of its input it ends, and so do the ranks that it has started.
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # it never read its last request
                    stream.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
