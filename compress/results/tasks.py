"""A model's tasks as reports show them: one metric of each, and how it changed."""

from __future__ import annotations

from .result import ModelResult, TaskChange, TaskResult


def primary_tasks(model: ModelResult, *, with_members: bool = False) -> list[tuple[TaskResult, TaskChange | None]]:
    """The primary metric of each task, and how it changed.

    That is the first for which more is better, or else the first. Tasks of a group are represented by the group,
    unless ``with_members``.
    """
    chosen: dict[str, TaskResult] = {}
    for result in model.tasks:
        if result.group is not None and not with_members:
            continue
        present = chosen.setdefault(result.task, result)
        if result.higher_is_better and not present.higher_is_better:
            chosen[result.task] = result
    changes = {(c.task, c.metric, c.filter): c for c in (model.against.tasks if model.against else [])}
    return [(result, changes.get((result.task, result.metric, result.filter))) for result in chosen.values()]


def is_worse(result: TaskResult, change: TaskChange) -> bool:
    """Whether a task's metric went the wrong way, beyond noise."""
    return bool(change.significant) and (change.difference < 0) == result.higher_is_better
