"""``smelt verify``: whether a checkpoint is what its record claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .common.outcome import reporting_errors, say


@reporting_errors
def verify(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a run's output directory or a hub name.")],
    baseline: Annotated[
        str | None, typer.Option(help="Its original, if it is not where the recipe had it: a directory or hub name.")
    ] = None,
    public_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The minisign key, or a file with it, of who should have signed smelt.json."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the signature, the files and the logits; neither accuracy nor speed.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Directory for the report of what is measured.")] = Path("runs/verify"),
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the checkpoint.")] = False,
    trust_task_code: Annotated[
        bool,
        typer.Option(
            help="Run Python code named by the YAML files of tasks, and what models write where a task asks for that."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
) -> int:
    """Measure again what a checkpoint's smelt.json claims: its files' digests, logits, accuracy, certified bounds and speed.

    Each claim is confirmed, not confirmed, or not measurable here; the status is 1 if any is not confirmed.

    Examples:

        smelt verify runs/quickstart/checkpoint

        smelt verify ./downloaded --baseline ./my-llama --public-key signer.pub

        smelt verify runs/quickstart/checkpoint --quick --json
    """
    from ..verification.verify import Finding, outcome
    from ..verification.verify import verify as verified

    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            print(finding.sentence(), flush=True)

    try:
        verified(
            checkpoint,
            baseline=baseline,
            public_key=public_key,
            output=None if quick else output,
            trust_remote_code=trust_remote_code,
            trust_task_code=trust_task_code,
            on_finding=tell,
        )
    finally:
        if as_json:
            print(json.dumps([each.as_data() for each in findings], indent=2))
    if not as_json:
        print(f"\n{outcome(findings)}")
    refuted = sum(each.verdict == "not confirmed" for each in findings)
    return say(f"{checkpoint}: {refuted} of its claims are not confirmed", 1) if refuted else 0
