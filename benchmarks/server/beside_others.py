"""smelt serve, vLLM, llama.cpp's server and transformers serve on one model and one load, driven by guidellm, by turns in one run.

    python -m benchmarks.server.beside_others --guidellm BIN/guidellm --vllm BIN/python --llama llama-server --gguf smelt-6m-BF16.gguf
        --transformers BIN/transformers

Each program comes from an environment of its own; those that are not named are left out. The model is smelt-6m in bfloat16, all servers
have both cores, 128 prompt tokens and 64 output tokens a request, greedy. One server runs at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from smelt.models.directory.find import find_checkpoint

from ..common import parser, save

_PROMPT, _OUTPUT = 128, 64
_REQUESTS = {1: 40, 8: 160, 32: 320}
_OFFLINE = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """A server.

    Attributes:
        name: for the table.
        command: that starts it on a port.
        model: what requests call the model.
        ignores_end: whether it takes ``ignore_eos``; otherwise the end token is given as one that never comes.
    """

    name: str
    command: list[str]
    model: str
    ignores_end: bool = True


def contenders(given: argparse.Namespace, model: Path, port: int) -> list[Contender]:
    """Those whose programs were named, and smelt serve."""
    at = ["--host", "127.0.0.1", "--port", str(port)]
    smelt = [sys.executable, "-m", "smelt.compress", "serve", str(model), "--served-model-name", "model", *at]
    found = [
        Contender("smelt serve", [*smelt, "--no-log-requests"], "model"),
        Contender(
            "smelt serve, an event each 8 tokens", [*smelt, "--no-log-requests", "--stream-interval", "8"], "model"
        ),
    ]
    if given.vllm:
        module = [given.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        found.append(Contender("vLLM", [*module, "--served-model-name", "model", *at], "model"))
    if given.llama:
        options = [
            "-m",
            given.gguf,
            "--alias",
            "model",
            "-t",
            "2",
            "-tb",
            "2",
            "-np",
            "32",
            "-c",
            str(32 * 1024),
            "--offline",
        ]
        found.append(
            Contender("llama.cpp", [given.llama, *options, "--no-cache-prompt", "--cache-ram", "0", *at], "model")
        )
    if given.transformers:
        options = [
            "--device",
            "cpu",
            "--continuous-batching",
            "--cb-num-blocks",
            "128",
            "--cb-max-batch-tokens",
            "1024",
        ]
        command = [given.transformers, "serve", str(model), *options, *at]
        found.append(Contender("transformers serve", command, str(model), ignores_end=False))
    return found


@contextlib.contextmanager
def running(contender: Contender, port: int) -> Iterator[str]:
    """A server, once it answers."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | _OFFLINE
    if contender.command[0] == sys.executable:
        environment |= {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
    process = subprocess.Popen(contender.command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        ends = time.monotonic() + 300
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"{contender.name} has not started: {' '.join(contender.command)}")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def driven(
    guidellm: str, url: str, contender: Contender, model: Path, at_once: int, seed: int, place: Path
) -> dict[str, Any]:
    """What guidellm measures with so many requests at once."""
    body: dict[str, Any] = {"temperature": 0}
    backend: dict[str, Any] = {
        "kind": "openai_http", "target": url, "model": contender.model, "request_format": "/v1/completions", "http2": False,
    }  # fmt: skip
    data = f"kind=synthetic_text,prompt_tokens={_PROMPT}"
    if contender.ignores_end:
        data += f",output_tokens={_OUTPUT}"
    else:
        body = {"generation_config": json.dumps({"do_sample": False, "eos_token_id": -1, "pad_token_id": 1}), **body}
        backend["max_tokens"] = _OUTPUT
    backend["extras"] = {"body": body}
    file = place / "result.json"
    command = [
        guidellm, "run", "--backend", json.dumps(backend), "--profile", json.dumps({"kind": "concurrent", "streams": [at_once]}),
        "--constraint", f"kind=max_requests,count={_REQUESTS[at_once]}", "--tokenizer", f"kind=hf_auto,model={model}",
        "--data", data, "--seed", f"kind=static,value={seed}", "--output", f"kind=json,path={file}", "--disable-progress",
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | _OFFLINE
    environment |= {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "NO_COLOR": "1"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    (run,) = json.loads(file.read_text())["benchmarks"]
    metrics = run["metrics"]

    def middle(name: str) -> float:
        return float(metrics[name]["successful"]["median"])

    return {
        "completed": metrics["request_totals"]["successful"],
        "errors": metrics["request_totals"]["errored"],
        "tokens_per_second": float(metrics["output_tokens_per_second"]["successful"]["mean"]),
        "first_token_ms": middle("time_to_first_token_ms"),
        "between_tokens_ms": middle("inter_token_latency_ms"),
        "output_tokens": middle("output_token_count"),
    }


def _command(given: argparse.Namespace) -> str:
    """Without where the programs are on this machine."""
    named = [f"--{name} …" for name in ("guidellm", "vllm", "llama", "gguf", "transformers") if getattr(given, name)]
    return " ".join(["python -m benchmarks.server.beside_others", f"--turns {given.turns}", *named])


def main() -> None:
    """Run it."""
    options = parser(__doc__)
    for name in ("guidellm", "vllm", "llama", "gguf", "transformers"):
        options.add_argument(f"--{name}", required=name == "guidellm")
    options.add_argument("--turns", type=int, default=5)
    given = options.parse_args()
    model = find_checkpoint("builtin:smelt-6m").path
    port = 8519
    runs: dict[str, dict[int, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as place:
        for turn in range(given.turns):
            for contender in contenders(given, model, port):
                with running(contender, port) as url:
                    for at_once in _REQUESTS:
                        # Other prompts each time; the first few requests of a server are a warm-up.
                        if at_once == 1:
                            driven(given.guidellm, url, contender, model, 1, 1000 + turn, Path(place))
                        found = driven(
                            given.guidellm, url, contender, model, at_once, 100 * turn + at_once, Path(place)
                        )
                        runs.setdefault(contender.name, {}).setdefault(at_once, []).append(found)
                        print(turn, contender.name, at_once, found, flush=True)
    medians = {
        name: {
            at_once: {key: statistics.median(each[key] for each in found) for key in found[0]}
            for at_once, found in loads.items()
        }
        for name, loads in runs.items()
    }
    results = {"turns": given.turns, "prompt": _PROMPT, "output": _OUTPUT, "medians": medians, "runs": runs}
    print(save("http_beside_others", _command(given), results))


if __name__ == "__main__":
    main()
