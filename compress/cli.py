"""The command line: ``smelt run``, ``smelt inspect``, ``smelt schema``."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from .errors import SmeltError

app = typer.Typer(
    name="smelt",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Make language models smaller, and prove what it cost.

    Try it (no network needed):

    - `smelt run recipes/quickstart.yaml` compresses a bundled model to 4 bits and reports the loss

    - `smelt run recipes/quickstart.yaml --dry-run` says what that would take, and what would fail

    - `smelt run recipes/quickstart.yaml --set model=./my-llama --output runs/mine` does it to your model

    - `smelt inspect runs/quickstart/checkpoint` shows where the bytes are

    An interrupted run continues when the same command is given again.
    """,
)

_INTERRUPTED = 130
P = ParamSpec("P")


def main() -> None:
    """Entry point of the ``smelt`` command."""
    app()


def _told(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn what can go wrong into one sentence on standard error and an exit status."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            status = command(*args, **kwargs) or 0
        except SmeltError as error:
            status = _say(str(error), 1)
        except KeyboardInterrupt:
            status = _say("interrupted; the same command continues where this one stopped", _INTERRUPTED)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
                raise
            advice = "the same command continues where this one stopped; --dry-run says what it needs"
            status = _say(f"out of memory; lower calibrate.samples or free some: {advice}", 1)
        raise typer.Exit(status)

    return guarded


def _say(text: str, status: int) -> int:
    for line in text.split("\n"):
        print(f"smelt: {line}", file=sys.stderr)
    return status


@app.command()
@_told
def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe, such as recipes/quickstart.yaml.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a field, e.g. `steps.0.quantize.scheme=W8A16`. Repeatable."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where the result goes, instead of the recipe's output.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; change nothing.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing an earlier run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result (or the plan) as JSON.")] = False,
) -> int:
    """Do what a recipe says, and report what it cost.

    Examples:

        smelt run recipes/quickstart.yaml

        smelt run recipes/quickstart.yaml --set steps.0.quantize.rounding=nearest --output runs/nearest

        smelt run recipes/quickstart.yaml --dry-run --json
    """
    from .recipe import Recipe

    overrides = [*(set_ or []), *([f"output={json.dumps(str(output), ensure_ascii=False)}"] if output else [])]
    loaded = Recipe.load(recipe, overrides)
    if dry_run:
        return _print_plan(loaded, fresh, as_json)
    from .pipeline import run as run_recipe

    result = run_recipe(loaded, fresh=fresh)
    if as_json:
        print(json.dumps({"checkpoint": str(result.checkpoint), "report": result.report.data}, indent=2))
        return 0
    print(result.report.terminal())
    print(f"\ncheckpoint: {result.checkpoint}\nreport:     {result.checkpoint.parent / 'report.md'}")
    return 0


def _print_plan(recipe: Any, fresh: bool, as_json: bool) -> int:
    from .plan import Plan

    plan = Plan.make(recipe, fresh=fresh)
    print(json.dumps(plan.as_data(), indent=2) if as_json else plan.terminal())
    return 1 if plan.problems else 0


@app.command()
@_told
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Show how a checkpoint's tensors are stored, and how much smaller it is than the original.

    Example:

        smelt inspect runs/quickstart/checkpoint
    """
    from .inspection import inspect as look
    from .inspection import terminal

    found = look(checkpoint)
    if as_json:
        print(json.dumps(found.as_data(), indent=2))
    else:
        terminal(found)
    return 0


@app.command()
@_told
def schema() -> int:
    """Print the JSON schema of recipes, for editors that complete and check YAML.

    Example:

        smelt schema > recipes/recipe.schema.json
    """
    from .recipe_schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))
    return 0


if __name__ == "__main__":
    main()
