"""lm-eval's tasks: finding them, reporting their problems early, running them on the engine."""

from __future__ import annotations

import io
import logging
import math
import numbers
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ....system.errors import SmeltError, in_one_line, nearest_name
from ....system.storage.digests import digest
from ....system.storage.paths import named_path
from ...results.result import TaskResult
from ...results.statistics import Interval, mean_interval, resampled_interval, share_interval
from .aggregations import Aggregate, is_right_or_wrong, mean, name_of
from .task_code import BUILTIN, UntrustedCodeError, only_shipped_code, sandbox_templates
from .task_definition import definition_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tasks:
    """Tasks that were found, with their data.

    Attributes:
        loaded: lm-eval's tasks by name.
        groups: lm-eval's groups that were asked for, by name; their tasks are among ``loaded``.
        alone: tasks that were asked for individually.
        definitions: identifies each task's definition, without its items.
        data: identifies each task's items.
        trust_code: whether their own Python code may run, and what a model writes if they ask for that.
    """

    loaded: dict[str, Any]
    groups: dict[str, Any]
    alone: frozenset[str]
    definitions: dict[str, str]
    data: dict[str, str]
    trust_code: bool = False

    @classmethod
    def find(cls, names: list[str], *, trust_code: bool = False, fewshot: int | None = None) -> Tasks:
        """Load tasks and their data.

        Args:
            names: lm-eval's names, groups and tags, ours, or paths of YAML files.
            trust_code: run Python code named by the YAML files; that of tasks shipped with lm-eval or Smelt always runs.
            fewshot: examples in each prompt, instead of the tasks' own numbers.

        Raises:
            SmeltError: one line for each name that is unknown, would run Python code, or has no data.
        """
        sandbox_templates()
        if trust_code:  # the metric of tasks that run what models write asks for it as it is imported
            os.environ.setdefault("HF_ALLOW_CODE_EVAL", "1")
        scripts = not any(map(_is_file, names))
        manager = _manager(names)
        loaded: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        alone: set[str] = set()
        problems = []
        for name in names:
            problem = _unknown(manager, name)
            if problem is None:
                try:
                    with _quiet(), _seeded(), nullcontext() if trust_code else only_shipped_code(scripts=scripts):
                        found = manager.load([_spec(name)])
                        problem = _empty(name, found["tasks"]) or _twice(name, found["tasks"], loaded)
                    if problem is None and not trust_code:
                        problem = _unsafe(found["tasks"])
                    loaded |= found["tasks"]
                    groups |= found.get("groups", {})
                    alone |= set() if found.get("groups") else set(found["tasks"])
                except UntrustedCodeError as error:
                    problem = (
                        f"{name}: runs Python code, {error}, which is off by default; review it, then set"
                        " trust_task_code: true in evaluate, or pass --trust-task-code"
                    )
                except Exception as error:  # tasks run third-party code and download data with many libraries
                    problem = _unusable(manager, name, error)
            if problem is not None:
                problems.append(f"tasks: {problem}")
        if problems:
            raise SmeltError("\n".join(problems))
        for task in loaded.values():
            if fewshot is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=fewshot)
        data = {name: _items(task) for name, task in loaded.items()}
        definitions = {name: definition_of(task) for name, task in loaded.items()}
        return cls(loaded, groups, frozenset(alone), definitions, data, trust_code)

    @property
    def valued_groups(self) -> list[str]:
        """Groups that have values of their own."""
        return [name for name, group in self.groups.items() if group.aggregate_metric_list]

    def group_of(self, name: str) -> str | None:
        """The group that a task was requested through, if the group has its own value."""
        if name in self.alone:
            return None
        for group_name, group in self.groups.items():
            if group.aggregate_metric_list and name in (task.task_name for task in group.get_all_tasks()):
                return str(group_name)
        return None

    def longest_answer(self, name: str) -> int | None:
        """The most tokens that a task generates; None if it only scores."""
        settings = self.generation(name)
        return None if settings is None else int(settings["max_gen_toks"])

    def generation(self, name: str) -> dict[str, Any] | None:
        """How a task generates; None if it only scores."""
        from lm_eval.models.utils import normalize_gen_kwargs

        task = self.loaded[name]
        if task.OUTPUT_TYPE != "generate_until":
            return None
        return dict(normalize_gen_kwargs(dict(task.get_config("generation_kwargs") or {})))

    def scored(self) -> list[str]:
        """The tasks that need log probabilities of given texts."""
        return [name for name, task in self.loaded.items() if task.OUTPUT_TYPE != "generate_until"]

    def of_groups(self, results: list[TaskResult]) -> list[TaskResult]:
        """The groups' values, from those of their tasks.

        Args:
            results: of all tasks.
        """
        found = []
        answered = {result.task for result in results}
        for name, group in self.groups.items():
            members = [task.task_name for task in group.get_all_tasks()]
            for config in group.aggregate_metric_list or []:
                of_metric = [r for r in results if r.task in members and r.metric == config.metric]
                for used_filter in config.filter_list or dict.fromkeys(r.filter for r in of_metric):
                    parts = [r for r in of_metric if r.filter == used_filter]
                    # Means only: other aggregations are not sums over items.
                    # A part that was stopped early counts for fewer items than it has.
                    whole = all(part.aggregation == "mean" and part.of is None for part in parts)
                    # As in lm-eval, of those that have the metric.
                    if parts and whole and answered.issuperset(members):
                        found.append(_of_group(name, str(group.version), parts, bool(config.weight_by_size)))
        return found

    def count(self, name: str, limit: int | None) -> int:
        """How many items a task has.

        Args:
            name: of the task.
            limit: how many are answered at most.
        """
        return min(len(self.loaded[name].eval_docs), limit or sys.maxsize)

    def together(self, name: str, first: list[TaskResult], more: list[TaskResult]) -> list[TaskResult]:
        """A task's metrics over the items of two parts, those of the first part first.

        Args:
            name: of the task.
            first, more: the parts' metrics.
        """
        found = []
        ours, theirs = ({(each.metric, each.filter): each for each in part} for part in (first, more))
        for key in dict.fromkeys([*ours, *theirs]):
            one, other = ours.get(key), theirs.get(key)
            some = one or other
            assert some is not None
            # A metric that some items lack may be in one part only.
            joined = some if one is None or other is None else self._over(name, one, [*one.by_item, *other.by_item])
            data = [None if each is None else each.data for each in (one, other)]
            found.append(joined.model_copy(update={"data": data[0] if data[0] == data[1] else digest(data)}))
        return found

    def in_order(self, results: list[TaskResult], items: list[int], of: int | None) -> list[TaskResult]:
        """Metrics of all items in the task's order; or, if ``of`` says that there are more, as they were answered.

        Args:
            results: of one task.
            items: the numbers of the items, as they were answered.
            of: how many items there are, if these are fewer.
        """
        if of is not None:
            return [result.model_copy(update={"of": of}) for result in results]
        places = [place for _, place in sorted((item, place) for place, item in enumerate(items))]
        return [
            # A metric that some items lack stays as they were answered.
            self._over(each.task, each, [each.by_item[i] for i in places]) if len(each.by_item) == len(places) else each
            for each in results
        ]

    def _over(self, name: str, result: TaskResult, by_item: list[Any]) -> TaskResult:
        aggregate = self.loaded[name].aggregation().get(result.metric, mean)
        changes = {
            "by_item": by_item,
            "items": len(by_item),
            "value": float(aggregate(by_item)),
            "interval": _interval(by_item, aggregate),
        }
        return result.model_copy(update=changes)

    def run(self, name: str, model: Any, limit: int | None, items: list[int] | None = None) -> list[TaskResult]:
        """One task's metrics.

        Args:
            name: of the task, a key of :attr:`loaded`.
            model: lm-eval's model.
            limit: maximum number of items.
            items: the numbers of those to be answered, ascending; all if None. They have the examples that they have among all.
        """
        from lm_eval import evaluator

        task = self.loaded[name]
        task.set_fewshot_seed(seed=1234)
        with _quiet(), nullcontext() if items is None else _drawing_for_all(task, items):
            found: Any = evaluator.evaluate(
                lm=model,
                task_dict={"tasks": {name: task}, "groups": {}},
                limit=None if items else limit,
                samples={name: items} if items else None,
                bootstrap_iters=0,
                log_samples=True,
                confirm_run_unsafe_code=self.trust_code,
            )
        samples = found["samples"][name]
        results = []
        for key, value in found["results"][name].items():
            metric, comma, used_filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, numbers.Real):
                continue
            logged = sorted((s for s in samples if s["filter"] == used_filter), key=lambda sample: sample["doc_id"])
            # Some tasks' metrics are of some items only: they leave the others out, or give them NaN.
            having = [
                s for s in logged if metric in s["metrics"] and all(map(math.isfinite, _numbers(_plain(s[metric]))))
            ]
            by_item = [_plain(sample[metric]) for sample in having]
            if not by_item or not math.isfinite(value):
                _LOG.warning("%s: its metric %s is not a number for these items, so it is left out", name, metric)
                continue
            # What is compared with it must be of the same ones.
            data = self.data[name]
            if len(having) < len(logged):
                data = digest([data, [sample["doc_id"] for sample in having]])
            aggregate = task.aggregation().get(metric, mean)
            results.append(
                TaskResult(
                    task=name,
                    metric=metric,
                    filter=used_filter,
                    value=float(value),
                    interval=_interval(by_item, aggregate),
                    higher_is_better=bool(task.higher_is_better().get(metric, True)),
                    aggregation=name_of(aggregate),
                    items=len(by_item),
                    by_item=by_item,
                    fewshot=int(found["n-shot"].get(name) or 0),
                    version=str(found["versions"].get(name)),
                    data=data,
                    definition=self.definitions[name],
                )
            )
        if not results:
            raise SmeltError("none of its metrics gave a number for these items; fix the task or remove it")
        return results


