"""``smelt export``: a checkpoint in the format of another program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .common.outcome import reporting_errors


@reporting_errors
def export(
    checkpoint: Annotated[str, typer.Argument(help="A quantized checkpoint, or a run's output directory.")],
    to: Annotated[str, typer.Option(help="gptq, gptq-v2, awq, gguf, or dense for unquantized weights.")],
    output: Annotated[Path, typer.Option(help="Output directory; for gguf, the file.")],
    kind: Annotated[str | None, typer.Option("--type", help="For gguf: its type, such as Q4_0.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Overwrite an earlier export.")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the checkpoint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Write a quantized checkpoint in a format that other programs read; its codes stay bit-identical.

    Examples:

        smelt export runs/quickstart --to gptq --output runs/quickstart-gptq

        smelt export runs/quickstart --to gguf --type Q4_0 --output quickstart.gguf

        smelt export runs/quickstart --to dense --output runs/quickstart-dense
    """
    from ..export import export as exported

    found = exported(checkpoint, to, output, type=kind, fresh=fresh, trust_remote_code=trust_remote_code)
    print(json.dumps(found.as_data(), indent=2) if as_json else found.summary())
    return 0
