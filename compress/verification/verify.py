"""``smelt verify``: every claim of a checkpoint, measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ...models.directory.find import find_checkpoint
from ...system.storage.new_directory import RECORD
from ...system.storage.paths import named_path
from .claims import Claims
from .files import check_files
from .finding import Finding
from .logits import check_logits
from .measured import Remeasurement, check_measured
from .signature import check_signature

__all__ = ["Finding", "verify"]


def verify(
    checkpoint: str | Path,
    *,
    baseline: str | None = None,
    public_key: str | None = None,
    output: str | Path | None = "runs/verify",
    trust_remote_code: bool = False,
    trust_task_code: bool = False,
    progress: bool = True,
    on_finding: Callable[[Finding], object] = lambda _: None,
) -> list[Finding]:
    """Measure again what a checkpoint's ``smelt.json`` claims, claim by claim.

    Args:
        checkpoint: a directory, a run's output directory or a hub name.
        baseline: where its original is, if not where the recipe had it.
        public_key: a minisign key, or a file with one, of who should have signed it.
        output: gets the report of what is measured; None to measure neither accuracy nor speed.
        trust_remote_code: run Python code that comes with the checkpoint, and with ``baseline`` if that is given.
        trust_task_code: run Python code that tasks' files refer to.
        progress: show progress on a terminal.
        on_finding: called with each as soon as it is known.

    Returns:
        What became of each claim.

    Raises:
        SmeltError: the checkpoint claims nothing, or its record cannot be understood.
    """
    path = find_checkpoint(str(checkpoint), trust_remote_code=trust_remote_code).path
    is_here = named_path(str(checkpoint)).is_dir()
    claims = Claims.read(path)

    def found() -> Iterator[Finding]:
        signed = check_signature(path, RECORD, public_key)
        if signed is not None:
            yield signed
        yield from check_files(path, claims.files, has_code=is_here or trust_remote_code)
        if claims.logits is not None:
            yield check_logits(path, claims.logits, trust_remote_code=trust_remote_code)
        if claims.measured is None or output is None:
            return
        plan = Remeasurement.plan(
            claims.measured, baseline, trust_remote_code=trust_remote_code, trust_task_code=trust_task_code
        )
        yield from check_measured(
            path, claims.measured, plan, Path(output), trust_remote_code=trust_remote_code, progress=progress
        )

    findings = []
    for finding in found():
        findings.append(finding)
        on_finding(finding)
    return findings


def outcome(findings: list[Finding]) -> str:
    """How many claims were confirmed, for people."""
    counts = {
        verdict: sum(each.verdict == verdict for each in findings)
        for verdict in ("confirmed", "not confirmed", "not measurable here")
    }
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