def _of_group(name: str, version: str, parts: list[TaskResult], by_size: bool) -> TaskResult:
    by_item = [value for part in parts for value in part.by_item]
    pooled = by_size or len({part.items for part in parts}) == 1
    value = math.fsum(by_item) / len(by_item) if pooled else math.fsum(part.value for part in parts) / len(parts)
    return TaskResult(
        task=name,
        metric=parts[0].metric,
        filter=parts[0].filter,
        value=value,
        interval=_interval(by_item, mean) if pooled else None,
        higher_is_better=parts[0].higher_is_better,
        aggregation="mean" if pooled else "mean of tasks",
        items=len(by_item),
        by_item=by_item if pooled else [],
        fewshot=parts[0].fewshot,
        version=version,
    )


def _interval(by_item: list[Any], aggregate: Aggregate) -> Interval | None:
    is_mean = name_of(aggregate) == "mean"
    if is_mean and is_right_or_wrong(by_item):
        return share_interval(sum(by_item), len(by_item))
    if is_mean and all(isinstance(value, (int, float)) for value in by_item):
        return mean_interval(by_item)
    return resampled_interval(by_item, aggregate)


def _manager(names: list[str]) -> Any:
    from lm_eval.tasks import TaskManager

    included: list[str | Path] = [BUILTIN, *_group_folders(names)]
    with _quiet():
        ours = TaskManager(include_path=included, include_defaults=False)
        # Indexing lm-eval's own tasks takes ten seconds, so it is done only if one is asked for.
        if all(name.endswith((".yaml", ".yml")) or name in ours.task_index for name in names):
            return ours
        return TaskManager(include_path=included)


