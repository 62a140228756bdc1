"""What an evaluation has open: readings of a text, and engines that answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...runtime import Engine
from ...runtime.engine.ranks.reserve import share_of
from ...system.hardware.device import device_named, free_memory, give_back
from ...system.progress import Progress
from ..results.result import Sample
from .scoring.runtime_reader import RuntimeReader, not_served
from .scoring.samples import continuations
from .scoring.text import Excerpt, Reading, read
from .settings import Evaluate
from .subject import Subject

_SEQUENCES = 32
# Memory of an engine, beside the bytes that its checkpoint stores.
_WIDER, _BESIDE = 2.5, 500_000_000


class Readings:
    """Readings of an excerpt, by subject, so that a baseline reads it once for all. Use as a context manager.

    Args:
        directory: where activations may be kept.
        settings: of the evaluation.
        progress: shows progress.
    """

    def __init__(self, directory: Path, settings: Evaluate, progress: Progress) -> None:
        self._directory, self._settings, self._progress = directory, settings, progress
        self._of: dict[str, Reading] = {}

    def of(self, subject: Subject, excerpt: Excerpt) -> Reading:
        """A subject's reading, until it is forgotten.

        Raises:
            NotServed: its model cannot be loaded.
        """
        if subject.name not in self._of:
            if subject.open_reader is not None:
                reader, computed_by = subject.open_reader(self._directory)
            else:
                directory = subject.directory
                config = self._settings.engine(trust_remote_code=directory.trust_remote_code)
                reader = RuntimeReader(directory.path, self._directory, config)
                computed_by = "Smelt's runtime"
            self._of[subject.name] = read(reader, excerpt, computed_by, subject.name, self._progress)
        return self._of[subject.name]

    def forget(self, subject: Subject) -> None:
        """Remove a subject's reading, if there is one."""
        reading = self._of.pop(subject.name, None)
        if reading is not None:
            reading.close()

    def __enter__(self) -> Readings:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as closing:
            for reading in self._of.values():
                closing.callback(reading.close)


class SubjectEngine:
    """An engine for a subject, loaded on first use; or the server that it is behind.

    Args:
        subject: what answers.
        settings: of the evaluation.
        progress: shows progress.
        beside: how many engines there will be at once, this one included.
    """

    def __init__(self, subject: Subject, settings: Evaluate, progress: Progress, *, beside: int = 1) -> None:
        self._subject, self._settings, self._progress = subject, settings, progress
        self._beside = beside
        self._engine: Engine | None = None
        self._harness: Any = None

    @property
    def engine(self) -> Engine:
        """Its engine.

        Raises:
            NotServed: it cannot be loaded.
        """
        if self._engine is None:
            self._progress.say(f"loading {self._subject.name}")
            directory = self._subject.directory
            config = self._settings.engine(trust_remote_code=directory.trust_remote_code)
            config = replace(config, max_num_seqs=_SEQUENCES)
            with not_served():
                self._engine = Engine(directory.path, share_of(config, self._beside))
        return self._engine

    @property
    def harness(self) -> Any:
        """It as lm-eval's model."""
        quiet = not self._progress.enabled
        if self._harness is None and self._subject.server is not None:
            from .scoring.server_lm import ServerLM

            self._harness = ServerLM(self._subject.server, disable_tqdm=quiet)
        elif self._harness is None:
            from ..integrations.lm_eval import SmeltLM

            self._harness = SmeltLM(engine=self.engine, disable_tqdm=quiet)
        return self._harness

    def continuations(self, beginnings: list[str]) -> list[Sample]:
        """Its greedy continuations."""
        server = self._subject.server
        if server is not None:
            return server.continuations(beginnings)
        return continuations(self.engine, beginnings, self._subject.name)

    def close(self) -> None:
        """Give its memory back."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._harness = None
        give_back(device_named(self._settings.device))


class Engines:
    """The subjects' engines: several at once if they fit in memory, otherwise one. Use as a context manager.

    Args:
        subjects: that answer.
        settings: of the evaluation.
        progress: shows progress.
    """

    def __init__(self, subjects: Sequence[Subject], settings: Evaluate, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        here = [subject for subject in subjects if subject.server is None and subject.only_text is None]
        needed = sum(_WIDER * subject.bytes + _BESIDE for subject in here)
        self._together = needed < free_memory(device_named(settings.device))
        self._count = max(1, len(here))
        self._open: dict[str, SubjectEngine] = {}

    def of(self, subject: Subject) -> SubjectEngine:
        """A subject's."""
        if subject.name not in self._open:
            if not self._together:
                self._close_all()
            beside = self._count if self._together else 1
            self._open[subject.name] = SubjectEngine(subject, self._settings, self._progress, beside=beside)
        return self._open[subject.name]

    def forget(self, subject: Subject) -> None:
        """Close a subject's."""
        served = self._open.pop(subject.name, None)
        if served is not None:
            served.close()

    def _close_all(self) -> None:
        with ExitStack() as closing:
            for served in self._open.values():
                closing.callback(served.close)
        self._open.clear()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self._close_all()
