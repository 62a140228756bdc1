"""``smelt chat``: a conversation with a checkpoint."""

from __future__ import annotations

import io
import secrets
import sys
from dataclasses import replace
from typing import Annotated

import typer

from ...runtime import EngineConfig, SamplingParams
from .common.engine_options import with_engine_options
from .common.outcome import reporting_errors


@reporting_errors
@with_engine_options("max_num_seqs", "seed")
def chat(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens with this total probability.")
    ] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.", min=1)] = 512,
    chat_template: Annotated[
        str | None,
        typer.Option(help="A Jinja template, or its file, instead of the model's own.", show_default=False),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers reproducible.")] = None,
    *,
    engine: EngineConfig,
) -> int:
    """Chat with a checkpoint. /reset clears the conversation, /quit leaves.

    Example:

        smelt chat runs/quickstart/checkpoint --temperature 0.8
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    from ...models.directory.find import find_checkpoint
    from ...models.text.chat_template import given_template
    from ...runtime.engine.chat import Chat, converse
    from ...runtime.engine.engine import Engine

    template = None if chat_template is None else given_template(chat_template)
    loaded = Engine(find_checkpoint(checkpoint).path, replace(engine, max_num_seqs=1, seed=secrets.randbits(62)))
    if template is not None and loaded.tokenizer is not None:
        loaded.tokenizer.chat_template = template
    limit = min(max_tokens, max(1, loaded.max_model_len // 2))
    if isinstance(sys.stdin, io.TextIOWrapper):  # input may be in any encoding
        sys.stdin.reconfigure(errors="replace")
    converse(
        Chat(loaded, replace(params, max_tokens=limit), system), input, lambda text: print(text, end="", flush=True)
    )
    return 0