def _group_folders(names: list[str]) -> list[Path]:
    """Folders of group files; an unreadable file is reported when it is loaded."""
    found = []
    for name in names:
        if _is_file(name):
            with suppress(Exception):
                found += [Path(name).resolve().parent] if _group_in(name) else []
    return found


def _unknown(manager: Any, name: str) -> str | None:
    if _is_file(name) or name in manager.task_index:
        return None
    if name.endswith((".yaml", ".yml")):
        return f"{name}: file not found; check the path"
    close = get_close_matches(name, list(manager.task_index), n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{name!r} is neither an lm-eval task nor a YAML file{hint or ';'} `lm_eval ls tasks` lists all"


@contextmanager
def _drawing_for_all(task: Any, items: list[int]) -> Iterator[None]:
    """Within it the examples of skipped items are drawn, too: lm-eval draws those of one item after the other."""
    if not task.get_config("num_fewshot"):
        yield
        return
    build, wanted, drawn = task.fewshot_context, iter(sorted(items)), 0
    docs = task.eval_docs  # which some tasks make anew each time

    def context(doc: Any, **how: Any) -> Any:
        nonlocal drawn
        item = next(wanted)
        for skipped in range(drawn, item):
            other = docs[skipped]
            build(other, **{**how, "gen_prefix": task.doc_to_prefix(other)})
        drawn = item + 1
        return build(doc, **how)

    task.fewshot_context = context
    try:
        yield
    finally:
        del task.fewshot_context


def _empty(name: str, tasks: dict[str, Any]) -> str | None:
    """A sentence if a task has no items; also catches a wrong split."""
    for task in tasks.values():
        if len(task.eval_docs) == 0:
            return f"{name}: its data set is empty; check its split and its data"
    return None


def _twice(name: str, tasks: dict[str, Any], loaded: dict[str, Any]) -> str | None:
    """A sentence if another file's task has the same name, which one of both would lose."""
    for task in tasks:
        before, now = (each.get(task) for each in (loaded, tasks))
        if before is not None and [definition_of(before), _items(before)] != [definition_of(now), _items(now)]:
            return f"{name}: its task {task!r} is called as another one that is asked for; rename one of them"
    return None


def _items(task: Any) -> str:
    """A digest of a task's items."""
    return digest([str(doc) for doc in task.eval_docs])


def _unsafe(tasks: dict[str, Any]) -> str | None:
    """A sentence if a task runs the code that models write."""
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            return (
                f"{name}: runs the code that the model writes, which is off by default; if this machine may run it, set"
                " trust_task_code: true in evaluate, or pass --trust-task-code"
            )
    return None


@contextmanager
def _seeded() -> Iterator[None]:
    """Sets the seeds that lm-eval's own command sets before loading tasks, as some shuffle."""
    import numpy
    import torch

    before = random.getstate(), numpy.random.get_state(), torch.random.get_rng_state()
    random.seed(0)
    numpy.random.seed(1234)
    torch.manual_seed(1234)
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.random.set_rng_state(before[2])


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in nested data."""
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, (int, float)):
        yield value


def _spec(name: str) -> str:
    """As lm-eval accepts it: a name or a task's path; for a group, whose path it rejects, the group's name."""
    if not _is_file(name):
        return name
    return _group_in(name) or str(Path(name).resolve())


def _group_in(path: str) -> str | None:
    """The name of the group that a file defines, if any."""
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(path, resolve_func=False)
    return str(config["group"]) if isinstance(config.get("task"), list) and "group" in config else None


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and named_path(name).is_file()


def _unusable(manager: Any, name: str, error: Exception) -> str:
    """One sentence: which data is missing and where to get it, or what else is wrong."""
    from lm_eval.tasks._yaml_loader import load_yaml

    config: dict[str, Any] = {}
    if _is_file(name):
        try:
            config = load_yaml(name, resolve_func=False)
        except Exception as broken:  # the YAML itself is what is wrong
            return f"{name}: cannot be read ({in_one_line(broken)})"
    else:
        entry = manager.task_index.get(name)
        if entry is not None and entry.yaml_path:
            config = load_yaml(entry.yaml_path, resolve_func=False)
    source = config.get("dataset_path")
    files = (config.get("dataset_kwargs") or {}).get("data_files")
    if files is not None:
        lost = [path for path in _paths(files) if "://" not in path and not Path(path).exists()]
        if lost:
            return f"{name}: its data file {lost[0]} was not found (from {Path.cwd()}); add it or correct the path"
    unknown = _unknown_metric(config)
    if unknown is not None:
        return f"{name}: {unknown}"
    if isinstance(error, KeyError):
        splits = [config.get(key) for key in ("test_split", "validation_split", "training_split") if config.get(key)]
        return f"{name}: cannot be loaded: there is no {error}; its splits are {', '.join(map(str, splits))}, which its data may lack"
    if isinstance(error, StopIteration):
        return f"{name}: its data set is empty; check its split and its data"
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{name}: its data file {error.filename} was not found; add it or correct the path"
    if source and source not in ("json", "csv", "text", "parquet") and not config.get("custom_dataset"):
        return (
            f"{name}: its data, the dataset {source!r} of the Hugging Face hub, is not on this machine and cannot be downloaded"
            f" ({in_one_line(error)}); with a network, run `hf download --repo-type dataset {source}` or this command once, or name a"
            " task whose YAML reads local files"
        )
    return f"{name}: cannot be loaded ({in_one_line(error)})"


def _unknown_metric(config: dict[str, Any]) -> str | None:
    """A sentence if a task names a metric that lm-eval does not have."""
    from lm_eval.api.registry import metric_registry

    known = list(metric_registry)
    for each in config.get("metric_list") or []:
        metric = each.get("metric") if isinstance(each, dict) else None
        if isinstance(metric, str) and metric not in known:
            return f"lm-eval has no metric {metric!r}{nearest_name(metric, known)}"
    return None


def _paths(files: Any) -> list[str]:
    if isinstance(files, dict):
        return [path for each in files.values() for path in _paths(each)]
    return [str(path) for path in files] if isinstance(files, list) else [str(files)]


def _plain(value: Any) -> Any:
    """As JSON stores it."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, bool):
        return int(value)
    if hasattr(value, "item"):
        value = value.item()
    return round(value, 6) if isinstance(value, float) else value


class _quiet:  # noqa: N801, reads as a statement
    """Silences the verbose logs of lm-eval and datasets."""

    def __enter__(self) -> None:
        import datasets

        self._caught = redirect_stderr(io.StringIO())
        self._caught.__enter__()
        self._loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "api.task", "evaluator")]
        self._levels = [logger.level for logger in self._loggers]
        for logger in self._loggers:
            logger.setLevel(logging.ERROR)
        self._bars = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()

    def __exit__(self, *error: object) -> None:
        import datasets

        self._caught.__exit__(None, None, None)
        for logger, level in zip(self._loggers, self._levels, strict=True):
            logger.setLevel(level)
        if self._bars:
            datasets.enable_progress_bars()
