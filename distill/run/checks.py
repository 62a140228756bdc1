"""Checks of a recipe's training: enough text, a long enough context, and a teacher with the same tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ...models.directory.find import find_model
from ...models.steps.step import StepTraining
from ...models.structure.open_model import OpenModel
from ...runtime.decoder.architectures import spec_of
from ...system.errors import Problem, RuntimeProblem, SmeltError
from ..settings import Training
from ..training.sharded import adds_up_unused
from .training_text import shortage


def training_problems(settings: Training, model: OpenModel, where: str) -> list[Problem]:
    """Problems that can be found before any work, reading no more text than one batch.

    Args:
        settings: the recipe's section.
        model: what is trained.
        where: how messages name the section.
    """
    problems: list[Problem] = []
    tokenizer, text, context = model.directory.tokenizer(), settings.data.text(), model.context()
    if context and settings.length > context:
        what = f"{settings.length} tokens exceed the model's context length; use at most {context}"
        problems.append(Problem(f"{where}.length", what))
    try:
        short = text.problem() or shortage(text, tokenizer, settings.length, settings.batch)
        if short is not None:
            problems.append(Problem(f"{where}.data", short))
    except SmeltError as error:
        problems.append(Problem(f"{where}.data", str(error)))
    if settings.data.writer == "student" or (settings.data.writer == "teacher" and settings.learns_from_original):
        problems += writer_problems(model, "the model", f"{where}.data.writer")
    if settings.attention:
        problems += _attention_problems(model, "the model", where)
    if settings.stored_at is not None:
        place = next(
            path for path in (Path(settings.stored_at), *Path(settings.stored_at).absolute().parents) if path.exists()
        )
        if not place.is_dir() or not os.access(place, os.W_OK):
            problems.append(Problem(f"{where}.stored_at", f"{place} is not a writable directory; choose another"))
    if settings.has_teacher and not settings.learns_from_original:
        try:
            teacher = named_teacher(settings, model)
            if settings.attention:
                problems += _attention_problems(teacher, "the teacher", where)
            if settings.data.writer == "teacher":
                problems += writer_problems(teacher, "the teacher", f"{where}.data.writer")
            reach = teacher.context()
            if reach and settings.length > reach:
                what = f"{settings.length} tokens exceed the teacher's context length of {reach}"
                problems.append(Problem(f"{where}.length", f"{what}; use at most that"))
            if teacher.directory.tokenizer().get_vocab() != tokenizer.get_vocab():
                problems.append(Problem(f"{where}.teacher", other_tokens(settings.teacher)))
        except SmeltError as error:
            problems.append(Problem(f"{where}.teacher", str(error)))
    return problems


def writer_problems(model: OpenModel, who: str, place: str) -> list[Problem]:
    """Whether the runtime can serve a model that is to write text; found before any step has run.

    Args:
        model: that writes.
        who: it is, for the message.
        place: of the setting.
    """
    try:
        spec_of(model.config)
    except RuntimeProblem as problem:
        return [Problem(place, f"the runtime cannot generate text with {who} ({problem}); give a text instead")]
    return []


def _attention_problems(model: OpenModel, who: str, where: str) -> list[Problem]:
    config: Any = model.skeleton.model.config
    if config._attn_implementation == "sdpa":
        return []
    what = f"{who} does not use torch's scaled_dot_product_attention, where attention would be compared; remove it"
    return [Problem(f"{where}.attention", what)]


def sharing_problems(settings: Training, model: OpenModel | None, count: int, where: str) -> list[Problem]:
    """Problems of a training that is split over several processes.

    Args:
        settings: the recipe's section.
        model: the model that the run starts from, if it can be opened.
        count: number of processes.
        where: how messages name the section.
    """
    problems: list[Problem] = []
    if count > 1 and settings.batch // count < settings.accumulate:
        passes = "" if settings.accumulate == 1 else f" in {settings.accumulate} passes each"
        what = f"a batch of {settings.batch} windows cannot be split over {count} processes{passes}"
        problems.append(Problem(f"{where}.batch", f"{what}; raise batch, lower accumulate or start fewer"))
    mixes = model is not None and any(".experts." in name for name in model.linears)
    if count > 1 and mixes and not adds_up_unused():
        what = f"torch {torch.__version__} sums gradients wrongly if processes use different experts"
        problems.append(Problem(where, f"{what}; use torch 2.13 or newer, or one process"))
    return problems


def step_training(settings: Training, where: str) -> StepTraining:
    """What the run around a training asks of it.

    Args:
        settings: the recipe's section.
        where: how messages name the section.
    """
    teacher = settings.teacher if settings.has_teacher and not settings.learns_from_original else None
    return StepTraining(teacher, lambda model, count: sharing_problems(settings, model, count, where))


def other_tokens(teacher: str) -> str:
    """Why a teacher with another tokenizer cannot teach."""
    return (
        f"{teacher} and the student have different tokenizers, so their predictions cannot be compared;"
        " choose a teacher with the student's tokenizer, or train before pruning the vocabulary"
    )


def named_teacher(settings: Training, model: OpenModel) -> OpenModel:
    """A teacher other than the run's original."""
    return OpenModel(find_model(settings.teacher, trust_remote_code=model.directory.trust_remote_code))


def teacher_of(settings: Training, model: OpenModel, original: OpenModel | None) -> OpenModel | None:
    """The teacher of a model; None for the text alone.

    Args:
        settings: the recipe's section.
        model: what is trained.
        original: the model that the run started from; ``model`` itself if unknown.
    """
    if not settings.has_teacher:
        return None
    return (original or model) if settings.learns_from_original else named_teacher(settings, model)
