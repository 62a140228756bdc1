"""``smelt distill``: a small model that drafts for a large one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...system.errors import SmeltError
from .common.outcome import reporting_errors
from .run import run_and_print


@reporting_errors
def distill(
    model: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    for_drafting: Annotated[
        bool, typer.Option("--for-drafting", help="Make a drafter, which is trained to be accepted by the model.")
    ] = False,
    blocks: Annotated[
        int | None, typer.Option(help="How many of the model's blocks it keeps; half of them by default.", min=1)
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens to train on, such as 400k or 20M.")] = "2M",
    data: Annotated[str, typer.Option(help="Text whose beginnings the model continues, as in recipes.")] = "builtin",
    learning_rate: Annotated[float, typer.Option(help="The peak learning rate.")] = 1e-3,
    scheme: Annotated[str | None, typer.Option(help="Quantize it at last, e.g. to W4A16.")] = None,
    output: Annotated[Path, typer.Option(help="Output directory.")] = Path("runs/drafter"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan without running it.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing an earlier run.")] = False,
    processes: Annotated[int, typer.Option(help="Processes of this machine that share the work.", min=1)] = 1,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result (or the plan) as JSON.")] = False,
) -> int:
    """Distil a drafter for speculative decoding from a model, and measure what it gains.

    Some of the model's blocks are removed, and the rest learns on text that the model writes to propose the tokens that it would choose (total
    variation, which is the share that verification rejects).

    Examples:

        smelt distill ./my-llama --for-drafting --output runs/drafter

        smelt distill builtin:smelt-6m --for-drafting --blocks 2 --tokens 400k --scheme W8A16

        smelt serve ./my-llama --drafter runs/drafter/checkpoint
    """
    if not for_drafting:
        raise SmeltError(
            "smelt distill makes drafters: give --for-drafting; for any other student write a recipe with a distill step"
            " (docs/training.md)"
        )
    from ..recipe.drafting import drafter_recipe

    recipe = drafter_recipe(
        model,
        output=str(output),
        blocks=blocks,
        tokens=tokens,
        data=data,
        learning_rate=learning_rate,
        scheme=scheme,
        trust_remote_code=trust_remote_code,
    )
    return run_and_print(recipe, dry_run=dry_run, fresh=fresh, processes=processes, as_json=as_json)
