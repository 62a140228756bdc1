"""The benchmark counts what it should. How fast anything is, is no test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from smelt.compress.cli import app
from smelt.runtime import RuntimeProblem
from smelt.runtime.measure.bench import measure, table
from smelt.runtime.requests.trace import Arrival, read_trace
from typer.testing import CliRunner

from ...tiny import SMELT_6M
from ..drive import engine


def test_every_token_is_counted() -> None:
    running = engine(SMELT_6M)
    trace = [Arrival(0.0, 5, 3), Arrival(0.05, 9, 2)]
    found = measure(running, prompt=7, output=4, concurrencies=[1, 3], requests=4, trace=trace, repeats=1)
    assert [(load.name, load.requests, load.prompt_tokens, load.output_tokens) for load in found.loads] == [
        ("1 at once", 4, 28, 16),
        ("3 at once", 4, 28, 16),
        ("trace", 2, 14, 5),
    ]
    for load in found.loads:
        assert load.output_rate == pytest.approx(load.output_tokens / load.seconds)
        assert 0 < load.first_token_p50 <= load.first_token_p99 <= load.seconds
    assert not running.has_work
    assert "3 at once" in table(found)
    json.dumps(found.as_data())


def test_the_work_of_a_token_is_that_of_its_weights() -> None:
    model = engine(SMELT_6M).model
    config = json.loads((SMELT_6M / "config.json").read_text())
    hidden, wide, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    keys = config["num_key_value_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
    numbers = layers * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * wide)
    assert model.operations_per_token() == 2 * numbers
    assert model.bytes_per_token() == 4 * (numbers + hidden * config["vocab_size"])


def test_traces_are_read(shared: Path) -> None:
    azure = read_trace(shared / "data/traces/AzureLLMInferenceTrace_conv.csv", 5, 1000)
    assert [(a.prompt, a.output) for a in azure] == [(374, 44), (396, 109), (879, 55), (91, 16), (91, 16)]
    assert azure[1].at == pytest.approx(50.995169 - 46.68059, abs=1e-4)
    mooncake = read_trace(shared / "data/traces/mooncake_conversation_trace.jsonl", 3, 100_000)
    assert (mooncake[0].prompt, mooncake[0].output, mooncake[0].at) == (6758, 500, 0)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "x,y\n1,2\n", "is not a trace"),
        ("a.jsonl", "{", "is not a trace"),
        ("a.jsonl", "[" * 100_000, "is not a trace"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 3.5, "output_length": 2}\n', "is not a trace"),
        ("a.jsonl", '{"timestamp": 1e999, "input_length": 3, "output_length": 2}\n', "is not a trace"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 900, "output_length": 200}\n',
            "no request of the trace fits into 1000",
        ),
    ],
)
def test_what_is_no_trace_is_said(name: str, text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RuntimeProblem, match=sentence):
        read_trace(tmp_path / name, 5, 1000)


def test_what_the_engine_has_no_room_for_is_refused_before_any_measurement(tmp_path: Path) -> None:
    running = engine(SMELT_6M, max_model_len=64)
    with pytest.raises(
        RuntimeProblem, match="a prompt of 60 tokens and 5 to generate exceed the engine's max_model_len of 64"
    ):
        measure(running, prompt=60, output=5, concurrencies=[], requests=1)
    os.mkfifo(tmp_path / "trace.csv")
    with pytest.raises(RuntimeProblem, match="is not a file"):
        read_trace(tmp_path / "trace.csv", 5, 1000)


@pytest.mark.parametrize("length", [0, -4, 1])
def test_no_engine_is_made_for_less_than_a_token_and_the_next(length: int) -> None:
    with pytest.raises(RuntimeProblem, match=r"max_model_len is -?\d; it must be at least 2"):
        engine(SMELT_6M, max_model_len=length)


@pytest.mark.slow
def test_the_command_prints_json_and_refuses_in_a_sentence(tmp_path: Path) -> None:
    command = ["bench", "builtin:smelt-6m", "--prompt", "8", "--output", "4"]
    # In a process of its own, for its standard output must be nothing but JSON, whatever libraries print.
    done = subprocess.run(
        [sys.executable, "-m", "smelt.compress.cli", *command, "--concurrency", "2", "--requests", "2", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loads"][0]["output_tokens"] == 8
    assert found["peak_memory"] < 1e9  # the engine's, without the gigabyte that measuring the machine takes
    refused = CliRunner().invoke(app, [*command, "--trace", str(tmp_path / "none.csv")])
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].endswith(
        "none.csv: cannot be read (No such file or directory); check the path"
    )
    assert "Traceback" not in refused.stderr
