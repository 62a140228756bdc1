"""``smelt serve``: checkpoints behind HTTP."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from ...runtime import EngineConfig
from ...system.errors import SmeltError
from .engine_options import with_engine_options
from .outcome import reporting_errors


@reporting_errors
@with_engine_options
def serve(
    checkpoint: Annotated[str, typer.Argument(help="A directory, a hub name or builtin:smelt-6m.")],
    *,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call it; by default the name of its directory.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Another checkpoint, as NAME=PATH. Repeatable; models share the memory evenly."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. Only this machine reaches the default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Requests need one of these keys. Repeatable.", envvar="SMELT_API_KEY", show_envvar=True),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web pages of this origin may call the server. Repeatable; none by default."),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request.", min=1)] = 4 << 20,
    max_requests: Annotated[int, typer.Option(help="The most requests at a time; further ones get 429.", min=1)] = 1024,
    drain_seconds: Annotated[
        float, typer.Option(help="How long running requests may take after SIGTERM.", min=0)
    ] = 30.0,
    tool_call_parser: Annotated[
        str,
        typer.Option(help="The format of tool calls: auto (from the chat template), hermes, llama3_json or mistral."),
    ] = "auto",
    metrics_prefix: Annotated[
        str, typer.Option(help="Before the names of metrics; vllm for dashboards that expect vLLM.")
    ] = "smelt",
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send a span of each request there, over HTTP. Needs the extra `otel`.")
    ] = None,
    engine: EngineConfig,
) -> int:
    """Serve a checkpoint to clients of OpenAI's, Anthropic's and vLLM's APIs.

    Examples:

        smelt serve runs/quickstart/checkpoint

        smelt serve ./my-llama --model small=runs/mine/checkpoint --port 9000 --api-key "$KEY"
    """
    from ...models.directory.find import find_checkpoint
    from ...runtime.engine.engine import Engine
    from ...runtime.engine.engine_thread import EngineThread
    from ...runtime.engine.loading import loaded_apart
    from ...runtime.serve.app import Server
    from ...runtime.serve.http.config import ServerConfig
    from ...runtime.serve.model.answer_format import AnswerFormat
    from ...runtime.serve.model.models import ServedModels
    from ...runtime.serve.model.served_model import ServedModel
    from ...runtime.serve.run import listen, run

    config = ServerConfig(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        allowed_origins=tuple(allowed_origin or ()),
        max_body_bytes=max_body_bytes,
        max_requests=max_requests,
        drain_seconds=drain_seconds,
        metrics_prefix=metrics_prefix,
        otlp_endpoint=otlp_endpoint,
    )
    AnswerFormat.of(None, tool_call_parser)  # refuses a name that is not known
    found = find_checkpoint(checkpoint)
    first = served_model_name or checkpoint.rstrip("/").rpartition("/")[2].removeprefix("builtin:")
    places = {first: found.path}
    for pair in model or []:
        name, _, path = pair.partition("=")
        if not name or not path:
            raise SmeltError(f"--model {pair}: give it as NAME=PATH")
        if name in places:
            raise SmeltError(f"--model {pair}: another model is named {name} already; choose another name")
        places[name] = find_checkpoint(path).path
    # Before the models are loaded, which takes long.
    listening = listen(host, port)
    models = []
    thread = EngineThread()
    for number, (name, path) in enumerate(places.items()):
        # Each takes an even part of what the models after it leave.
        share = engine.memory_utilization / (len(places) - number)
        loaded = loaded_apart(partial(Engine, path, replace(engine, memory_utilization=share), thread=thread))
        models.append(ServedModel(name, loaded, path, tool_call_parser=tool_call_parser))
    logging.basicConfig(level=logging.INFO, format="smelt: %(message)s", stream=sys.stderr)
    server = Server(ServedModels(models), config)
    where, bound = listening.getsockname()[:2]
    at = f"[{where}]" if ":" in where else where
    print(f"smelt: serving {', '.join(places)} at http://{at}:{bound}", file=sys.stderr, flush=True)
    run(server, listening)
    return 0
