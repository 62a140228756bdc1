"""``smelt plan``: what a model does on a device in each format, and the recipe that meets a target."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ...system.errors import SmeltError
from ...system.progress import Progress
from .common.outcome import reporting_errors, say


@reporting_errors
def plan(
    model: Annotated[str, typer.Argument(help="A directory with config.json, a hub name or builtin:smelt-6m.")],
    device: Annotated[
        str,
        typer.Option(help="A shipped device, a YAML file of constants, a calibration (JSON), or cpu: this machine."),
    ] = "cpu",
    devices: Annotated[int, typer.Option(help="Devices that share every layer (tensor parallel).", min=1)] = 1,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; default: 4096, or the model's maximum.", min=1)
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences decoded together.", min=1, max=10**6)] = 8,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Prompt tokens in a step.", min=1)] = 512,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable: tokens_per_second=50 (one sequence), throughput=2000 (at --batch), ttft=0.5 (seconds),"
            " memory=24GB, batch=16 (sequences at --context)."
        ),
    ] = None,
    scheme: Annotated[
        list[str] | None, typer.Option(help="Only these, such as W4A16 or unquantized. Repeatable; default: all.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time models of that shape with random weights on this machine.")
    ] = False,
    recipe: Annotated[Path | None, typer.Option(help="Write the recommended candidate's recipe to FILE.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all candidates.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Plan a model on a device: which formats fit, how fast they are, and which recipe meets a target.

    Only config.json is read or downloaded.

    Examples:

        smelt plan ./llama-3-8b --device h100-sxm --context 8192 --batch 16

        smelt plan ./llama-3-8b --device a100-sxm-80gb --target tokens_per_second=150 --target memory=24GB --recipe planned.yaml

        smelt plan ./llama-3-70b --device h100-sxm --devices 4

        smelt plan builtin:smelt-6m --measure
    """
    from ...models.directory.find import find_configuration
    from ...runtime.plan.planner import PlanRequest
    from ...runtime.plan.planner import plan as planned
    from ...runtime.plan.targets import parse_targets
    from ...runtime.plan.text import plan_table
    from ..recipe.planned import planned_recipe

    if measure and device != "cpu":
        raise SmeltError("--measure times this machine; leave --device out, or give --device cpu")
    if measure and devices > 1:
        raise SmeltError("--measure times this machine alone; leave --devices out")
    if recipe is not None and not recipe.parent.is_dir():
        raise SmeltError(f"--recipe: {recipe.parent} is not a directory; create it, or choose another file")
    if recipe is not None and recipe.exists():
        raise SmeltError(f"--recipe: {recipe} exists; choose another file, or remove it")
    request = PlanRequest(
        device=device,
        devices=devices,
        context=context,
        batch=batch,
        max_num_batched_tokens=max_num_batched_tokens,
        targets=parse_targets(target or []),
        schemes=tuple(scheme or ()),
    )
    directory = find_configuration(model)
    log = Progress(True).say
    found = planned(directory, request, log)
    if measure:
        from ...runtime.plan.measured import measure_formats

        found = measure_formats(found, directory, log=log)
    made = found.recommended and planned_recipe(found.recommended.candidate, model)
    if as_json:
        print(json.dumps({**found.as_data(), "recipe": made}, indent=2))
    else:
        print(plan_table(found, everything=everything))
        if made:
            print(f"\n{made}", end="")
        elif found.recommended is not None:
            print("\nIt needs no recipe: serve the model as it is.")
    if found.problem is not None:
        return say(found.problem, 1)
    if recipe is not None:
        if made is None:
            print("no recipe is written: the model as it is meets what was asked for", file=sys.stderr)
            return 0
        from ...system.storage.files import write_text

        write_text(recipe, made)
        print(f"written: {recipe}", file=sys.stderr)
    return 0
