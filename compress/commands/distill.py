"""``smelt distill``: a small model that drafts for a large one."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...system.errors import SmeltError
from .common.outcome import reporting_errors
from .run import run_and_print

if TYPE_CHECKING:
    from ..pipeline.draft_head import HeadRequest


@reporting_errors
def distill(
    model: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    for_drafting: Annotated[
        bool, typer.Option("--for-drafting", help="Make a drafter, which is trained to be accepted by the model.")
    ] = False,
    blocks: Annotated[
        int | None,
        typer.Option(
            help="How many of the model's blocks it keeps; half of them by default. With all of them and a --scheme its rounded weights learn.",
            min=1,
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens to train on, such as 400k or 20M.")] = "2M",
    data: Annotated[str, typer.Option(help="Text whose beginnings the model continues, as in recipes.")] = "builtin",
    learning_rate: Annotated[
        float | None, typer.Option(help="The peak learning rate; by default 1e-3, and 1e-4 for rounded weights.")
    ] = None,
    head: Annotated[
        bool, typer.Option("--head", help="A draft head (EAGLE-3.1): one layer that reads states of the model's.")
    ] = False,
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            help="How many tokens a draft head may draft, the most frequent; at most 32,000 by default.", min=1
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Quantize it, e.g. to W4A16. W4in8 makes the model anew, in 8 bits whose upper four learn to draft for all."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where it is trained and measured: cpu, or cuda for a GPU.")] = "cpu",
    output: Annotated[Path, typer.Option(help="Output directory.")] = Path("runs/drafter"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan without running it.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing an earlier run.")] = False,
    processes: Annotated[int, typer.Option(help="Processes of this machine that share the work.", min=1)] = 1,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result (or the plan) as JSON.")] = False,
) -> int:
    """Distil a drafter for speculative decoding from a model, and measure what it gains.

    Some of the model's blocks are removed, and the rest learns on text that the model writes to propose the tokens that it would choose (total
    variation, which is the share that verification rejects). With --scheme W4in8, or with all blocks and another scheme, its weights are
    rounded instead, and learn while they are. With --head the drafter is one new layer, which goes on with what the model's own layers make of
    the text.

    Examples:

        smelt distill ./my-llama --for-drafting --output runs/drafter

        smelt distill builtin:smelt-6m --for-drafting --blocks 2 --tokens 400k --scheme W8A16

        smelt distill ./my-llama --for-drafting --scheme W4in8 --output runs/w4in8

        smelt distill ./my-llama --for-drafting --head --scheme W4A16 --output runs/head

        smelt serve ./my-llama --drafter runs/drafter/checkpoint

        smelt serve runs/w4in8/checkpoint --drafter nested
    """
    if not for_drafting:
        raise SmeltError(
            "smelt distill makes drafters: give --for-drafting; for any other student write a recipe with a distill step"
            " (docs/training.md)"
        )
    if head:
        if blocks is not None or processes > 1 or (os.environ.get("WORLD_SIZE") or "1") != "1":
            raise SmeltError(
                "--head is one layer, trained in one process; leave --blocks and --processes out, and any launcher"
            )
        request = _head_request(model, tokens, data, learning_rate, output, device)
        request = replace(
            request, vocabulary=draft_vocabulary, scheme=scheme, device=device, trust_remote_code=trust_remote_code
        )
        return _make_head(request, dry_run=dry_run, fresh=fresh, as_json=as_json)
    if draft_vocabulary is not None:
        raise SmeltError("--draft-vocabulary is of a draft head; give it with --head")
    from ..recipe.drafting import drafter_recipe

    recipe = drafter_recipe(
        model,
        output=str(output),
        blocks=blocks,
        tokens=tokens,
        data=data,
        learning_rate=learning_rate,
        scheme=scheme,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return run_and_print(recipe, dry_run=dry_run, fresh=fresh, processes=processes, as_json=as_json)


def _head_request(
    model: str, tokens: str, data: str, learning_rate: float | None, output: Path, device: str
) -> HeadRequest:
    from ...distill.settings import Training
    from ...system.settings.checked import checked
    from ..evaluation.settings import Evaluate
    from ..pipeline.draft_head import HeadRequest
    from ..recipe.drafting import MEASURED, RATES

    settings = {
        "data": {"source": data, "writer": "teacher"},
        "tokens": tokens,
        "learning_rate": RATES["head"] if learning_rate is None else learning_rate,
        "batch": 8,
    }
    training = checked(Training, settings, lambda _, what: f"smelt distill: {what}")
    return HeadRequest(model, output, training, Evaluate.model_validate({**MEASURED, "device": device}))


def _make_head(request: HeadRequest, *, dry_run: bool, fresh: bool, as_json: bool) -> int:
    from ..pipeline.draft_head import HeadPlan, make_head

    if dry_run:
        plan = HeadPlan.make(request, fresh=fresh)
        print(json.dumps(plan.as_data(), indent=2) if as_json else plan.terminal())
        return 1 if plan.problems else 0
    result = make_head(request, fresh=fresh)
    if as_json:
        print(json.dumps({"checkpoint": str(result.checkpoint), "report": result.report.as_data()}, indent=2))
        return 0
    print(result.report.summary(colour=sys.stdout.isatty()))
    print(f"\ndraft head: {result.checkpoint}\nreport:     {result.checkpoint.parent / 'report.html'}")
    return 0
