"""Measure and compare checkpoints: text, tasks, samples, speed; finished measurements are kept and reused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...models.text.text_source import TextSource
from ...runtime import Engine
from ...system.device import device_named, give_back
from ...system.errors import SmeltError
from ...system.progress import Progress
from ...system.versions import versions
from ..results.report import ReportData
from ..results.result import Against, DraftedSpeed, Machine, ModelResult, Sample, Speed, TaskResult, Text
from ..results.this_machine import this_machine
from .against import against, incomparable
from .drafts import EvaluatedDrafter, measure_drafts
from .guarantee import Guarantee, guaranteed
from .journal import Journal
from .scoring.runtime_reader import RuntimeReader
from .scoring.samples import continuations, prompts
from .scoring.tasks import Tasks
from .scoring.text import Divergence, Excerpt, Reading, divergence, likelihood, read
from .settings import Evaluate
from .speed import MachineRates, MeasuredCheckpoint, measure_speed
from .subject import Subject

_SEQUENCES = 32


class Evaluation:
    """Checkpoints being measured.

    :meth:`run` measures; :meth:`report` reports the measurements so far, also after an interruption.

    Args:
        subjects: what to measure; at most one is the baseline.
        settings: how.
        tasks: the settings' tasks, loaded.
        directory: where finished measurements are kept.
        progress: shows progress.
        title: of the report.
        drafter: proposes tokens in a measurement of speculative decoding.
        kept_baseline: a baseline's results from another report, instead of a subject.
        wanted: False to measure nothing and report only what needs no measurement.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        settings: Evaluate,
        tasks: Tasks | None,
        directory: Path,
        progress: Progress,
        *,
        title: str,
        drafter: EvaluatedDrafter | None = None,
        kept_baseline: ModelResult | None = None,
        wanted: bool = True,
    ) -> None:
        self._subjects = list(subjects)
        assert len({subject.name for subject in subjects}) == len(self._subjects), "two models are called the same"
        self._settings = settings
        self._tasks = tasks
        self._directory = directory
        self._journal = Journal(directory)
        self._progress = progress
        self._title = title
        self._drafter = drafter
        self._kept = kept_baseline
        self._machine: Machine = this_machine(settings.device)
        self._machine_as_found = self._machine.model_dump(mode="json")
        self._results = {subject.name: subject.described() for subject in self._subjects}
        self._divergences: dict[str, Divergence] = {}
        self._warnings: list[str] = []
        self._missing = self._wanted() if wanted else {}

    def run(self) -> None:
        """Measure what has not been measured yet.

        Raises:
            SmeltError: a checkpoint gives NaN, or a measurement fails.
            RuntimeProblem: the runtime cannot serve a checkpoint.
        """
        if not self._missing:
            return
        self._read_texts()
        for subject in self._subjects:
            self._serve(subject)
        self._time()
        for subject in self._drafted:
            self._draft(subject)

    def report(self, *, interrupted: bool = False) -> ReportData:
        """The report so far.

        Args:
            interrupted: call it partial even if nothing is missing.
        """
        from ..reporting.verdict import verdict

        baseline = self._kept or next((r for r in self._results.values() if r.role == "baseline"), None)
        models = [] if baseline is None else [baseline]
        for result in self._results.values():
            if result.role == "baseline":
                continue
            beside: Against | None = None
            if baseline is not None:
                beside = against(baseline, result, self._machine, self._divergences.get(result.name))
                for sentence in incomparable(baseline, result, beside):
                    self.warn(sentence)
            models.append(result.model_copy(update={"against": beside}))
        if baseline is not None:
            models = [baseline, *self._guaranteed(baseline, models[1:])]
        missing = list(dict.fromkeys(self._missing.values()))
        known = ReportData(
            title=self._title,
            status="partial" if missing or interrupted else "complete",
            missing=missing,
            verdict="",
            machine=self._machine,
            versions=versions("lm-eval"),
            settings=self._settings.model_dump(mode="json"),
            models=models,
            warnings=list(self._warnings),
        )
        return known.model_copy(update={"verdict": verdict(known)})

    def _guaranteed(self, baseline: ModelResult, models: list[ModelResult]) -> list[ModelResult]:
        """Models with what is known of the claims on them."""
        known = guaranteed(baseline, models, [Guarantee.parse(each) for each in self._settings.guarantee])
        return [
            model.model_copy(update={"against": model.against.model_copy(update={"guarantees": known[model.name]})})
            if model.against is not None
            else model
            for model in models
        ]

    def _wanted(self) -> dict[tuple[str, ...], str]:
        """Everything to be measured, by kind and model, with its name in messages."""
        wanted: dict[tuple[str, ...], str] = {}
        for subject in self._subjects:
            name = subject.name
            if subject.reads:
                wanted["text", name] = f"the text read by {name}"
            if subject.only_text is None:
                for task in self._answered(subject):
                    wanted["task", name, task] = f"{task} answered by {name}"
                if self._settings.samples:
                    wanted["samples", name] = f"samples of {name}"
                if self._settings.speed:
                    wanted["speed", name] = f"the speed of {name}"
        for subject in self._drafted:
            wanted["drafts", subject.name] = f"{subject.name} with drafts"
        return wanted

    def _have(self, what: tuple[str, ...], **changes: Any) -> None:
        name = what[1]
        self._results[name] = self._results[name].model_copy(update=changes)
        self._missing.pop(what, None)

    def warn(self, sentence: str) -> None:
        """Add a sentence to the report, once."""
        if sentence not in self._warnings:
            self._warnings.append(sentence)

    def _answered(self, subject: Subject) -> list[str]:
        """The tasks that can be measured with it."""
        if self._tasks is None:
            return []
        scored = () if subject.reads else self._tasks.scored()
        return [task for task in self._tasks.loaded if task not in scored]

    # Texts

    def _read_texts(self) -> None:
        subjects = [s for s in self._subjects if s.reads]
        if not subjects:
            return
        baseline = next((s for s in subjects if s.role == "baseline"), None)
        others = [s for s in subjects if s is not baseline]
        with _Readings(self._directory, self._settings, self._progress) as readings:
            first = baseline or others[0]
            excerpt = self._cut(first)
            if baseline is None or not others:
                self._read_alone(first, excerpt, readings)
                others = [s for s in others if s is not first]
            for subject in others:
                own = self._cut(subject)
                if own.windows.fingerprint != excerpt.windows.fingerprint:
                    own = self._cut(subject, like=excerpt)
                alike = own.windows.fingerprint == excerpt.windows.fingerprint
                if baseline is not None and alike and subject.server is None:
                    self._read_beside(baseline, subject, own, readings)
                    continue
                self._read_alone(subject, own, readings)
                if not alike:
                    self.warn(
                        f"{subject.name} and {first.name} tokenize text differently: their perplexities cannot be compared,"
                        f" bits per byte can (over {sum(own.bytes)} and {sum(excerpt.bytes)} bytes of the same text)"
                    )
            if baseline is not None and ("text", baseline.name) in self._missing:
                self._read_alone(baseline, excerpt, readings)

    def _cut(self, subject: Subject, like: Excerpt | None = None) -> Excerpt:
        e = self._settings
        excerpt = Excerpt.cut(e.source(), subject.tokenizer, e.windows, e.length, like=like)
        known = subject.directory.config_data().get("vocab_size")
        largest = int(excerpt.windows.tokens.max())
        if isinstance(known, int) and largest >= known:
            raise SmeltError(
                f"{subject.name}: its tokenizer produces token id {largest}, but the model has only {known} tokens; the tokenizer belongs to"
                " another model"
            )
        return excerpt

    def _read_alone(self, subject: Subject, excerpt: Excerpt, readings: _Readings) -> None:
        def measure() -> dict[str, Any]:
            if subject.server is not None:
                return subject.server.likelihood(excerpt, self._progress).model_dump(mode="json")
            reading = readings.of(subject, excerpt)
            try:
                return likelihood(reading, subject.name).model_dump(mode="json")
            finally:
                readings.forget(subject)

        found = self._journal.keep(self._key("text", subject, excerpt), measure)
        self._have(("text", subject.name), text=Text.model_validate(found))

    def _read_beside(self, baseline: Subject, subject: Subject, excerpt: Excerpt, readings: _Readings) -> None:
        def measure() -> dict[str, Any]:
            before = readings.of(baseline, excerpt)
            after = readings.of(subject, excerpt)
            try:
                texts = divergence(before, after, (baseline.name, subject.name))
            finally:
                readings.forget(subject)
            apart = None if texts[2] is None else dataclasses.asdict(texts[2])
            return {
                "baseline": texts[0].model_dump(mode="json"),
                "model": texts[1].model_dump(mode="json"),
                "divergence": apart,
            }

        key = self._key("text", subject, excerpt) | {"baseline": [baseline.fingerprint, baseline.companions]}
        found = self._journal.keep(key, measure)
        self._have(("text", baseline.name), text=Text.model_validate(found["baseline"]))
        self._have(("text", subject.name), text=Text.model_validate(found["model"]))
        if found["divergence"] is not None:
            self._divergences[subject.name] = Divergence(**found["divergence"])

    # What needs an engine

    def _serve(self, subject: Subject) -> None:
        if subject.only_text is not None:
            return
        with _Served(subject, self._settings, self._progress) as served:
            for task in self._answered(subject):
                self._answer(subject, served, task)
            if self._tasks is not None:
                found = self._results[subject.name].tasks
                ahead = self._tasks.of_groups(found)
                self._results[subject.name] = self._results[subject.name].model_copy(update={"tasks": ahead + found})
            if self._settings.samples:
                beginnings = prompts(TextSource("builtin", "evaluation"), self._settings.samples)
                found = self._journal.keep(
                    self._key("samples", subject) | {"prompts": beginnings},
                    lambda: [sample.model_dump(mode="json") for sample in served.continuations(beginnings)],
                )
                self._have(("samples", subject.name), samples=[Sample.model_validate(each) for each in found])

    def _answer(self, subject: Subject, served: _Served, task: str) -> None:
        assert self._tasks is not None
        tasks, settings = self._tasks, self._settings
        key = self._key("task", subject) | {
            "task": task,
            "defined": tasks.digests[task],
            "limit": settings.limit,
            "fewshot": settings.fewshot,
        }

        def measure() -> list[dict[str, Any]]:
            self._progress.say(f"{subject.name} answers {task}")
            try:
                results = tasks.run(task, served.harness, settings.limit, settings.fewshot)
            except SmeltError as problem:
                raise SmeltError(f"{task} answered by {subject.name}: {problem}") from None
            except Exception as error:  # tasks run code of many authors
                first = " ".join(str(error).split())[:300]
                raise SmeltError(
                    f"{task} answered by {subject.name}: the task failed ({type(error).__name__}: {first}); remove it or"
                    " fix its definition"
                ) from error
            return [result.model_dump(mode="json") for result in results]

        found = [
            TaskResult.model_validate(each).model_copy(update={"group": tasks.group_of(task)})
            for each in self._journal.keep(key, measure)
        ]
        self._have(("task", subject.name, task), tasks=[*self._results[subject.name].tasks, *found])

    # Speed

    def _time(self) -> None:
        settings = self._settings.speed
        subjects = [subject for subject in self._subjects if subject.only_text is None]
        if not settings or not subjects:
            return

        def measure() -> dict[str, Any]:
            here, servers = [s for s in subjects if s.server is None], [s.server for s in subjects if s.server]
            trust = any(s.directory.trust_remote_code for s in here)
            speeds, rates = measure_speed(
                [MeasuredCheckpoint(s.name, s.directory.path, s.bytes) for s in here],
                settings,
                self._progress,
                servers=servers,
                engine=self._settings.engine(trust_remote_code=trust),
            )
            return {
                "day": datetime.now(UTC).date().isoformat(),
                "speeds": [speed.model_dump(mode="json") for speed in speeds],
                "rates": None if rates is None else dataclasses.asdict(rates),
                "notes": [note for server in servers for note in server.notes],
            }

        key = {
            "what": "speed",
            "models": [[subject.fingerprint, subject.companions] for subject in subjects],
            "settings": settings.model_dump(mode="json"),
            "ranks": [self._settings.tp, self._settings.pp],
            "machine": self._machine_as_found,
            "versions": versions(),
        }
        found = self._journal.keep(key, measure)
        for note in found.get("notes", ()):
            self.warn(note)
        changes: dict[str, Any] = {"measured_on": found["day"]}
        if found["rates"] is not None:
            rates = MachineRates(**found["rates"])
            changes |= {
                "read_bytes_per_second": rates.read,
                "operations_per_second": rates.operations,
                "operations_dtype": rates.dtype,
            }
        self._machine = self._machine.model_copy(update=changes)
        for subject, speed in zip(subjects, found["speeds"], strict=True):
            self._have(("speed", subject.name), speed=Speed.model_validate(speed))
        if len(subjects) > 1 and not all(r.speed.interleaved for r in self._results.values() if r.speed):
            self.warn("speed was measured one model after another, because they do not fit in memory together")

    @property
    def _drafted(self) -> list[Subject]:
        if self._drafter is None or not self._settings.speed:
            return []
        return self._drafter.drafts_for(self._subjects)

    def _draft(self, subject: Subject) -> None:
        drafter, settings = self._drafter, self._settings.speed
        assert drafter is not None
        assert settings

        def measure() -> dict[str, Any]:
            engine = self._settings.engine(trust_remote_code=subject.directory.trust_remote_code)
            found = measure_drafts(subject, drafter, settings, self._settings.source(), engine, self._progress)
            return found.model_dump(mode="json")

        key = self._key("drafts", subject) | {
            "drafter": drafter.identity,
            "settings": settings.model_dump(mode="json"),
            "text": dataclasses.asdict(self._settings.source()),
            "machine": self._machine_as_found,
        }
        try:
            found = DraftedSpeed.model_validate(self._journal.keep(key, measure))
        except SmeltError as error:  # one model that a drafter does not fit leaves the others' measurements
            self.warn(f"{subject.name} was not measured with drafts: {error}")
            self._have(("drafts", subject.name))
            return
        self._have(("drafts", subject.name), drafts=found)

    def _key(self, what: str, subject: Subject, excerpt: Excerpt | None = None) -> dict[str, Any]:
        """Everything that determines a measurement."""
        key: dict[str, Any] = {
            "what": what,
            "model": subject.fingerprint,
            "companions": subject.companions,
            "streamed": subject.open_reader is not None,
            "device": self._machine.device,
            "ranks": [self._settings.tp, self._settings.pp],
            "versions": versions("lm-eval"),
        }
        return key if excerpt is None else key | {"text": excerpt.windows.fingerprint, "source": excerpt.source}


