"""``smelt sweep``: many recipes from one file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

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
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing an earlier sweep.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Run a grid or list of recipes, and plot all on one Pareto front.

    Examples:

        smelt sweep recipes/sweep-quickstart.yaml

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
    from ..sweep.run import run_sweep

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
