"""A server in a thread of the test's own process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI
from smelt.runtime.engine.engine import Engine
from smelt.runtime.serve.app import Server
from smelt.runtime.serve.http.config import ServerConfig
from smelt.runtime.serve.model.loader import ModelLoader
from smelt.runtime.serve.model.models import ServedModels
from smelt.runtime.serve.model.served_model import ServedModel
from smelt.runtime.serve.run import listen

from ...tiny import SMELT_6M

# The forms of Hermes' calls, in the tokens that smelt-6m has for turns.
TEMPLATE = (
    '{% if tools %}<|system|>Call tools as <tool_call>\n{"name": …, "arguments": …}\n</tool_call>: '
    "{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content }}"
    '{% for call in message.tool_calls or [] %}<tool_call>\n{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>{% endfor %}'
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Serving:
    """A running server.

    Attributes:
        url: without a path.
        models: that it serves.
        app: the application.
        server: what it is made of.
    """

    url: str
    models: ServedModels
    app: FastAPI
    server: Server


def served(engine: Engine, name: str = "smelt-6m", *, template: str | None = TEMPLATE) -> ServedModel:
    """smelt-6m with a chat template."""
    engine.tokenizer.chat_template = template
    return ServedModel(name, engine, SMELT_6M)


@contextlib.contextmanager
def serving(
    models: list[ServedModel], config: ServerConfig | None = None, loader: ModelLoader | None = None
) -> Iterator[Serving]:
    """Serve models at a free port of this machine."""
    known = ServedModels(models)
    server = Server(known, config or ServerConfig(), loader)
    runner = uvicorn.Server(uvicorn.Config(server.app, log_level="warning", lifespan="on"))
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not runner.started:
            assert thread.is_alive(), "the server has not started"
            time.sleep(0.01)
        try:
            yield Serving(f"http://127.0.0.1:{listening.getsockname()[1]}", known, server.app, server)
        finally:
            runner.should_exit = True
            thread.join(10)
