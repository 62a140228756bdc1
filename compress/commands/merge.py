"""``smelt merge``: merge an adapter into a compressed checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .common.outcome import reporting_errors


@reporting_errors
def merge(
    checkpoint: Annotated[str, typer.Argument(help="A quantized checkpoint, or a run's output directory.")],
    adapter: Annotated[Path, typer.Option(help="Directory of a LoRA adapter saved by peft.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Output directory.")],
    fresh: Annotated[bool, typer.Option("--fresh", help="Overwrite an earlier merge.")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the checkpoint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Merge a LoRA adapter into the compressed checkpoint it was trained on; every layer keeps its number format.

    Weights are rounded to nearest, and no text is needed. A recipe with `adapter:` rounds with calibration instead.

    Example:

        smelt merge runs/quickstart --adapter ./my-adapter --output runs/tuned
    """
    from ..adapters.merge_adapter import merge as merged

    found = merged(checkpoint, adapter, output, fresh=fresh, trust_remote_code=trust_remote_code)
    print(json.dumps(found.as_data(), indent=2) if as_json else found.summary())
    return 0
