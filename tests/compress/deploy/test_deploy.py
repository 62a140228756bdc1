"""``smelt deploy``: what is written, in the forms that the engines' documentation shows, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from smelt.compress.cli import app
from smelt.runtime import Engine, SamplingParams
from typer.testing import CliRunner

from ...tiny import SMELT_6M
from ..coded import compressed

QWEN = (
    '{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if tools %}<tool_call>{"name": …}</tool_call>{% endif %}'
    "{% if add_generation_prompt %}<think>\n\n</think>{% endif %}"
)
# Sizes that all kernels take.
EVEN: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def deploy(checkpoint: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["deploy", str(checkpoint), *options])


def text(checkpoint: Path, *options: str) -> str:
    found = deploy(checkpoint, *options)
    assert found.exit_code == 0, found.stderr
    return str(found.stdout)


@pytest.fixture
def w4(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A Qwen3 in W4A16 whose template shows tools and reasoning."""
    path = tmp_path / "My Qwen" / "checkpoint"
    shutil.copytree(compressed(tiny("qwen3", **EVEN), "W4A16", 64), path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": QWEN}))
    return path


def test_vllms_command(w4: Path) -> None:
    found = shlex.split(text(w4, "--engine", "vllm", "--max-model-len", "64", "--tensor-parallel", "2"))
    assert found == [
        "vllm", "serve", str(w4.resolve()), "--served-model-name", "my-qwen", "--host", "127.0.0.1", "--port", "8000",
        "--max-model-len", "64", "--tensor-parallel-size", "2", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--reasoning-parser", "qwen3",
    ]  # fmt: skip


def test_paths_are_quoted(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "lr=1e-4 $(touch x)"
    shutil.copytree(tiny("llama", **EVEN), path)
    assert shlex.split(text(path, "--engine", "vllm"))[2] == str(path.resolve())
    assert text(path, "--engine", "vllm", "--cpu").startswith("VLLM_CPU_KVCACHE_SPACE=4 vllm serve '")
    volume = yaml.safe_load(text(path, "--engine", "vllm", "--form", "compose"))["services"]["vllm"]["volumes"][0]
    assert volume["source"] == str(path.resolve()).replace("$", "$$")


def test_sglangs_command(w4: Path) -> None:
    found = shlex.split(text(w4, "--engine", "sglang", "--max-num-seqs", "8"))
    assert found[:4] == ["python3", "-m", "sglang.launch_server", "--model-path"]
    options = dict(zip(found[5:-1:2], found[6:-1:2], strict=True))
    assert options["--max-running-requests"] == "8"
    assert options["--tool-call-parser"] == "qwen"
    assert options["--reasoning-parser"] == "qwen3"
    assert found[-1] == "--enable-metrics"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_compose_files(w4: Path, engine: str, tmp_path: Path) -> None:
    output = tmp_path / "compose.yaml"
    options = ("--engine", engine, "--form", "compose", "--port", "9000", "--tensor-parallel", "2")
    assert text(w4, *options, "--output", str(output)) == ""
    service = yaml.safe_load(output.read_text())["services"][engine]
    (volume,) = service["volumes"]
    assert volume == {"type": "bind", "source": str(w4.resolve()), "target": "/model", "read_only": True}
    assert service["ports"] == ["127.0.0.1:9000:9000"]
    arguments = [*service.get("entrypoint", []), *service["command"]]
    assert "/model" in arguments
    assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 2


def test_rays_configuration(w4: Path) -> None:
    found = yaml.safe_load(text(w4, "--engine", "ray-llm", "--replicas", "2", "--max-model-len", "64"))
    (application,) = found["applications"]
    (model,) = application["args"]["llm_configs"]
    assert model["model_loading_config"] == {"model_id": "my-qwen", "model_source": str(w4.resolve())}
    # vLLM's own names; model and served_model_name are Ray's to set.
    assert model["engine_kwargs"] == {
        "max_model_len": 64,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
    }
    assert model["deployment_config"]["num_replicas"] == 2


def test_rays_configuration_is_ray_serves(w4: Path) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="needs Ray Serve, which is in the dev extra")
    found = yaml.safe_load(text(w4, "--engine", "ray-llm"))
    schema.ServeDeploySchema.model_validate(found)


def test_a_hubs_cache_is_mounted_with_what_its_links_lead_to(w4: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--Acme--Tiny-6M"
    snapshot = repository / "snapshots" / ("1" * 40)
    shutil.copytree(w4, repository / "blobs")
    snapshot.mkdir(parents=True)
    for file in (repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    found = yaml.safe_load(text(snapshot, "--engine", "vllm", "--form", "compose"))["services"]["vllm"]
    (volume,) = found["volumes"]
    assert volume["source"] == str(repository)
    within = Path(found["command"][0]).relative_to(volume["target"])
    assert (repository / within / "config.json").resolve().is_relative_to(repository)


def test_a_length_beyond_the_models_positions_is_refused(w4: Path) -> None:
    done = deploy(w4, "--engine", "vllm", "--max-model-len", "100000")
    assert done.exit_code == 1
    assert "--max-model-len is 100000, and the model has" in done.output


def test_llm_ds_manifests(w4: Path) -> None:
    deployment, pool, route = yaml.safe_load_all(text(w4, "--engine", "llm-d", "--replicas", "3", "--claim", "mine"))
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["replicas"] == 3
    assert pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert container["args"][0] == "/model-cache/my-qwen"
    assert {"containerPort": 8000, "name": "modelserver"} in container["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    assert pod["spec"]["volumes"][1]["persistentVolumeClaim"]["claimName"] == "mine"
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]


LOADS, REFUSES = True, False


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("scheme", "group", "vllm", "ray", "sglang"),
    [
        ("W4A16", 64, LOADS, LOADS, LOADS),
        ("W4A16_ASYM", 64, LOADS, LOADS, LOADS),
        ("W8A16", 64, LOADS, LOADS, LOADS),
        ("W3A16", 64, LOADS, LOADS, REFUSES),
        ("W2A16", 64, LOADS, LOADS, REFUSES),
        ("W4A16", 16, LOADS, LOADS, REFUSES),
        ("W8A8", None, LOADS, LOADS, LOADS),
        ("FP8_DYNAMIC", None, LOADS, LOADS, LOADS),
        ("FP8_BLOCK", None, LOADS, LOADS, LOADS),
        ("NVFP4A16", None, LOADS, LOADS, LOADS),
        ("MXFP4A16", None, LOADS, LOADS, REFUSES),
        ("W4A8", 64, LOADS, LOADS, REFUSES),
    ],
)
def test_schemes_that_engines_load(
    tiny: Callable[..., Path], scheme: str, group: int | None, vllm: bool, ray: bool, sglang: bool
) -> None:
    path = compressed(tiny("llama", **EVEN), scheme, group)
    for engine, loads in (("vllm", vllm), ("ray-llm", ray), ("sglang", sglang)):
        found = deploy(path, "--engine", engine)
        assert (found.exit_code == 0) == loads, (engine, found.stderr)
        if not loads:
            assert "cannot load" in found.stderr
            assert found.stdout == ""


def changed(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    for name, value in changes.items():
        place = config
        *parents, last = name.split("__")
        for parent in parents:
            place = place[parent]
        place[last] = value
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_reasons_are_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    def says(path: Path, *options: str) -> str:
        found = deploy(path, *options)
        assert found.exit_code == 1, found.stdout
        return str(found.stderr)

    uneven = compressed(tiny("llama", **(EVEN | {"intermediate_size": 320})), "W4A16", 64)
    assert "64 rows and 128 columns" in says(uneven, "--engine", "sglang")
    assert deploy(uneven, "--engine", "vllm").exit_code == 0
    assert "no whole groups of 64" in says(uneven, "--engine", "vllm", "--tensor-parallel", "2")
    assert "4 attention heads cannot be shared by 3 GPUs" in says(uneven, "--engine", "vllm", "--tensor-parallel", "3")
    shared = tiny(
        "llama", **(EVEN | {"hidden_size": 384, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 32})
    )
    assert "4 heads of keys and values" in says(shared, "--engine", "vllm", "--tensor-parallel", "6")
    ordered = compressed(tiny("llama", **EVEN), "W4A16", 64)
    changed(ordered, quantization_config__config_groups__group_0__weights__actorder="group")
    assert "activation order" in says(ordered, "--engine", "vllm")

    w4 = compressed(tiny("llama", **EVEN), "W4A16", 64)
    kept = changed(w4, quantization_config__kv_cache_scheme={"num_bits": 8, "type": "int", "strategy": "tensor"})
    assert "KV cache in another format" in says(kept, "--engine", "vllm")
    assert "keys and values are not quantized there" in deploy(kept, "--engine", "sglang").stderr

    sparse = changed(
        compressed(tiny("llama", **EVEN), "W4A16", 64), quantization_config__sparsity_config={"targets": ["Linear"]}
    )
    assert "2:4 sparsity" in says(sparse, "--engine", "vllm")

    unnamed = changed(compressed(tiny("llama", **EVEN), "W4A16", 64), quantization_config__ignore=[])
    assert "lm_head is neither quantized nor in ignore" in says(unnamed, "--engine", "sglang")

    gptq = changed(
        tiny("llama", **EVEN),
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
    )
    assert "desc_act" in says(gptq, "--engine", "vllm")
    assert "bitsandbytes" in says(
        changed(gptq, quantization_config={"quant_method": "bitsandbytes"}), "--engine", "vllm"
    )


def test_parts_of_one_matrix_must_be_stored_alike(tiny: Callable[..., Path]) -> None:
    """vLLM itself would take the first one's scheme for all, and compute nonsense."""
    path = compressed(tiny("llama", **EVEN), "W8A16", 64)
    config = json.loads((path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    (group,) = groups.values()
    other = json.loads(json.dumps(group))
    other["weights"]["group_size"] = 32
    names = [f"model.layers.{i}.self_attn.k_proj" for i in range(2)]
    config["quantization_config"]["config_groups"] = {"group_0": {**other, "targets": names}, "group_1": group}
    (path / "config.json").write_text(json.dumps(config))
    found = deploy(path, "--engine", "vllm")
    assert found.exit_code == 1
    assert "fuses q_proj, k_proj, v_proj" in found.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--engine", "vlm"], "--engine vlm: it must be vllm"),
        (["--engine", "vllm", "--form", "manifest"], "vllm has command and compose"),
        (["--engine", "vllm", "--name", "a b"], "--name 'a b'"),
        (["--engine", "sglang", "--cpu"], "--cpu is for vllm"),
        (["--engine", "vllm", "--replicas", "2"], "starts one engine"),
        (["--engine", "vllm", "--output", "/not/there/x"], "/not/there"),
    ],
)
def test_wrong_options_get_one_sentence(options: list[str], says: str) -> None:
    found = deploy(SMELT_6M, *options)
    assert found.exit_code == 1
    assert says in found.stderr
    assert found.stderr.count("\n") == 1


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], place: Path, port: int) -> Iterator[str]:
    # Not in the repository, whose entry points that Python would find and could not load.
    process = subprocess.Popen(
        command, env=environment, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        ends = time.monotonic() + 300
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{url}/health").status_code == 200:
                    break
            assert process.poll() is None, "vLLM has ended"
            assert time.monotonic() < ends
            time.sleep(1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_vllm_serves_what_the_command_says(tiny: Callable[..., Path], tmp_path: Path, scheme: str) -> None:
    python = os.environ.get("SMELT_VLLM_PYTHON")
    if python is None:
        pytest.skip("SMELT_VLLM_PYTHON does not name a Python with vLLM")
    path = compressed(tiny("llama", **EVEN), scheme, 64 if scheme == "W4A16" else None)
    words = shlex.split(
        text(path, "--engine", "vllm", "--cpu", "--port", "8517", "--name", "mine", "--max-model-len", "96")
    )
    settings = dict(word.split("=", 1) for word in words[: words.index("vllm")])
    # What `vllm serve` is; the CPU build's own script looks for a distribution of another name.
    _, _, model, *options = words[words.index("vllm") :]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment |= settings | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    prompt = list(range(5, 29))
    with _running(command, environment, tmp_path, 8517) as url:
        body = {"model": "mine", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5}
        theirs = httpx2.post(f"{url}/v1/completions", json=body, timeout=120).json()
    ours = Engine(path, quiet=True).generate([prompt], SamplingParams(temperature=0, max_tokens=1, logprobs=1))[0]
    top = theirs["choices"][0]["logprobs"]["top_logprobs"][0]
    logprobs = ours.outputs[0].logprobs
    assert logprobs is not None
    assert max(top.values()) == pytest.approx(max(logprobs[0].values()), abs=0.25)
