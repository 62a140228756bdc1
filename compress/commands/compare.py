"""``smelt compare``: what changed between reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .common.outcome import make_directory, passed, reporting_errors


@reporting_errors
def compare(
    before: Annotated[Path, typer.Argument(help="A report.json, or the directory it is in.")],
    after: Annotated[Path, typer.Argument(help="Another.")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="GATE", help="E.g. `ppl>+2%` or `decode_speedup<1.5`. Repeatable."),
    ] = None,
    allow_foreign_baseline: Annotated[
        bool, typer.Option("--allow-foreign-baseline", help="Compare speeds of different machines.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Directory for the comparison's reports.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> int:
    """Compare two reports, model by model; nothing is measured.

    Models of the same name are compared, or, where each report has one model beside its baseline, those two.

    Example:

        smelt compare yesterday/report.json today/report.json --fail-if "decode_speedup<0.95"
    """
    from ..evaluation.compare import compare as compared
    from ..evaluation.gates import Gate
    from ..reporting.report_files import load, save

    gates = [Gate.parse(gate) for gate in fail_if or []]
    pairs = compared(load(before), load(after), allow_foreign_baseline=allow_foreign_baseline)
    if as_json:
        print(json.dumps([report.as_data() for report in pairs], indent=2))
    else:
        print("\n\n".join(f"{report.title}\n{report.summary(colour=sys.stdout.isatty())}" for report in pairs))
    if output is not None:
        for report in pairs:
            inside = output if len(pairs) == 1 else output / report.candidates[0].name.replace("/", "_")
            make_directory(inside)
            save(report, inside)
    return max(passed(report, gates) for report in pairs)
