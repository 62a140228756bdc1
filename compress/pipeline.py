"""Running a recipe: check, calibrate, do the steps, reload, publish, evaluate, report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..runtime.errors import RuntimeProblem
from ..runtime.machine import available_memory
from .compressed import compressed_view
from .corpus import Windows, fingerprint
from .errors import raise_problems
from .evaluate import Comparison, compare
from .model_directory import ModelDirectory
from .open_model import OpenModel
from .output import Output
from .plan import Plan, run_identity, versions
from .progress import Progress
from .recipe import Recipe
from .report import Report, worst_first
from .resources import compute_dtype, return_memory_at_once
from .runtime_reader import RuntimeReader
from .safetensors_file import SafetensorsFile, save_tensors, write_text
from .self_text import self_written_windows
from .steps import RunContext, StepRecord
from .steps.quantize import QuantizeStep
from .streamed import StreamedModel
from .verify import Reload, reload, whole_reload_bytes


@dataclass(frozen=True)
class RunResult:
    """What a run leaves.

    Attributes:
        checkpoint: a Hugging Face directory that ``AutoModelForCausalLM.from_pretrained`` loads.
        report: sizes, accuracy before and after, and every layer's error.
    """

    checkpoint: Path
    report: Report


def run(recipe: Recipe, *, fresh: bool = False, progress: bool = True, name: str | None = None) -> RunResult:
    """Run a recipe, or continue where an interrupted run of the same recipe stopped.

    Args:
        recipe: what to do; see :class:`Recipe`.
        fresh: start over even if the output holds an earlier run.
        progress: show progress bars when standard error is a terminal.
        name: what to call the model in the report, instead of what the recipe calls it.

    Returns:
        The checkpoint's path and the report. A run that is already complete returns at once.

    Raises:
        SmeltError: something is wrong with the recipe, model, data or output; nothing half-written is
            left under ``checkpoint``, and the same command continues after the cause is mended.
    """
    plan = Plan.make(recipe, fresh=fresh)
    raise_problems(plan.problems)
    assert plan.model is not None
    show = Progress(progress)
    if 2 * plan.cost.memory > available_memory():
        return_memory_at_once()
    with Output(Path(recipe.output), run_identity(recipe, plan.model), fresh=fresh) as output:
        if output.is_complete:
            show.say(f"{output.path} is complete already; pass --fresh to run it again")
            return RunResult(output.checkpoint, Report.load(output.report))
        if not output.has_checkpoint:
            tokens = _calibration(recipe, plan.model, plan.calibration, output.journal, show)
            _make_checkpoint(plan, output, tokens, name or recipe.model, show)
        return _evaluate_and_report(plan, output, plan.held_out, name or recipe.model, show)


def _make_checkpoint(plan: Plan, output: Output, tokens: torch.Tensor, name: str, show: Progress) -> None:
    assert plan.model is not None
    recipe, model = plan.recipe, plan.model
    dtype = compute_dtype(model.dtype)
    records: list[StepRecord] = []
    for number, step in enumerate(plan.steps):
        context = RunContext(dtype, tokens, output.journal / f"step-{number}", show)
        records.append(step.run(model, context, output.staging))
    step = plan.steps[-1]
    assert isinstance(step, QuantizeStep)
    show.say("reloading the checkpoint")
    outcome = reload(model, output.staging, step.scheme, tokens, output.journal)
    facts = {
        "versions": versions(),
        "recipe": {**recipe.content(), "model": name},
        "seed": recipe.seed,
        "computed_in": str(dtype).removeprefix("torch."),
        "data": {
            "source": recipe.calibrate.source,
            "samples": recipe.calibrate.samples,
            "length": recipe.calibrate.length,
            "sha256": fingerprint(tokens),
        },
        "model": {"name": name, "sha256": model.weights.fingerprint(), "bytes": model.weights.nbytes},
        "steps": [
            {"step": record.name, "settings": record.settings, "layers": record.layers, "unknown": record.unknown}
            for record in records
        ],
        "reload": outcome.as_data(),
    }
    write_text(output.staging / "smelt.json", json.dumps(facts, indent=2) + "\n")
    output.publish()


def _evaluate_and_report(plan: Plan, output: Output, held_out: Windows | None, name: str, show: Progress) -> RunResult:
    assert plan.model is not None
    model, step = plan.model, plan.steps[-1]
    assert isinstance(step, QuantizeStep)
    facts = json.loads((output.checkpoint / "smelt.json").read_text(encoding="utf-8"))
    layers = worst_first([layer for record in facts["steps"] for layer in record["layers"]])
    evaluation = None
    if held_out is not None and plan.recipe.evaluate:
        evaluation = _comparison(
            model,
            step,
            output,
            held_out.tokens,
            "the builtin evaluation text" if plan.recipe.evaluate.text == "builtin" else plan.recipe.evaluate.text,
            show,
        )
    planned = step.plan(model)
    data: dict[str, Any] = {
        "model": name,
        "recipe": {**plan.recipe.content(), "model": name},
        "versions": versions(),
        "checkpoint": {
            "original_bytes": model.weights.nbytes,
            "bytes": _weight_bytes(output.checkpoint),
            "linear_bits": planned["bits_per_weight"],
            "linear_bits_before": 8 * planned["bytes_before"] / sum(f.numel for f in step.chosen(model)),
        },
        "reload": facts["reload"],
        "layers": layers,
        "warnings": _warnings(layers, facts),
    }
    if evaluation is not None:
        data["evaluation"] = json.loads(json.dumps(evaluation.as_data()))
    report = Report(data)
    report.save(output.path)
    output.forget_intermediate()
    return RunResult(output.checkpoint, report)


def _comparison(
    model: OpenModel, step: QuantizeStep, output: Output, tokens: torch.Tensor, text: str, show: Progress
) -> Comparison:
    """Both models on the runtime that will serve them; block by block where it cannot, or they do not fit."""
    trust, kept = model.directory.trust_remote_code, output.journal
    if whole_reload_bytes(model) > available_memory():
        reason = "the models do not fit in memory at once"
    else:
        original = RuntimeReader(model.directory.path, trust, kept)
        compressed = RuntimeReader(output.checkpoint, trust, kept)
        try:
            return compare(original, compressed, tokens, text, "Smelt's runtime", show)
        except RuntimeProblem as problem:
            reason = str(problem)
    directory = ModelDirectory(str(output.checkpoint), output.checkpoint, trust)
    return compare(
        StreamedModel(model.skeleton, model.weights, torch.float32, kept),
        compressed_view(model, directory, step.scheme, torch.float32, kept),
        tokens,
        text,
        f"transformers, block by block in float32, because {reason}",
        show,
    )


def _calibration(
    recipe: Recipe, model: OpenModel, windows: Windows | None, journal: Path, show: Progress
) -> torch.Tensor:
    """The calibration windows; they are kept, so that an interrupted run continues with the same ones."""
    kept = journal / "calibration.safetensors"
    if kept.exists():
        return SafetensorsFile(kept).load("tokens")
    if windows is None:
        settings = recipe.calibrate
        windows = self_written_windows(model.directory, settings.samples, settings.length, recipe.seed, show)
    save_tensors(kept, {"tokens": windows.tokens})
    return windows.tokens


def _warnings(layers: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    found = [f"{layer['name']}: {note}" for layer in layers for note in layer["notes"]]
    found += [sentence for record in facts["steps"] for sentence in record["unknown"]]
    if Reload(**facts["reload"]).through != "transformers":
        found.append(facts["reload"]["sentence"])
    return found


def _weight_bytes(checkpoint: Path) -> int:
    return sum(
        info.nbytes for file in checkpoint.glob("*.safetensors") for info in SafetensorsFile(file).tensors.values()
    )
