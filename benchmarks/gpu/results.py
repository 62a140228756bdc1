"""A stage's results on the disk: each row as soon as it is known, so that whatever stops a stage loses none."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "benchmarks" / "results"
# What decides what a GPU computes, and how fast. Tiles do, too; rows name theirs.
_SOURCES = ("runtime/**/*.py", "quant/**/*.py")
_NO_SOURCES = ("runtime/native", "runtime/plan", "runtime/serve", "runtime/simulate")
# Parts that call kernels, and nothing else of the runtime.
_OF_KERNELS = ("attention", "ceilings", "compile_all", "large_cases", "linears", "rows", "small_cases", "tuning")
_KERNEL_SOURCES = ("runtime/*.py", "runtime/kernels/**/*.py", "quant/cache_types.py")
# Of the benchmarks: what measures; a part's own file counts for it alone.
_MEASURING = ("cases.py", "job.py", "meta_model.py", "peers.py", "place.py", "random_checkpoints.py", "worker.py")


@dataclass
class Entry:
    """A job's results.

    Attributes:
        part, key, about: which job.
        state: ``done``, ``failed``, or ``cut`` if it was stopped before its end.
        why: what stopped it.
        rows: what it found.
        source: of what sources, as :func:`source_hash` says.
        commit: which they were.
        seconds: that it took, compiling included.
    """

    part: str
    key: str
    about: dict[str, Any]
    state: str = "cut"
    why: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    source: str = ""
    commit: str = ""
    seconds: float = 0.0

    @property
    def identity(self) -> str:
        """What a later run must share for this not to be done again."""
        return identity(self.part, self.key, self.about)

    @property
    def problems(self) -> list[str]:
        """What its checks found wrong."""
        return [str(row["problem"]) for row in self.rows if row.get("problem")]


def identity(part: str, key: str, about: dict[str, Any]) -> str:
    """Of a job."""
    return json.dumps([part, key, about], sort_keys=True)


def source_hash(part: str = "") -> str:
    """Of all that decides what is measured, or of what decides it for one part."""
    found = hashlib.sha256()
    measuring = [f"benchmarks/gpu/{name}" for name in (*_MEASURING, f"parts/{part or '*'}.py")]
    for pattern in (*(_KERNEL_SOURCES if part in _OF_KERNELS else _SOURCES), *measuring):
        for path in sorted(REPOSITORY.glob(pattern)):
            if path.relative_to(REPOSITORY).as_posix().startswith(_NO_SOURCES):
                continue
            found.update(path.relative_to(REPOSITORY).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


class Results:
    """A file of entries.

    Args:
        folder: where to.
        stage: whose.
        facts: the device, versions and options. An earlier file must share all to be gone on with.
        noted: what else the file says: the command, the commit.
        log: gets a message if there is an earlier file.
        source: a hash of what decides a part's results; those of other sources stay until they are measured again.
    """

    def __init__(
        self,
        folder: Path,
        stage: str,
        facts: dict[str, Any],
        noted: dict[str, Any],
        log: Callable[[str], object] = print,
        source: Callable[[str], str] = source_hash,
    ) -> None:
        quick = "_quick" if facts.get("quick") else ""
        self.path = folder / f"gpu_{stage}_{_file_name(str(facts['device']))}{quick}.json"
        self._replaced: dict[str, Entry] = {}
        self._other: Path | None = None
        self._head = {**noted, "stage": stage, **facts}
        self._source, self._commit = cache(source), str(noted.get("commit", ""))
        self._keeps_failed = stage != "check"
        self.entries: dict[str, Entry] = {}
        self.goals: list[dict[str, Any]] = []
        self.missing: list[str] = []
        for earlier in dict.fromkeys((self.path, SHIPPED / self.path.name)):
            if not earlier.exists():
                continue
            known = json.loads(earlier.read_text())
            differing = [name for name in facts if known.get(name) != facts[name]]
            if differing:
                log(f"{earlier.name}: begun anew, as {', '.join(differing)} changed since it was taken")
                if earlier == self.path:
                    self._other = _unused(self.path, known.get("date", "earlier"))
                continue
            self.missing = known.get("missing", [])
            entries = [Entry(**entry) for entry in known["entries"]]
            self.entries = {entry.identity: entry for entry in entries}
            done = sum(e.state == "done" and e.source == self._source(e.part) for e in entries)
            log(f"{earlier.name}: gone on with; {done} jobs are done, of {len(entries)} that it has")
            break

    def is_done(self, part: str, key: str, about: dict[str, Any]) -> bool:
        """Whether nothing is left of it to do; what found something wrong, or is of other sources, is done again."""
        known = self.entries.get(identity(part, key, about))
        return known is not None and known.state == "done" and not known.problems and known.source == self._source(part)

    def begun(self, part: str, key: str, about: dict[str, Any]) -> Entry:
        """A job's new entry; what the same job had with other tiles is forgotten."""
        entry = Entry(part, key, about, source=self._source(part), commit=self._commit)
        before = [e for e in self.entries.values() if (e.part, e.key) == (part, key)]
        self.entries = {i: e for i, e in self.entries.items() if (e.part, e.key) != (part, key)}
        if before and before[-1].state == "done":
            self._replaced[entry.identity] = before[-1]
        self.entries[entry.identity] = entry
        return entry

    def kept(self) -> list[Entry]:
        """All entries; of a job that was cut or failed while it was measured again, what it had before, if that is more, and why."""
        found = []
        for entry in self.entries.values():
            before = self._replaced.get(entry.identity)
            ended = entry.state == "cut" or (entry.state == "failed" and self._keeps_failed)
            if before is not None and ended and len(before.rows) > len(entry.rows):
                again = f"not measured again at {entry.commit}: {entry.why or entry.state}"
                entry = replace(before, why=again)
            found.append(entry)
        return found

    def undone(self, part: str, jobs: list[tuple[str, dict[str, Any]]]) -> int:
        """How many of a part's jobs were not done with these sources."""
        known = [self.entries.get(identity(part, *job)) for job in jobs]
        return sum(each is None or each.state != "done" or each.source != self._source(part) for each in known)

    def write(self) -> None:
        """As a whole, or not at all. A file of another device or other versions is kept beside."""
        if self._other is not None:
            self.path.replace(self._other)
            self._other = None
        data = {
            **self._head,
            "date": datetime.now(UTC).date().isoformat(),
            "goals": self.goals,
            "missing": self.missing,
            "entries": [vars(entry) for entry in self.kept()],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(_listed(data))
        partial.replace(self.path)


def _unused(path: Path, date: str) -> Path:
    """A name beside a file that none has yet."""
    names = (path.with_suffix(f".{date}{f'-{number}' if number > 1 else ''}.json.old") for number in itertools.count(1))
    return next(each for each in names if not each.exists())


def _listed(data: dict[str, Any]) -> str:
    """JSON with an entry a line: a file of a thousand stays readable."""
    head = json.dumps({key: value for key, value in data.items() if key != "entries"}, indent=1)[:-2]
    entries = ",\n".join("  " + json.dumps(entry) for entry in data["entries"])
    return f'{head},\n "entries": [\n{entries}\n ]\n}}\n'


def _file_name(device: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in device).split()).lower()
