"""``smelt serve``: checkpoints behind HTTP."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...runtime import EngineConfig
from ...system.errors import SmeltError
from .common.engine_options import with_engine_options
from .common.outcome import reporting_errors

if TYPE_CHECKING:
    from ...runtime.serve.http.config import ServerConfig
    from ...runtime.serve.model.loader import ModelLoader
    from ...runtime.serve.replicas.replica import ReplicaPlan


@reporting_errors
@with_engine_options("seed")
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
    lora: Annotated[
        list[str] | None,
        typer.Option(help="A LoRA adapter of the first checkpoint, as NAME=PATH, served beside it. Repeatable."),
    ] = None,
    max_models: Annotated[
        int | None,
        typer.Option(help="How many models share the memory; by default those that are named here.", min=1),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            help="How many engines share the requests, on Ray Serve: on this machine, or on the cluster of RAY_ADDRESS."
            " Needs the extra `ray`.",
            min=1,
        ),
    ] = 1,
    host: Annotated[str, typer.Option(help="Where to listen. Only this machine reaches the default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Requests need one of these keys. Repeatable; by default those of the variable SMELT_API_KEY, a line each.",
            show_default=False,
        ),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Lets requests with this key load and unload models and adapters. Repeatable; by default those of the variable SMELT_ADMIN_KEY, a line each.",
            show_default=False,
        ),
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
    chat_template: Annotated[
        str | None,
        typer.Option(help="A Jinja template, or its file, instead of the models' own.", show_default=False),
    ] = None,
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(
            help="How tokens are chosen if a request does not say: auto (as the models' generation_config.json has it) or none."
        ),
    ] = "auto",
    stream_interval: Annotated[
        int,
        typer.Option(
            help="Every how many tokens a stream has an event, besides its first and last. More cost less, with many streams.",
            min=1,
        ),
    ] = 1,
    log_requests: Annotated[bool, typer.Option(help="Log each request when it has been answered.")] = True,
    log_format: Annotated[str, typer.Option(help="text, or json: an object a line, with a request's fields.")] = "text",
    metrics_prefix: Annotated[
        str, typer.Option(help="Before the names of metrics; vllm for dashboards that expect vLLM.")
    ] = "smelt",
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send a span of each request there, over HTTP. Needs the extra `otel`.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes answers to requests without a seed reproducible, if they come in the same order.", min=0
        ),
    ] = None,
    engine: EngineConfig,
) -> int:
    """Serve a checkpoint to clients of OpenAI's, Anthropic's and vLLM's APIs.

    Examples:

        smelt serve runs/quickstart/checkpoint

        smelt serve ./my-llama --model small=runs/mine/checkpoint --port 9000 --api-key "$KEY"
    """
    from ...models.text.chat_template import given_template
    from ...runtime.engine.ranks.worker import work_unless_first
    from ...runtime.parallel.launch import launched_count
    from ...runtime.serve.http.config import ServerConfig
    from ...runtime.serve.model.answer_format import AnswerOptions
    from ...runtime.serve.model.loader import ModelLoader
    from ...runtime.serve.replicas.replica import ReplicaPlan

    if replicas > 1 and launched_count() > 1:
        raise SmeltError("--replicas starts its processes itself, but a launcher has started this one; use one of them")
    if engine.ranks > 1:
        work_unless_first(engine)
    engine = replace(engine, seed=secrets.randbits(62) if seed is None else seed)
    config = ServerConfig(
        host=host,
        port=port,
        api_keys=_keys(api_key, "SMELT_API_KEY"),
        admin_keys=_keys(admin_key, "SMELT_ADMIN_KEY"),
        allowed_origins=tuple(allowed_origin or ()),
        max_body_bytes=max_body_bytes,
        max_requests=max_requests,
        drain_seconds=drain_seconds,
        log_requests=log_requests,
        log_format=log_format,
        metrics_prefix=metrics_prefix,
        otlp_endpoint=otlp_endpoint,
    )
    template = None if chat_template is None else given_template(chat_template)
    answers = AnswerOptions(tool_call_parser, template, stream_interval, generation_config)
    models = _named(checkpoint, served_model_name, model or [], lora or [], max_models)
    if replicas > 1:
        _refuse_with_replicas(seed, config, max_models)
        return _serve_replicas(
            ReplicaPlan(models.checkpoints, models.adapters, engine, config, answers), replicas, config
        )
    return _serve_here(models, ModelLoader(engine, models.share, answers), config)


@dataclass(frozen=True)
class _Models:
    """What the command line names: paths by the names that requests use, and among how many models memory is shared."""

    checkpoints: dict[str, Path]
    adapters: dict[str, str]
    share: int


def _named(checkpoint: str, name: str | None, others: list[str], loras: list[str], max_models: int | None) -> _Models:
    from ...models.directory.find import find_checkpoint
    from ...models.structure.lora import Adapter

    places = {name or _name(checkpoint): checkpoint}
    for pair in others:
        other, place = _pair("--model", pair, places)
        places[other] = place
    adapters: dict[str, str] = {}
    for pair in loras:
        adapter, place = _pair("--lora", pair, {**places, **adapters})
        Adapter(Path(place))  # refuses what is none
        adapters[adapter] = place
    share = max_models or len(places)
    if share < len(places):
        raise SmeltError(f"--max-models is {share}, but {len(places)} models are named; raise it, or leave it out")
    return _Models({each: find_checkpoint(place).path for each, place in places.items()}, adapters, share)


def _refuse_with_replicas(seed: int | None, config: ServerConfig, max_models: int | None) -> None:
    """Refuse options that are of one engine."""
    if seed is not None:
        raise SmeltError("--seed is of one engine, and which of --replicas answers is not known; leave one of them out")
    if config.admin_keys:
        raise SmeltError("--admin-key loads models into one engine; leave it out, or --replicas")
    if max_models is not None:
        raise SmeltError(
            "--max-models is for models that are loaded while one engine runs; leave it out, or --replicas"
        )


def _serve_here(named: _Models, loader: ModelLoader, config: ServerConfig) -> int:
    from ...runtime.serve.app import Server
    from ...runtime.serve.http.log import log_to
    from ...runtime.serve.model.loader import load_all
    from ...runtime.serve.model.models import ServedModels
    from ...runtime.serve.run import listen, run

    listening = listen(config.host, config.port)  # before the models are loaded, which takes long
    models = load_all(loader, named.checkpoints, named.adapters)
    for each in models:
        if each.defaults and each.base is None:
            said = ", ".join(f"{name} {value:g}" for name, value in each.defaults.items())
            print(
                f"smelt: {each.name} answers with {said} (its generation_config.json) unless requests say otherwise",
                file=sys.stderr,
            )
    log_to(sys.stderr, config.log_format)
    server = Server(ServedModels(models), config, loader)
    _say([model.name for model in models], listening)
    run(server, listening)
    return 0


def _serve_replicas(plan: ReplicaPlan, count: int, config: ServerConfig) -> int:
    from ...runtime.serve.http.log import log_to
    from ...runtime.serve.replicas.cluster import replicas
    from ...runtime.serve.run import listen, run

    listening = listen(config.host, config.port)
    print(f"smelt: starting {count} replicas on Ray Serve", file=sys.stderr, flush=True)
    with replicas(plan, count, config) as front:
        log_to(sys.stderr, config.log_format)
        _say([*plan.models, *plan.adapters], listening)
        run(front, listening)
    return 0


def _name(checkpoint: str) -> str:
    """What requests call a model: its directory, or its run's."""
    path = Path(checkpoint).expanduser()
    if not path.is_dir():
        return checkpoint.rstrip("/").rpartition("/")[2].removeprefix("builtin:")
    path = path.resolve()
    return path.parent.name if path.name == "checkpoint" else path.name


def _keys(given: list[str] | None, variable: str) -> tuple[str, ...]:
    """Keys of the command line, otherwise of a variable: a key may have spaces, but no line breaks."""
    return tuple(given or [line.strip() for line in os.environ.get(variable, "").splitlines() if line.strip()])


def _say(models: list[str], listening: socket.socket) -> None:
    where, bound = listening.getsockname()[:2]
    at = f"[{where}]" if ":" in where else where
    print(f"smelt: serving {', '.join(models)} at http://{at}:{bound}", file=sys.stderr, flush=True)


def _pair(option: str, text: str, known: Collection[str]) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise SmeltError(f"{option} {text}: give it as NAME=PATH")
    if name in known:
        raise SmeltError(f"{option} {text}: another model is named {name} already; choose another name")
    return name, path
