"""Measure and compare checkpoints: text, tasks, samples, speed; finished measurements are kept and reused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...models.text.text_source import TextSource
from ...system.errors import RuntimeProblem, SmeltError, in_one_line
from ...system.progress import Progress
from ...system.versions import versions
from ..results.report import ReportData
from ..results.result import Against, DraftedSpeed, Machine, ModelResult, Sample, Speed, TaskResult, Text
from ..results.this_machine import this_machine
from .against import against, incomparable
from .drafts import EvaluatedDrafter, measure_drafts
from .early_stop import FIRST, parts
from .guarantee import Guarantee, guaranteed, planned
from .journal import Journal
from .opened import Engines, Readings
from .scoring.samples import prompts
from .scoring.tasks import Tasks
from .scoring.text import Divergence, Excerpt, TextsCompared, divergence, likelihood
from .settings import Evaluate
from .speed import MachineRates, MeasuredCheckpoint, measure_speed
from .subject import Subject


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
        self._guarantees = [Guarantee.parse(each) for each in settings.guarantee]
        candidates = sum(subject.role == "candidate" for subject in self._subjects)
        names = [] if tasks is None else [*tasks.loaded, *tasks.groups]
        self._planned = planned(self._guarantees, names, candidates)
        self._missing = self._wanted() if wanted else {}

    def run(self) -> None:
        """Measure what has not been measured yet.

        Raises:
            SmeltError: a checkpoint gives NaN, or a measurement fails.
            RuntimeProblem: the runtime cannot serve a checkpoint.
        """
        if not self._missing:
            return
        self._warn_of_torch()
        self._read_texts()
        with Engines(self._subjects, self._settings, self._progress) as engines:
            self._settle(engines)
            for subject in self._subjects:
                self._serve(subject, engines)
                engines.forget(subject)
        self._time()
        for subject in self._drafted:
            self._draft(subject)

    def _warn_of_torch(self) -> None:
        """Say it if what is measured is not Smelt's kernels: processes that time say nothing themselves."""
        if self._settings.device != "cpu" or all(subject.server is not None for subject in self._subjects):
            return
        from ...runtime.native.library import kernels

        said: list[str] = []

        def log(sentence: str) -> None:
            said.append(sentence)
            self._progress.say(sentence)

        if kernels(log) is None:
            self.warn(said[-1])

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
        if any(
            part.of is not None for model in models for part in [*model.tasks, *([model.text] if model.text else [])]
        ):
            self.warn(
                "where measuring stopped early, values and their intervals lean towards what became certain; the bounds of guarantees do not"
            )
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
        kl = {name: divergence.kl for name, divergence in self._divergences.items()}
        known = guaranteed(baseline, models, self._guarantees, kl=kl, planned=self._planned)
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
        with Readings(self._directory, self._settings, self._progress) as readings:
            first = baseline or others[0]
            excerpt = self._cut(first)
            if len(excerpt.bytes) < self._settings.windows:
                count, asked = len(excerpt.bytes), self._settings.windows
                self.warn(
                    f"{excerpt.source} has {count} window{'s' * (count > 1)} of {self._settings.length} tokens, and windows is {asked}"
                )
            if baseline is not None and self._is_read_in_parts(excerpt, others):
                self._read_in_parts(baseline, others, excerpt)
                return
            if baseline is None or not others:
                self._read_alone(first, excerpt, readings)
                others = [s for s in others if s is not first]
            for subject in others:
                own = self._cut(subject)
                if own.windows.fingerprint != excerpt.windows.fingerprint:
                    own = self._cut(subject, like=excerpt)
                alike = own.windows.fingerprint == excerpt.windows.fingerprint
                if baseline is not None and alike and subject.server is None:
                    self._have_texts(baseline, subject, self._compared(baseline, subject, own, readings))
                    continue
                self._read_alone(subject, own, readings)
                if not alike:
                    self.warn(
                        f"{subject.name} and {first.name} tokenize text differently: their perplexities cannot be compared,"
                        f" bits per byte can (over {sum(own.bytes)} and {sum(excerpt.bytes)} bytes of the same text)"
                    )
            if baseline is not None and ("text", baseline.name) in self._missing:
                self._read_alone(baseline, excerpt, readings)

    def _is_read_in_parts(self, excerpt: Excerpt, others: Sequence[Subject]) -> bool:
        return (
            any(claim.is_about_text for claim in self._guarantees)
            and len(excerpt.bytes) > FIRST
            and bool(others)
            and all(each.server is None for each in others)
            and all(self._cut(each).windows.fingerprint == excerpt.windows.fingerprint for each in others)
        )

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

    def _read_alone(self, subject: Subject, excerpt: Excerpt, readings: Readings) -> None:
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

    def _have_texts(self, baseline: Subject, subject: Subject, found: TextsCompared) -> None:
        self._have(("text", baseline.name), text=found.baseline)
        self._have(("text", subject.name), text=found.model)
        if found.divergence is not None:
            self._divergences[subject.name] = found.divergence

    def _compared(self, baseline: Subject, subject: Subject, excerpt: Excerpt, readings: Readings) -> TextsCompared:
        def measure() -> dict[str, Any]:
            before = readings.of(baseline, excerpt)
            after = readings.of(subject, excerpt)
            try:
                found = TextsCompared(*divergence(before, after, (baseline.name, subject.name)))
            finally:
                readings.forget(subject)
            return found.as_data()

        key = self._key("text", subject, excerpt) | {"baseline": [baseline.fingerprint, baseline.companions]}
        return TextsCompared.of_data(self._journal.keep(key, measure))

    def _read_in_parts(self, baseline: Subject, others: Sequence[Subject], excerpt: Excerpt) -> None:
        """Read windows in random order until what is claimed of how they are predicted is known."""
        so_far: dict[str, TextsCompared] = {}
        read: list[int] = []
        count = len(excerpt.bytes)
        for numbers in parts(count):
            read += numbers
            chosen, together = excerpt.chosen(numbers), excerpt.chosen(read)
            with Readings(self._directory, self._settings, self._progress) as readings:
                for subject in others:
                    more = self._compared(baseline, subject, chosen, readings)
                    before = so_far.get(subject.name)
                    so_far[subject.name] = more if before is None else before.and_then(more, together)
            if len(read) == count:
                so_far = {name: each.in_order(read, excerpt) for name, each in so_far.items()}
                break
            models = [self._results[name].model_copy(update={"text": each.model}) for name, each in so_far.items()]
            base = self._results[baseline.name].model_copy(update={"text": so_far[others[0].name].baseline})
            kl = {name: each.divergence.kl for name, each in so_far.items() if each.divergence is not None}
            claims = [claim for claim in self._guarantees if claim.is_about_text]
            known = guaranteed(base, models, claims, kl=kl, planned=self._planned)
            verdicts = [each.verdict for of_model in known.values() for each in of_model]
            # A claim that cannot be made, such as on the divergence of other vocabularies, leaves all to be read.
            if len(verdicts) == len(claims) * len(models) and "undecided" not in verdicts:
                so_far = {name: each.stopped(count) for name, each in so_far.items()}
                break
        for subject in others:
            self._have_texts(baseline, subject, so_far[subject.name])

    # What needs an engine

    def _serve(self, subject: Subject, engines: Engines) -> None:
        if subject.only_text is not None:
            return
        for task in self._answered(subject):
            if ("task", subject.name, task) in self._missing:
                self._have_task(subject, task, self._answer(subject, engines, task))
        if self._tasks is not None:
            in_order = list(self._tasks.loaded)
            found = sorted(self._results[subject.name].tasks, key=lambda result: in_order.index(result.task))
            ahead = self._tasks.of_groups(found)
            self._results[subject.name] = self._results[subject.name].model_copy(update={"tasks": ahead + found})
        if self._settings.samples:
            beginnings = prompts(TextSource("builtin", "evaluation"), self._settings.samples)
            found = self._journal.keep(
                self._key("samples", subject) | {"prompts": beginnings},
                lambda: [sample.model_dump(mode="json") for sample in engines.of(subject).continuations(beginnings)],
            )
            self._have(("samples", subject.name), samples=[Sample.model_validate(each) for each in found])

    def _settle(self, engines: Engines) -> None:
        """Let all models answer a task that is claimed something about by turns, until it is known."""
        baseline = next((s for s in self._subjects if s.role == "baseline"), None)
        if baseline is None or self._tasks is None:
            return
        for task in self._tasks.loaded:
            answering = [s for s in self._subjects if s.only_text is None and task in self._answered(s)]
            claimed = any(claim.is_about(task) for claim in self._guarantees)
            if claimed and baseline in answering and len(answering) > 1:
                self._settle_task(task, baseline, answering, engines)

    def _settle_task(self, task: str, baseline: Subject, answering: list[Subject], engines: Engines) -> None:
        assert self._tasks is not None
        count = self._tasks.count(task, self._settings.limit)
        so_far: dict[str, list[TaskResult]] = {}
        answered: list[int] = []
        for items in parts(count):
            answered += items
            for subject in answering:
                more = self._answer(subject, engines, task, items)
                before = so_far.get(subject.name, [])
                so_far[subject.name] = self._tasks.together(task, before, more) if before else more
            alone = {name: self._results[name].model_copy(update={"tasks": found}) for name, found in so_far.items()}
            others = [model for name, model in alone.items() if name != baseline.name]
            known = guaranteed(alone[baseline.name], others, self._guarantees, planned=self._planned)
            verdicts = [each.verdict for of_model in known.values() for each in of_model if each.what == task]
            if not verdicts:
                return  # its items are neither right nor wrong: nothing can be claimed of it, and all of it is measured
            if "undecided" not in verdicts:
                break
        for subject in answering:
            found = so_far[subject.name]
            of = count if len(answered) < count else None
            self._have_task(subject, task, self._tasks.in_order(found, answered, of))

    def _have_task(self, subject: Subject, task: str, found: list[TaskResult]) -> None:
        self._have(("task", subject.name, task), tasks=[*self._results[subject.name].tasks, *found])

    def _answer(
        self, subject: Subject, engines: Engines, task: str, items: list[int] | None = None
    ) -> list[TaskResult]:
        """A task's metrics, or those of some of its items."""
        assert self._tasks is not None
        tasks, settings = self._tasks, self._settings
        key = self._key("task", subject) | {
            "task": task,
            "defined": [tasks.definitions[task], tasks.data[task]],
            "limit": settings.limit,
            "fewshot": settings.fewshot,
            **({} if items is None else {"items": items}),
        }

        def measure() -> list[dict[str, Any]]:
            self._progress.say(f"{subject.name} answers {task}")
            try:
                harness = engines.of(subject).harness
                results = tasks.run(task, harness, settings.limit, items)
            except SmeltError as problem:
                kind = RuntimeProblem if isinstance(problem, RuntimeProblem) else SmeltError
                raise kind(f"{task} answered by {subject.name}: {problem}") from None
            except Exception as error:  # tasks run code of many authors
                raise SmeltError(
                    f"{task} answered by {subject.name}: the task failed ({type(error).__name__}: {in_one_line(error)});"
                    " remove it or fix its definition"
                ) from error
            return [result.model_dump(mode="json") for result in results]

        return [
            TaskResult.model_validate(each).model_copy(update={"group": tasks.group_of(task)})
            for each in self._journal.keep(key, measure)
        ]

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
            # Servers of the same model are not as fast as each other.
            "models": [
                [s.fingerprint, s.companions, *([] if s.server is None else [s.server.info.url])] for s in subjects
            ],
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
            "text": [dataclasses.asdict(self._settings.source()), self._settings.source().beginning_digest()],
            "machine": self._machine_as_found,
        }
        try:
            found = DraftedSpeed.model_validate(self._journal.keep(key, measure))
        except SmeltError as error:  # one model that a drafter does not fit leaves the others' measurements
            self.warn(f"{subject.name} was not measured with drafts: {error}")
            self._have(("drafts", subject.name))
            return
        self._have(("drafts", subject.name), drafts=found.model_copy(update={"drafter": drafter.name}))

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
        if excerpt is None:
            return key
        return key | {
            "text": excerpt.windows.fingerprint, "source": excerpt.source, "bytes": sum(excerpt.bytes),
        }  # fmt: skip
