"""``smelt deploy``: a checkpoint on another engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from ...system.errors import SmeltError, nearest_name
from ..deploy.options import FORMS, DeployOptions, EngineName, Form
from .common.outcome import reporting_errors


@reporting_errors
def deploy(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a run's output directory or a hub name.")],
    *,
    engine: Annotated[str, typer.Option(help=f"Which engine: {', '.join(get_args(EngineName))}.")],
    form: Annotated[
        str | None, typer.Option(help="command or compose (vllm, sglang), config (ray-llm), manifest (llm-d).")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What requests call the model; default: its directory's.")] = None,
    port: Annotated[int, typer.Option(help="Where the engine listens.", min=1, max=65535)] = 8000,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share each layer.", min=1)] = 1,
    replicas: Annotated[int, typer.Option(help="Engines that share the requests (ray-llm, llm-d).", min=1)] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="The most tokens of a sequence.", min=1)] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="The most sequences at once.", min=1)] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="For vLLM's CPU build.")] = False,
    claim: Annotated[str, typer.Option(help="llm-d's volume claim that has the checkpoint.")] = "model-pvc",
    output: Annotated[Path | None, typer.Option(help="Write to FILE instead of standard output.")] = None,
) -> int:
    """Check that another engine loads a checkpoint, and print what starts it there.

    Examples:

        smelt deploy runs/mine/checkpoint --engine vllm

        smelt deploy runs/mine/checkpoint --engine sglang --form compose --output compose.yaml

        smelt deploy runs/mine/checkpoint --engine ray-llm --tensor-parallel 2 --replicas 4
    """
    if engine not in FORMS:
        raise SmeltError(f"--engine {engine}: it must be {', '.join(FORMS)}{nearest_name(engine, list(FORMS))}")
    from ...system.storage.files import write_text
    from ..deploy.deploy import deployment

    chosen = cast(EngineName, engine)
    called = name or _name(checkpoint)
    options = DeployOptions(
        engine=chosen,
        form=cast(Form, form or FORMS[chosen][0]),
        name=called,
        port=port,
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        cpu=cpu,
        claim=claim,
    )
    found = deployment(checkpoint, options)
    for note in found.notes:
        print(f"smelt: note: {note}", file=sys.stderr)
    if output is None:
        sys.stdout.write(found.text)
    else:
        write_text(output, found.text)
    return 0


def _name(checkpoint: str) -> str:
    """A hub name's or a directory's last part, or its run's, as a name that all engines take."""
    given = Path(checkpoint).expanduser()
    named = given.resolve() if given.is_dir() else Path(checkpoint.removeprefix("builtin:"))
    named = named.parent if named.name == "checkpoint" else named
    kept = "".join(each if each.isalnum() and each.isascii() else "-" for each in named.name.lower())
    kept = kept.strip("-")[:59].strip("-")
    return kept if kept[:1].isalpha() else f"model-{kept}"[:59].strip("-")
