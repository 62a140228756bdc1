"""The APIs through OpenAI's and Anthropic's packages for Node: `make test-node`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from smelt.runtime import SamplingParams
from smelt.runtime.engine.engine import Engine

from .openai.test_chat import MESSAGES, WEATHER
from .serving import Serving

PROMPT = "London is the capital of"
NODE, MODULES = shutil.which("node"), os.environ.get("SMELT_NODE_MODULES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NODE is None or MODULES is None, reason="needs node and npm; run it with make test-node"),
]


@pytest.fixture(scope="module")
def seen(server: Serving) -> dict[str, Any]:
    """What the packages have made of the server's answers."""
    assert NODE is not None
    assert MODULES is not None
    given = json.dumps({"prompt": PROMPT, "messages": MESSAGES, "tool": WEATHER})
    command = [NODE, str(Path(__file__).with_name("node_clients.cjs")), server.url, given]
    done = subprocess.run(
        command, check=False, env={**os.environ, "NODE_PATH": MODULES}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def said(engine: Engine, prompt: str) -> str | None:
    """The engine's own greedy continuation."""
    return engine.generate(prompt, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text


def test_texts_are_the_engines(seen: dict[str, Any], engine: Engine) -> None:
    chat = said(engine, "<|system|>Be short.<|end|><|user|>Where is London?<|end|><|assistant|>")
    assert seen["completion"]["text"] == said(engine, PROMPT)
    assert seen["whole"] == seen["streamed"] == seen["response"] == chat
    assert seen["message"] == said(engine, "<|user|>Where is London?<|end|><|assistant|>")
    assert seen["completion"]["usage"]["completion_tokens"] == 16


def test_calls_are_assembled(seen: dict[str, Any]) -> None:
    (call,) = seen["tool"]["calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])
    assert seen["tool"]["finish_reason"] == "tool_calls"
    (block,) = seen["chosen"]["content"]
    assert (block["type"], block["name"], seen["chosen"]["stop_reason"]) == ("tool_use", "get_weather", "tool_use")
    jsonschema.validate(block["input"], WEATHER["function"]["parameters"])


def test_lists_and_numbers_are_read(seen: dict[str, Any], server: Serving, engine: Engine) -> None:
    assert seen["models"] == [["smelt-6m"], ["smelt-6m"]]
    assert len(seen["embedding"]) == engine.model.spec.hidden
    # The package asks for base64 and decodes it; JSON's numbers are the same.
    body = {"model": "smelt-6m", "input": PROMPT}
    numbers = httpx2.post(f"{server.url}/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert seen["embedding"] == pytest.approx(numbers, abs=1e-6)
    prompt = engine.tokenizer("<|user|>Where is London?<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    assert seen["counted"] == len(prompt)


def test_refusals_have_the_packages_own_classes(seen: dict[str, Any]) -> None:
    for name, kind, status in (
        ("too_long", "BadRequestError", 400), ("too_long_message", "BadRequestError", 400), ("unknown", "NotFoundError", 404),
    ):  # fmt: skip
        assert (seen[name]["kind"], seen[name]["status"]) == (kind, status)
    assert "prompt is too long" in seen["too_long_message"]["message"]
