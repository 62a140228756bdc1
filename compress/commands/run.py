"""``smelt run``: a recipe, from the model to the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .common.launched import on_processes
from .common.outcome import not_certified, reporting_errors


@reporting_errors
def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe, such as recipes/quickstart.yaml.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a field, e.g. `steps.0.quantize.scheme=W8A16`. Repeatable."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Output directory, instead of the recipe's.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print the plan without running it.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing an earlier run.")] = False,
    processes: Annotated[
        int, typer.Option(help="Processes of this machine that share the work; on GPUs each takes one.", min=1)
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result (or the plan) as JSON.")] = False,
) -> int:
    """Run a recipe: compress a model, and report its accuracy and speed.

    Examples:

        smelt run recipes/quickstart.yaml

        smelt run recipes/quickstart.yaml --set steps.0.quantize.rounding=nearest --output runs/nearest

        smelt run recipes/quickstart.yaml --dry-run --json

        smelt run recipes/quickstart.yaml --processes 2
    """
    from ..recipe.recipe import Recipe

    overrides = [*(set_ or []), *([f"output={json.dumps(str(output), ensure_ascii=False)}"] if output else [])]
    return run_and_print(
        Recipe.load(recipe, overrides), dry_run=dry_run, fresh=fresh, processes=processes, as_json=as_json
    )


def run_and_print(recipe: Any, *, dry_run: bool, fresh: bool, processes: int, as_json: bool) -> int:
    """Run a recipe, or plan it, and print the outcome.

    Args:
        recipe: the recipe.
        dry_run: only plan it.
        fresh: start over instead of continuing an earlier run.
        processes: of this machine that share the work.
        as_json: print JSON.

    Returns:
        The exit status.
    """
    if dry_run:
        return _print_plan(recipe, fresh, processes, as_json)
    with on_processes(processes):
        from ...system.processes.process_group import is_first
        from ..pipeline.pipeline import run as run_recipe

        result = run_recipe(recipe, fresh=fresh)
    if not is_first():
        return 0
    claims = recipe.evaluate.guarantee if recipe.evaluate else []
    if as_json:
        print(json.dumps({"checkpoint": str(result.checkpoint), "report": result.report.as_data()}, indent=2))
        return not_certified(result.report, claims)
    print(result.report.summary(colour=sys.stdout.isatty()))
    print(f"\ncheckpoint: {result.checkpoint}\nreport:     {result.checkpoint.parent / 'report.html'}")
    return not_certified(result.report, claims)


def _print_plan(recipe: Any, fresh: bool, processes: int, as_json: bool) -> int:
    from ...system.processes.process_group import is_first
    from ..pipeline.plan import Plan

    plan = Plan.make(recipe, fresh=fresh, processes=processes)
    if not is_first():
        return 1 if plan.problems else 0
    print(json.dumps(plan.as_data(), indent=2) if as_json else plan.terminal())
    return 1 if plan.problems else 0
