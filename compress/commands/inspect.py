"""``smelt inspect``: how a model's tensors are stored."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .common.outcome import reporting_errors


@reporting_errors
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Show how a checkpoint's tensors are stored, and how much smaller it is than the original.

    Example:

        smelt inspect runs/quickstart/checkpoint
    """
    from ...models.directory.inspection import inspect as look
    from ...models.directory.inspection import terminal

    found = look(checkpoint)
    if as_json:
        print(json.dumps(found.as_data(), indent=2))
    else:
        terminal(found)
    return 0
