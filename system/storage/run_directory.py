"""The output directory of a run, an evaluation or a sweep: whose it is, what is finished in it, and how results appear."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import SmeltError
from ..plain_data import strings_in
from .files import disk_error, write_text
from .paths import named_path

_MARK = "run.json"
# What starting over removes, beside what is in the journal.
_FOLDERS = ("checkpoint", "checkpoint.partial")
_FILES = ("report.json", "report.md", "report.html", "pareto.svg")
# By the kind of work that an output's mark names.
_COMMANDS = {"run": "run", "evaluation": "eval", "sweep": "sweep", "draft head": "distill"}


class Output:
    """An output directory, locked while a run works in it.

    Use as a context manager. Entering creates the directory, or finds an earlier run of the same
    recipe to continue; a directory that is not Smelt's, or another recipe's, is refused.

    Args:
        path: the directory.
        identity: everything that decides the result's bytes, as plain data.
        fresh: throw away what an earlier run left.
        reads: plain data among whose strings are the paths of what the run reads, which it must not throw away.
    """

    def __init__(self, path: Path, identity: dict[str, Any], *, fresh: bool = False, reads: Any = None) -> None:
        self.path = named_path(path)
        self.identity = identity
        self._fresh = fresh
        self._reads = reads
        self._lock: int | None = None

    @staticmethod
    def was_begun(path: Path) -> bool:
        """Whether a run has begun in a directory."""
        return (named_path(path) / "journal" / _MARK).exists()

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def staging(self) -> Path:
        """Where the checkpoint is put together before it appears under its own name."""
        return self.path / "checkpoint.partial"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def has_checkpoint(self) -> bool:
        return (self.checkpoint / "smelt.json").exists()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do; a report of an interrupted evaluation says that it is partial."""
        try:
            report = json.loads(self.report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return self.has_checkpoint and report.get("status") == "complete"

    def problem(self) -> str | None:
        """Why a run could not write here, without writing anything."""
        if self.path.exists() and not self.path.is_dir():
            return f"{self.path} is a file; choose a directory that does not exist yet"
        try:
            strange = self.path.exists() and not (self.journal / _MARK).exists() and not self._is_bare()
        except OSError as error:
            return f"{self.path} cannot be read ({error.strerror}); choose another output"
        if strange:
            return f"{self.path} exists and was not made by Smelt; choose another output or remove it yourself"
        parent = self.path
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            return f"{parent} is not writable; choose another output"
        return self._other_kind() or (self._lost_input() if self._fresh else self._other_run())

    def __enter__(self) -> Output:
        problem = self.problem()
        if problem:
            raise SmeltError(f"output: {problem}")
        try:
            self.journal.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.journal / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SmeltError(
                f"output: another run is working in {self.path}; wait for it or choose another output"
            ) from None
        except OSError as error:
            raise disk_error(error, self.path, 0) from None
        try:
            if self._fresh:
                self._clear()
            shutil.rmtree(self.staging, ignore_errors=True)
            for lost in self.journal.rglob("activations-*.bin"):  # of a run that was killed
                lost.unlink()
            if self._fresh or not (self.journal / _MARK).exists():
                write_text(self.journal / _MARK, json.dumps(self.identity, indent=2, sort_keys=True) + "\n")
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                shutil.rmtree(self.staging, ignore_errors=True)
        finally:
            if self._lock is not None:  # last: the next run makes a directory of that name
                os.close(self._lock)

    def publish(self) -> None:
        """Make the finished checkpoint appear under its name, at once."""
        self.staging.rename(self.checkpoint)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def forget_intermediate(self) -> None:
        """Remove what only an unfinished run needs."""
        for entry in self.journal.iterdir():
            if entry.name not in (_MARK, "lock"):  # the mark is replaced, never absent: it says whose directory this is
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _is_bare(self) -> bool:
        """Whether the directory is empty, or holds no more than a run that was killed as it began."""
        if any(entry != self.journal for entry in self.path.iterdir()):
            return False
        begun = {"lock", _MARK + ".partial"}
        return not self.journal.exists() or all(entry.name in begun for entry in self.journal.iterdir())

    def _earlier(self) -> dict[str, Any] | None:
        """The identity of an earlier run; None if there was none, empty if it cannot be read."""
        mark = self.journal / _MARK
        if not mark.exists():
            return None
        try:
            found = json.loads(mark.read_text(encoding="utf-8"))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _other_kind(self) -> str | None:
        """Whether another command's result is here, which --fresh does not mean."""
        earlier = self._earlier()
        if not earlier:
            return None
        kinds = [data.get("kind", "run") for data in (earlier, self.identity)]
        if kinds[0] == kinds[1]:
            return None
        return f"{self.path} holds what `smelt {_COMMANDS.get(kinds[0], kinds[0])}` made; choose another output"

    def _lost_input(self) -> str | None:
        """Whether the run reads what starting over would remove."""
        if not self.path.exists():
            return None
        removed = [self.path.resolve() / name for name in (*_FOLDERS, *_FILES, self.journal.name)]
        for text in strings_in(self._reads):
            try:
                read = named_path(text).resolve()
                # A run's directory stands for the checkpoint in it.
                places = [each for each in (read, read / "checkpoint") if each.exists()]
                is_lost = any(place.is_relative_to(each) for place in places for each in removed)
            except (OSError, SmeltError, RuntimeError):  # it is no path
                continue
            if is_lost:
                return f"--fresh would remove {text}, which this run reads; choose another output"
        return None

    def _other_run(self) -> str | None:
        earlier = self._earlier()
        if earlier is None:
            return None
        if not earlier:
            return f"{self.journal / _MARK} is damaged; pass --fresh to start over"
        changed = _differences(earlier, self.identity)
        if not changed:
            return None
        shown = "; ".join(changed[:4]) + ("; …" if len(changed) > 4 else "")
        return f"{self.path} holds another run ({shown}); pass --fresh to replace it, or choose another output"

    def _clear(self) -> None:
        for name in _FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        self.forget_intermediate()


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            found += _differences(old.get(key), new.get(key), f"{place}.{key}" if place else key)
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in _differences(a, b, f"{place}.{i}")]
    if old == new:
        return []
    return [f"{place.removeprefix('recipe.')}: {old!r} -> {new!r}"]
