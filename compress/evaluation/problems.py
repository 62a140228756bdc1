"""Problems that would make an evaluation fail, found before any work."""

from __future__ import annotations

from collections.abc import Sequence

from ...models.directory.directory import ModelDirectory
from ...runtime import RuntimeProblem
from ...system.device import device_named
from ...system.errors import Problem
from .settings import Evaluate
from .tasks import Tasks


def text_problems(settings: Evaluate, where: str = "evaluate.") -> list[Problem]:
    """Problems with the text that can be found without reading it."""
    sentence = settings.source().problem()
    return [Problem(f"{where}text", sentence)] if sentence else []


def device_problems(device: str, where: str = "evaluate.") -> list[Problem]:
    """A device that is unavailable."""
    try:
        device_named(device)
    except RuntimeProblem as problem:
        return [Problem(f"{where}device", str(problem))]
    return []


def task_problems(tasks: Tasks, models: Sequence[ModelDirectory], where: str = "evaluate.") -> list[Problem]:
    """Tasks whose generation leaves no room for a prompt in the context length."""
    problems = []
    for name in tasks.loaded:
        most = tasks.longest_answer(name)
        for model in models:
            context = model.config_data().get("max_position_embeddings")
            if most is not None and isinstance(context, int) and most >= context:
                problems.append(
                    Problem(
                        f"{where}tasks",
                        f"{name} generates up to {most} tokens, but the context length of {model.name} is {context}; set max_gen_toks in"
                        " the task's generation_kwargs",
                    )
                )
    return problems


def fewest_positions(models: Sequence[ModelDirectory]) -> int | None:
    """The shortest context length of the models; None if no model states one."""
    found = (model.config_data().get("max_position_embeddings") for model in models)
    return min((positions for positions in found if isinstance(positions, int)), default=None)


def length_problems(settings: Evaluate, models: Sequence[ModelDirectory], where: str = "evaluate.") -> list[Problem]:
    """Settings that exceed a model's context length."""
    problems = []
    for model in models:
        context = model.config_data().get("max_position_embeddings")
        if not isinstance(context, int):
            continue
        if settings.length > context:
            problems.append(
                Problem(
                    f"{where}length",
                    f"{settings.length} tokens exceed the context length of {model.name}; use at most {context}",
                )
            )
        speed = settings.speed
        if speed and speed.prompt + speed.generate + 1 > context:
            problems.append(
                Problem(
                    f"{where}speed",
                    f"a prompt of {speed.prompt} and {speed.generate} generated tokens exceed the context length of"
                    f" {model.name}, {context}; lower them",
                )
            )
    return problems
