"""``smelt sweep``: many recipes from one file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ...system.errors import SmeltError
from .common.outcome import not_certified, passed, reporting_errors, say


@reporting_errors
def sweep(
    file: Annotated[Path, typer.Argument(help="A recipe with a sweep section, such as recipes/sweep-quickstart.yaml.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of all trials. Repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Output directory, instead of the recipe's.")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run the trials on a Ray cluster; `local` starts one here.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="GATE", help="E.g. `ppl>+2%` or `decode_speedup<1.5`. Repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all trials and print their plans without running them.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing an earlier sweep.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Run a grid or list of recipes, and plot all on one Pareto front.

    Examples:

        smelt sweep recipes/sweep-quickstart.yaml

        smelt sweep recipes/sweep-quickstart.yaml --dry-run

        smelt sweep my-sweep.yaml --ray auto
    """
    from ..evaluation.gates import Gate, raise_unmeasured
    from ..sweep.trials import Sweep

    gates = [Gate.parse(gate) for gate in fail_if or []]
    overrides = [*(set_ or []), *([f"output={json.dumps(str(output), ensure_ascii=False)}"] if output else [])]
    loaded = Sweep.load(file, overrides)
    if gates and not loaded.base.evaluate:
        raise SmeltError("--fail-if needs measurements, but the recipe has evaluate: false; remove one of them")
    if loaded.base.evaluate:
        raise_unmeasured(gates, loaded.base.evaluate, baseline=True)
    from ..sweep.run import plan_trials, run_sweep

    if dry_run:
        return _print_plans(plan_trials(loaded, fresh=fresh), as_json)
    result = run_sweep(loaded, fresh=fresh, ray=ray)
    if as_json:
        made = {name: str(path) for name, path in result.checkpoints.items()}
        report = result.report.as_data() if result.report else None
        print(json.dumps({"checkpoints": made, "failed": result.failed, "report": report}, indent=2))
    else:
        for name, path in result.checkpoints.items():
            print(f"{name}: {path}")
        if result.report is not None:
            where = Path(loaded.base.output) / "report.html"
            print(f"\n{result.report.summary(colour=sys.stdout.isatty())}\n\nreport: {where}")
    for name, why in result.failed.items():
        say(f"trial {name} failed: {why}", 1)
    status = 0
    if result.report is not None:
        claims = loaded.base.evaluate.guarantee if loaded.base.evaluate else []
        status = max(passed(result.report, gates), not_certified(result.report, claims))
    return 1 if result.failed else status


def _print_plans(plans: dict[str, Any], as_json: bool) -> int:
    from ...system.hardware.machine import human_bytes
    from ...system.hardware.resources import human_time

    found = {name: plan.as_data() for name, plan in plans.items()}
    if as_json:
        print(json.dumps({"trials": found}, indent=2))
        return 0
    for name, data in found.items():
        predicted = data["predicted"]
        print(
            f"{name}: roughly {human_time(predicted['seconds'])}, {human_bytes(predicted['disk_bytes'])} of disk, about"
            f" {human_bytes(predicted['peak_memory_bytes'])} of memory"
        )
        for step in data["steps"]:
            print(f"  {step['sentence']}")
        for loader in plans[name].loaders():
            if not loader.loads:
                print(f"  {loader.sentence}")
    disk = sum(data["predicted"]["disk_bytes"] for data in found.values())
    seconds = sum(data["predicted"]["seconds"] for data in found.values())
    print(
        f"\n{len(found)} trial{'s' if len(found) > 1 else ''}, no problems found: roughly {human_time(seconds)} without the"
        f" evaluation, {human_bytes(disk)} of disk"
    )
    return 0
