"""``smelt chat``: a conversation with a checkpoint."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Annotated

import typer

from ...runtime import EngineConfig, SamplingParams
from ...runtime.cache_types import kv_dtype_help
from .outcome import reporting_errors


@reporting_errors
def chat(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens with this total probability.")
    ] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.", min=1)] = 512,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers reproducible.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Maximum context length, in tokens.", min=2)] = None,
    kv_dtype: Annotated[str, typer.Option(help=kv_dtype_help())] = "auto",
    native: Annotated[bool, typer.Option(help="Use Smelt's compiled CPU kernels, or torch's operators.")] = True,
    device: Annotated[str, typer.Option(help="cpu, or cuda, which has not been run on a GPU yet.")] = "cpu",
    tp: Annotated[int, typer.Option(help="Processes that divide each layer between them.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Processes that have some of the layers each.", min=1)] = 1,
) -> int:
    """Chat with a checkpoint. /reset clears the conversation, /quit leaves.

    Example:

        smelt chat runs/quickstart/checkpoint --temperature 0.8
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    config = EngineConfig(
        max_length=max_length, max_sequences=1, kv_dtype=kv_dtype, native=native, device=device, tp=tp, pp=pp
    )
    from ...models.directory.find import find_checkpoint
    from ...runtime.engine.chat import Chat, converse
    from ...runtime.engine.engine import Engine

    engine = Engine(find_checkpoint(checkpoint).path, config)
    limit = min(max_tokens, max(1, engine.max_length // 2))
    if isinstance(sys.stdin, io.TextIOWrapper):  # input may be in any encoding
        sys.stdin.reconfigure(errors="replace")
    converse(
        Chat(engine, replace(params, max_tokens=limit), system), input, lambda text: print(text, end="", flush=True)
    )
    return 0