class _Readings:
    """Readings of an excerpt, by subject, so that a baseline reads it once for all."""

    def __init__(self, directory: Path, settings: Evaluate, progress: Progress) -> None:
        self._directory, self._settings, self._progress = directory, settings, progress
        self._of: dict[str, Reading] = {}

    def of(self, subject: Subject, excerpt: Excerpt) -> Reading:
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
        self._of.pop(subject.name).close()

    def __enter__(self) -> _Readings:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as closing:
            for reading in self._of.values():
                closing.callback(reading.close)


class _Served:
    """An engine for a subject, loaded on first use; or the server that it is behind."""

    def __init__(self, subject: Subject, settings: Evaluate, progress: Progress) -> None:
        self._subject, self._settings, self._progress = subject, settings, progress
        self._engine: Engine | None = None
        self._harness: Any = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._progress.say(f"loading {self._subject.name}")
            directory = self._subject.directory
            config = self._settings.engine(trust_remote_code=directory.trust_remote_code)
            self._engine = Engine(directory.path, config, max_sequences=_SEQUENCES)
        return self._engine

    @property
    def harness(self) -> Any:
        quiet = not self._progress.enabled
        if self._harness is None and self._subject.server is not None:
            from .scoring.server_lm import ServerLM

            self._harness = ServerLM(self._subject.server, disable_tqdm=quiet)
        elif self._harness is None:
            from ..integrations.lm_eval import SmeltLM

            self._harness = SmeltLM(engine=self.engine, disable_tqdm=quiet)
        return self._harness

    def continuations(self, beginnings: list[str]) -> list[Sample]:
        server = self._subject.server
        if server is not None:
            return server.continuations(beginnings)
        return continuations(self.engine, beginnings, self._subject.name)

    def __enter__(self) -> _Served:
        return self

    def __exit__(self, *error: object) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._harness = None
        give_back(device_named(self._settings.device))
