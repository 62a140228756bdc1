"""What starts an engine: a shell command, a compose file, Ray's configuration, or Kubernetes manifests."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from .options import DeployOptions
from .template_parsers import TemplateParsers

VLLM_IMAGE = "vllm/vllm-openai:v0.33.0"
VLLM_CPU_IMAGE = "vllm/vllm-openai-cpu:v0.33.0-x86_64"
SGLANG_IMAGE = "lmsysorg/sglang:v0.5.23"
_INSIDE = "/model"
_CPU = {"VLLM_CPU_KVCACHE_SPACE": "4"}
_OFFLINE = {"HF_HUB_OFFLINE": "1"}


def written(checkpoint: Path, options: DeployOptions, parsers: TemplateParsers) -> str:
    """The text that starts an engine on a checkpoint.

    Args:
        checkpoint: its directory.
        options: the options.
        parsers: of tool calls and reasoning.
    """
    match options.engine, options.form:
        case "ray-llm", _:
            return _yaml(_ray(checkpoint, options, parsers), _RAY_HEAD)
        case "llm-d", _:
            return _llm_d(checkpoint, options, parsers)
        case engine, "command":
            arguments = _arguments(engine, str(checkpoint), options, parsers, "127.0.0.1")
            environment = [f"{name}={value}" for name, value in _CPU.items()] if options.cpu else []
            return " ".join([*environment, shlex.join(arguments)]) + "\n"
        case engine, _:
            return _yaml(_compose(engine, checkpoint, options, parsers), _COMPOSE_HEAD)


def _arguments(engine: str, model: str, options: DeployOptions, parsers: TemplateParsers, host: str) -> list[str]:
    """The command of vLLM or SGLang."""
    begin = (
        ["vllm", "serve", model]
        if engine == "vllm"
        else ["python3", "-m", "sglang.launch_server", "--model-path", model]
    )
    names = _VLLM if engine == "vllm" else _SGLANG
    found = [*begin, "--served-model-name", options.name, "--host", host, "--port", str(options.port)]
    for option, value in (
        ("max_model_len", options.max_model_len),
        ("max_num_seqs", options.max_num_seqs),
        ("tensor_parallel", options.tensor_parallel if options.tensor_parallel > 1 else None),
    ):
        if value is not None:
            found += [names[option], str(value)]
    tools, reasoning = (
        (parsers.tools, parsers.reasoning) if engine == "vllm" else (parsers.sglang_tools, parsers.sglang_reasoning)
    )
    if tools is not None:
        found += (["--enable-auto-tool-choice"] if engine == "vllm" else []) + ["--tool-call-parser", tools]
    if reasoning is not None:
        found += ["--reasoning-parser", reasoning]
    return [*found, "--enable-metrics"] if engine == "sglang" else found


_VLLM = {
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "tensor_parallel": "--tensor-parallel-size",
}
_SGLANG = {
    "max_model_len": "--context-length",
    "max_num_seqs": "--max-running-requests",
    "tensor_parallel": "--tp-size",
}


_COMPOSE_HEAD = "Start with: docker compose -f THIS_FILE up"


def _compose(engine: str, checkpoint: Path, options: DeployOptions, parsers: TemplateParsers) -> dict[str, Any]:
    mounted, within = _mounted(checkpoint)
    arguments = _arguments(engine, _INSIDE + within, options, parsers, "0.0.0.0")
    port = options.port
    service: dict[str, Any] = {
        "image": SGLANG_IMAGE if engine == "sglang" else VLLM_CPU_IMAGE if options.cpu else VLLM_IMAGE,
        "ipc": "host",
        # From other machines only if you change this.
        "ports": [f"127.0.0.1:{port}:{port}"],
        "volumes": [{"type": "bind", "source": _escaped(str(mounted)), "target": _INSIDE, "read_only": True}],
        "environment": {**_OFFLINE, **(_CPU if options.cpu else {})},
        "healthcheck": {
            "test": ["CMD-SHELL", f"curl -f http://localhost:{port}/health || exit 1"],
            "interval": "10s",
            "timeout": "5s",
            "retries": 60,
            "start_period": "120s",
        },
    }
    if engine == "sglang":
        service |= {"entrypoint": arguments[:3], "command": arguments[3:]}
    else:
        service["command"] = arguments[2:]  # the image's entrypoint is vllm serve
    if not options.cpu:
        device = {"driver": "nvidia", "count": options.tensor_parallel, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return {"services": {engine: service}}


def _mounted(checkpoint: Path) -> tuple[Path, str]:
    """What a container needs of a checkpoint, and where in it that is: files of a hub's cache are links to beside their snapshot."""
    repository = checkpoint.parent.parent
    if checkpoint.parent.name == "snapshots" and (repository / "blobs").is_dir():
        return repository, f"/snapshots/{checkpoint.name}"
    return checkpoint, ""


