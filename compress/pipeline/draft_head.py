"""``smelt distill --for-drafting --head``: a draft head for a model, trained, written, and measured beside no drafts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from ...distill.heads.head_files import scheme_problem, write_head
from ...distill.heads.head_module import HeadModule, HeadShape
from ...distill.heads.head_training import TrainedHead, drafted_tokens, train_head
from ...distill.run.checks import training_problems
from ...distill.run.training_parts import TrainingPlace
from ...distill.settings import Training
from ...models.directory.find import find_checkpoint
from ...models.structure.open_model import OpenModel
from ...quant.scheme import Scheme, resolve
from ...quant.stored.compressed import open_dense
from ...runtime.decoder.architectures import spec_of
from ...system.errors import Problem, SmeltError, raise_problems
from ...system.hardware.device import device_named
from ...system.hardware.machine import available_memory, human_bytes
from ...system.hardware.resources import Cost, compute_dtype, human_time, matmul_rate
from ...system.processes.process_group import Processes
from ...system.progress import Progress
from ...system.storage.digests import digest, named_files
from ...system.storage.files import write_text
from ...system.storage.new_directory import RECORD
from ...system.storage.run_directory import Output
from ...system.versions import versions
from ..evaluation.drafts import EvaluatedDrafter
from ..evaluation.evaluate import measured
from ..evaluation.measure import Evaluation
from ..evaluation.settings import Evaluate
from ..evaluation.subject import Subject
from ..reporting.card import base_name
from ..reporting.head_card import head_card
from ..reporting.report_files import load
from ..results.report import ReportData
from ..verification.claims import Claims
from ..verification.files import digests
from .pipeline import RunResult

_WHERE = "smelt distill"
_SEED = 0
# Of a weight in training: itself, its gradient and two moments, in float32.
_TRAINED = 16
# Rows of a head's activations that are kept for its gradient, for each place of a draft, as a factor of its width; and how many places.
_KEPT, _PLACES = 24, 4


@dataclass(frozen=True)
class HeadRequest:
    """What is wanted.

    Attributes:
        model: a directory, hub name or builtin.
        output: the run's directory.
        training: settings of the training.
        evaluate: how what it gains is measured.
        vocabulary: how many tokens it may draft; None for all, and at most 32,000.
        scheme: what its linears are rounded to; None for none.
        device: where it is trained.
        trust_remote_code: run Python code that comes with the model.
    """

    model: str
    output: Path
    training: Training
    evaluate: Evaluate
    vocabulary: int | None = None
    scheme: str | None = None
    device: str = "cpu"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class HeadPlan:
    """What a training of a draft head would do.

    Attributes:
        request: what is wanted.
        model: that it drafts for.
        shape: the head's sizes.
        scheme: what its linears are rounded to.
        cost: of the training.
        problems: what would make it fail.
    """

    request: HeadRequest
    model: OpenModel
    shape: HeadShape
    scheme: Scheme | None
    cost: Cost
    problems: list[Problem]

    @classmethod
    def make(cls, request: HeadRequest, *, fresh: bool = False) -> Self:
        """Look for everything that would make the training fail, before it starts.

        Args:
            request: what is wanted.
            fresh: whether an earlier run's output would be replaced.

        Raises:
            SmeltError: the model cannot be opened, or the scheme or device is none.
        """
        device_named(request.device)
        try:
            scheme = None if request.scheme is None else resolve(request.scheme)
        except ValueError as error:
            raise SmeltError(f"{_WHERE}: scheme {request.scheme}: {error}") from None
        model = open_dense(find_checkpoint(request.model, trust_remote_code=request.trust_remote_code))
        spec_of(model.directory.config())  # which says what the runtime does not know
        context = model.context()
        if context is not None and context < request.training.length:
            fitting = request.training.model_dump() | {"length": context}
            request = replace(request, training=Training.model_validate(fitting))
        vocabulary = drafted_tokens(model.vocabulary(), request.vocabulary)
        config: Any = model.skeleton.model.config
        shape = HeadShape.of(config.get_text_config(), len(model.skeleton.blocks), vocabulary)
        cost = _cost(request, model, shape)
        problems = training_problems(request.training, model, _WHERE)
        blocked = _output(request, model, fresh).problem()
        if blocked:
            problems.append(Problem("output", blocked))
        unfit = None if scheme is None else scheme_problem(scheme, shape)
        if unfit is not None:
            problems.append(Problem(f"{_WHERE}.scheme", unfit))
        free = available_memory()
        if request.device == "cpu" and cost.memory > free:
            problems.append(
                Problem(
                    f"{_WHERE}.batch",
                    f"training needs about {human_bytes(cost.memory)} of memory, and {human_bytes(free)} are available; free memory",
                )
            )
        return cls(request, model, shape, scheme, cost, problems)

    def as_data(self) -> dict[str, Any]:
        """The plan as plain data."""
        training = self.request.training
        return {
            "model": self.request.model,
            "output": str(self.request.output),
            "states_after_layers": list(self.shape.after),
            "draft_vocabulary": self.shape.vocabulary,
            "weights": _weights(self.shape),
            "scheme": None if self.scheme is None else self.scheme.label,
            "tokens": training.tokens,
            "steps": training.steps,
            "predicted": {
                "memory_bytes": self.cost.memory,
                "disk_bytes": self.cost.disk,
                "seconds": self.cost.operations / matmul_rate(),
            },
            "problems": [str(problem) for problem in self.problems],
        }

    def terminal(self) -> str:
        """The plan as plain text."""
        data, training = self.as_data(), self.request.training
        after = ", ".join(map(str, self.shape.after))
        lines = [
            f"model:   {self.request.model}",
            f"output:  {self.request.output}",
            f"head:    one layer of {data['weights'] / 1e6:,.1f} million weights that reads states after {after} of"
            f" {len(self.model.skeleton.blocks)} layers, for {self.shape.vocabulary:,} tokens",
            f"train:   {training.steps} steps of {training.batch} x {training.length} tokens that the model writes after beginnings from"
            f" {training.data.text().label}",
            f"scheme:  {data['scheme'] or 'none'}",
            f"memory:  about {human_bytes(self.cost.memory)} above the start ({human_bytes(available_memory())} available)",
            f"time:    roughly {human_time(data['predicted']['seconds'])}, without the text that the model writes",
        ]
        lines += ["", *(f"  {problem}" for problem in self.problems)] if self.problems else ["", "no problems found"]
        return "\n".join(lines)


def make_head(request: HeadRequest, *, fresh: bool = False, progress: bool = True) -> RunResult:
    """Train a draft head, or continue where an interrupted run stopped; write it, and measure what it gains.

    Args:
        request: what is wanted.
        fresh: start over even if the output holds an earlier run.
        progress: show progress bars when standard error is a terminal.

    Raises:
        SmeltError: something is wrong with the model, the text or the output; nothing half-written is left under ``checkpoint``.
    """
    plan = HeadPlan.make(request, fresh=fresh)
    raise_problems(plan.problems)
    request = plan.request
    show = Progress(progress)
    with _output(request, plan.model, fresh) as output:
        if output.is_complete:
            output.forget_intermediate()  # of a run that was killed as it ended
            show.say(f"{output.path} is already complete; pass --fresh to run it again")
            return RunResult(output.checkpoint, load(output.report))
        if not output.has_checkpoint:
            _write(plan, output, _trained(plan, output, show))
        return RunResult(output.checkpoint, _measured(plan, output, show))


def _trained(plan: HeadPlan, output: Output, show: Progress) -> TrainedHead:
    request, model = plan.request, plan.model
    place = TrainingPlace(
        output.journal / "head",
        output.path,
        "head",
        compute_dtype(model.dtype, request.device),
        _SEED,
        show,
        Processes(device_named(request.device)),
    )
    place.journal.mkdir(parents=True, exist_ok=True)
    return train_head(request.training, model, place, vocabulary=request.vocabulary)


def _write(plan: HeadPlan, output: Output, trained: TrainedHead) -> None:
    model = plan.model
    dtype = model.dtype if model.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    write_head(output.staging, trained.module, trained.tokens, dtype, plan.scheme)
    facts = {
        "versions": versions(),
        "draft_head": {
            "states_after_layers": list(plan.shape.after),
            "draft_vocabulary": plan.shape.vocabulary,
            "scheme": None if plan.scheme is None else plan.scheme.label,
            "settings": plan.request.training.model_dump(mode="json"),
            "training": trained.training,
            "done": trained.sentence,
        },
        "model": {"name": plan.request.model, "sha256": model.stored.content_digest()},
        **Claims(files=digests(output.staging), logits=None).data(),
    }
    write_text(output.staging / RECORD, json.dumps(facts, indent=2) + "\n")
    output.publish()


def _measured(plan: HeadPlan, output: Output, show: Progress) -> ReportData:
    request = plan.request
    directory = find_checkpoint(request.model, trust_remote_code=request.trust_remote_code)
    name = base_name(directory)  # the card has no paths of this machine
    subject = Subject(name, directory, "candidate")
    called = "its draft head" if plan.scheme is None else f"its {plan.scheme.label} draft head"
    drafter = EvaluatedDrafter(called, output.checkpoint)
    title = f"{name} with a draft head"
    journal = output.journal / "evaluation"
    evaluation = Evaluation([subject], request.evaluate, None, journal, show, title=title, drafter=drafter)
    record = json.loads((output.checkpoint / RECORD).read_text(encoding="utf-8"))["draft_head"]
    evaluation.warn(f"the draft head was {record['done']}")

    def card(report: ReportData) -> None:
        write_text(output.checkpoint / "README.md", head_card(report, output.checkpoint, plan.model.directory, record))

    report = measured(evaluation, output.path, card)
    output.forget_intermediate()
    return report


def _output(request: HeadRequest, model: OpenModel, fresh: bool) -> Output:
    reads = [request.model, request.training.model_dump(mode="json")]
    return Output(request.output, _identity(request, model), fresh=fresh, reads=reads)


def _identity(request: HeadRequest, model: OpenModel) -> dict[str, Any]:
    """Everything that determines the head's bytes."""
    return {
        "kind": "draft head",
        "versions": versions(),
        "settings": request.training.model_dump(mode="json"),
        "vocabulary": request.vocabulary,
        "scheme": request.scheme,
        "model": model.stored.content_digest(),
        "config": digest(model.directory.config_data()),
        "tokenizer and other files": model.directory.companions(),
        "files": named_files(request.training.model_dump(mode="json")),
        "computed_in": str(compute_dtype(model.dtype, request.device)),
        "device": request.device,
    }


def _weights(shape: HeadShape) -> int:
    return sum(math.prod(each.shape) for each in HeadModule.without_weights(shape).parameters())


def _cost(request: HeadRequest, model: OpenModel, shape: HeadShape) -> Cost:
    """Memory above the process's start, disk for text and snapshots, and operations."""
    settings = request.training
    itemsize, whole = compute_dtype(model.dtype, request.device).itemsize, model.vocabulary()
    theirs = sum(math.prod(model.weights.info(key).shape) for key in model.names.values())
    mine = _weights(shape)
    tokens = settings.batch // settings.accumulate * settings.length
    width = shape.config.hidden_size + shape.config.intermediate_size
    scores = settings.batch // settings.accumulate * shape.config.num_attention_heads * settings.length**2
    # The model's logits and probabilities, and those that each place of a draft learns from.
    probabilities = max(3 * whole, 2 * whole + _PLACES * shape.vocabulary)
    activations = tokens * (_KEPT * width + probabilities) * 4 + 8 * scores * 4
    read = settings.steps * settings.batch * settings.length
    operations = read * (2.0 * theirs + 4 * 6.0 * mine)
    return Cost(theirs * itemsize + mine * _TRAINED + activations, 2 * 12 * mine + 8 * read, operations)
