"""Problems that would make an evaluation fail, and what it will not measure, found before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...models.directory.directory import ModelDirectory
from ...models.directory.find import find_checkpoint
from ...runtime import RuntimeProblem
from ...runtime.engine.setup.config import LOOKUP, LOOKUP_FIRST, NESTED, draft_checkpoint
from ...system.errors import Problem, SmeltError, nearest_name
from ...system.hardware.device import device_named
from .guarantee import Guarantee
from .scoring.tasks import Tasks
from .settings import RESULT, Evaluate

if TYPE_CHECKING:
    from .subject import Subject  # imports torch


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


def settings_problems(
    settings: Evaluate, where: str = "evaluate.", *, processes: int = 1, of_recipe: bool = True
) -> list[Problem]:
    """Problems that the settings alone show.

    Args:
        settings: of the evaluation.
        where: they are.
        processes: that share the work before it.
        of_recipe: whether they are a recipe's, whose result may draft.
    """
    return [
        *device_problems(settings.device, where),
        *_rank_problems(settings, where, processes),
        *_guarantee_problems(settings, where),
        *_drafter_problems(settings, where, of_recipe),
    ]


def _rank_problems(settings: Evaluate, where: str, processes: int) -> list[Problem]:
    """Several ranks on a device that is one GPU, or within a process that a launcher has started, whose others do not evaluate."""
    if settings.tp * settings.pp == 1:
        return []
    from ...runtime.parallel.launch import launched_count

    field = f"{where}{'tp' if settings.tp > 1 else 'pp'}"
    if settings.device != "cpu":
        try:
            device_named(f"cuda:{settings.tp * settings.pp - 1}")
        except RuntimeProblem as problem:
            return [Problem(field, f"each process takes a GPU: {problem}")]
    processes = max(processes, launched_count())
    if processes == 1:
        return []
    return [
        Problem(
            field,
            f"{processes} processes share the work, but an evaluation starts its ranks itself; leave it out here,"
            " and evaluate afterwards without a launcher: smelt eval --tp, or smelt eval --server for a server that was launched",
        )
    ]


def _guarantee_problems(settings: Evaluate, where: str) -> list[Problem]:
    """Claims that cannot be read, or are about nothing that is measured."""
    problems, confidences = [], set[float]()
    for text in settings.guarantee:
        try:
            claim = Guarantee.parse(text)
        except SmeltError as error:
            problems.append(Problem(f"{where}guarantee", str(error)))
            continue
        confidences.add(claim.confidence)
        if not claim.is_about_text and not settings.tasks:
            problems.append(
                Problem(f"{where}guarantee", f"{text!r} is about tasks, and none is measured; name them under tasks")
            )
    if len(confidences) > 1:
        why = f"has {len(confidences)} confidences, but claims share one probability of an error; give all of them the same"
        problems.append(Problem(f"{where}guarantee", why))
    return problems


def find_tasks(settings: Evaluate) -> Tasks | None:
    """The tasks of an evaluation; None if it has none.

    Raises:
        SmeltError: one line for each that cannot be used.
    """
    if not settings.tasks:
        return None
    return Tasks.find(settings.tasks, trust_code=settings.trust_task_code, fewshot=settings.fewshot)


def _claimed_problems(settings: Evaluate, tasks: Tasks, where: str) -> list[Problem]:
    """Claims on tasks that are not among those that were found."""
    known = [*tasks.loaded, *tasks.groups]
    problems = []
    for text in settings.guarantee:
        name = Guarantee.parse(text).what.partition("task:")[2]
        if name and name not in known:
            more = nearest_name(name, known) or f"; those are {', '.join(known)}"
            problems.append(Problem(f"{where}guarantee", f"{text!r} is about {name}, which is none of the tasks{more}"))
    return problems


def _drafter_problems(settings: Evaluate, where: str, of_recipe: bool) -> list[Problem]:
    """A drafter that does not exist, or that nothing would measure."""
    if settings.drafter is None:
        return []
    field = f"{where}drafter"
    if not settings.speed:
        return [
            Problem(field, "is measured with the speed's loads, and speed is not measured; set speed, or leave it out")
        ]
    checkpoint = draft_checkpoint(settings.drafter)
    if checkpoint is None or (checkpoint == RESULT and of_recipe):
        return []
    known = f"it must be {LOOKUP}, {NESTED}, early-exit:N{f', {RESULT}' if of_recipe else ''} or a checkpoint, or {LOOKUP_FIRST} before one of the others"
    try:
        find_checkpoint(checkpoint)
    except SmeltError as error:
        return [Problem(field, f"{error}; {known}")]
    return []


def task_problems(
    settings: Evaluate, tasks: Tasks, models: Sequence[ModelDirectory], where: str = "evaluate."
) -> list[Problem]:
    """Tasks that ask for generation which the engine does not have, or that leaves no room for a prompt in the context length.

    And claims on others than those.
    """
    problems = []
    for name in tasks.loaded:
        most, asked = tasks.longest_answer(name), tasks.generation(name)
        if asked is not None:
            from ..integrations.lm_eval import generation_problem  # imported late: it imports lm-eval's models

            problem = generation_problem(asked)
            if problem is not None:
                problems.append(Problem(f"{where}tasks", f"{name}'s {problem}; remove it, or them"))
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
    return problems + _claimed_problems(settings, tasks, where)


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


def server_problems(subjects: Sequence[Subject], settings: Evaluate, tasks: Tasks | None) -> list[Problem]:
    """Servers on which nothing that was asked for can be measured."""
    generates = tasks is not None and len(tasks.scored()) < len(tasks.loaded)
    if generates or settings.samples or settings.speed:
        return []
    return [
        Problem(subject.name, f"{subject.server.no_scores}; ask for tasks that generate, samples or speed")
        for subject in subjects
        if subject.server is not None and not subject.reads
    ]


def server_notes(subjects: Sequence[Subject], settings: Evaluate, tasks: Tasks | None) -> list[str]:
    """What will not be measured on servers, or differs from a checkpoint's measurement."""
    notes = []
    for subject in subjects:
        if subject.server is not None and not subject.reads:
            scored = ["the text's perplexity", *(tasks.scored() if tasks else [])]
            listed = " and ".join(filter(None, [", ".join(scored[:-1]), scored[-1]]))
            notes.append(f"{subject.name} {subject.server.no_scores}, so {listed} cannot be measured on it")
    if settings.speed and len({subject.server is None for subject in subjects}) > 1:
        notes.append(
            "speeds of servers include HTTP, those of checkpoints do not; to compare servers, put a checkpoint behind smelt serve"
        )
    return notes