def _escaped(text: str) -> str:
    """Compose replaces variables."""
    return text.replace("$", "$$")


_RAY_HEAD = "Start with: pip install 'ray[llm]==2.60.0'; serve run THIS_FILE\nThe checkpoint's path must be there on each machine."


def _ray(checkpoint: Path, options: DeployOptions, parsers: TemplateParsers) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    for name, value in (
        ("max_model_len", options.max_model_len),
        ("max_num_seqs", options.max_num_seqs),
        ("tensor_parallel_size", options.tensor_parallel if options.tensor_parallel > 1 else None),
    ):
        if value is not None:
            kwargs[name] = value
    if parsers.tools is not None:
        kwargs |= {"enable_auto_tool_choice": True, "tool_call_parser": parsers.tools}
    if parsers.reasoning is not None:
        kwargs["reasoning_parser"] = parsers.reasoning
    router = {"request_router_class": "ray.serve.llm.request_router.PrefixCacheAffinityRouter"}
    model = {
        "model_loading_config": {"model_id": options.name, "model_source": str(checkpoint)},
        "engine_kwargs": kwargs,
        "deployment_config": {
            "num_replicas": options.replicas,
            **({"request_router_config": router} if options.replicas > 1 else {}),
        },
    }
    application = {
        "name": options.name,
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [model]},
    }
    return {"http_options": {"host": "127.0.0.1", "port": options.port}, "applications": [application]}


def _llm_d(checkpoint: Path, options: DeployOptions, parsers: TemplateParsers) -> str:
    """A deployment of vLLM, the pool that llm-d's endpoint picker chooses from, and the route to it."""
    name, port = options.name, options.port
    labels = {"llm-d.ai/model": name, "llm-d.ai/role": "decode", "llm-d.ai/engine-type": "vllm"}
    selected = {"llm-d.ai/model": name}
    inside = f"/model-cache/{name}"
    arguments = _arguments("vllm", inside, options, parsers, "0.0.0.0")
    gpus = {"nvidia.com/gpu": options.tensor_parallel}
    container = {
        "name": "modelserver",
        "image": VLLM_IMAGE,
        "command": ["vllm", "serve"],
        "args": arguments[2:],
        "env": [{"name": key, "value": value} for key, value in _OFFLINE.items()],
        "ports": [{"name": "modelserver", "containerPort": port}],
        "resources": {"limits": gpus, "requests": gpus},
        "startupProbe": {
            "httpGet": {"path": "/v1/models", "port": "modelserver"},
            "periodSeconds": 30,
            "failureThreshold": 120,
        },
        "livenessProbe": {"httpGet": {"path": "/health", "port": "modelserver"}, "periodSeconds": 10},
        "readinessProbe": {"httpGet": {"path": "/v1/models", "port": "modelserver"}, "periodSeconds": 5},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "model-storage", "mountPath": "/model-cache", "readOnly": True},
        ],
    }
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "20Gi"}},
        {"name": "model-storage", "persistentVolumeClaim": {"claimName": options.claim, "readOnly": True}},
    ]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": options.replicas,
            "selector": {"matchLabels": selected},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}},
        },
    }
    pool = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": selected},
            "targetPorts": [{"number": port}],
            "endpointPickerRef": {"name": f"{name}-epp", "port": {"number": 9002}, "failureMode": "FailOpen"},
        },
    }
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": name},
        "spec": {
            "parentRefs": [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "inference-gateway"}],
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                    "backendRefs": [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}],
                    "timeouts": {"request": "300s"},
                }
            ],
        },
    }
    head = (
        f"Copy {checkpoint} to {name}/ in the volume of the claim {options.claim}, then: kubectl apply -f THIS_FILE\n"
        f"llm-d's router chart brings the endpoint picker, the service {name}-epp; a Gateway named inference-gateway must be there."
    )
    return _comment(head) + yaml.safe_dump_all([deployment, pool, route], sort_keys=False)


def _yaml(data: dict[str, Any], head: str) -> str:
    return _comment(head) + yaml.safe_dump(data, sort_keys=False, width=1000)


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())
