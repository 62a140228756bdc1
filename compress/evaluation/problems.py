"""What would make an evaluation fail, found before any work."""

from __future__ import annotations

from collections.abc import Sequence

from ...models.directory.directory import ModelDirectory
from ...runtime import RuntimeProblem
from ...system.device import device_named
from ...system.errors import Problem
from .settings import Evaluate
from .tasks import Tasks


def text_problems(settings: Evaluate, where: str = "evaluate.") -> list[Problem]:
    """Problems with the text that show before it is read."""
    sentence = settings.source().problem()
    return [Problem(f"{where}text", sentence)] if sentence else []


def device_problems(device: str, where: str = "evaluate.") -> list[Problem]:
    """A device that is not here."""
    try:
        device_named(device)
    except RuntimeProblem as problem:
        return [Problem(f"{where}device", str(problem))]
    return []


def task_problems(tasks: Tasks, models: Sequence[ModelDirectory], where: str = "evaluate.") -> list[Problem]:
    """Tasks that leave a model no room for a prompt."""
    problems = []
    for name in tasks.loaded:
        most = tasks.longest_answer(name)
        for model in models:
            context = model.config_data().get("max_position_embeddings")
            if most is not None and isinstance(context, int) and most >= context:
                problems.append(
                    Problem(
                        f"{where}tasks",
                        f"{name} generates up to {most} tokens, and {model.name} was made for {context}; set max_gen_toks in"
                        " the task's generation_kwargs",
                    )
                )
    return problems


def fewest_positions(models: Sequence[ModelDirectory]) -> int | None:
    """The positions of the model that has fewest; None if none says."""
    found = (model.config_data().get("max_position_embeddings") for model in models)
    return min((positions for positions in found if isinstance(positions, int)), default=None)


def length_problems(settings: Evaluate, models: Sequence[ModelDirectory], where: str = "evaluate.") -> list[Problem]:
    """What is longer than a model was made for."""
    problems = []
    for model in models:
        context = model.config_data().get("max_position_embeddings")
        if not isinstance(context, int):
            continue
        if settings.length > context:
            problems.append(
                Problem(
                    f"{where}length",
                    f"{settings.length} tokens are more than the {context} that {model.name} was made for; use at most {context}",
                )
            )
        speed = settings.speed
        if speed and speed.prompt + speed.generate + 1 > context:
            problems.append(
                Problem(
                    f"{where}speed",
                    f"a prompt of {speed.prompt} and {speed.generate} generated are more than the {context} tokens that"
                    f" {model.name} was made for; lower them",
                )
            )
    return problems
