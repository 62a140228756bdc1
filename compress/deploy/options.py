"""How a checkpoint is to be served by another engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ...system.errors import SmeltError

EngineName = Literal["vllm", "sglang", "ray-llm", "llm-d"]
Form = Literal["command", "compose", "config", "manifest"]
# What each engine is started by; the first is the default.
FORMS: dict[EngineName, tuple[Form, ...]] = {
    "vllm": ("command", "compose"),
    "sglang": ("command", "compose"),
    "ray-llm": ("config",),
    "llm-d": ("manifest",),
}
# A name that is one in URLs, shells and Kubernetes, also with -epp behind it.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,57}[a-z0-9])?")


@dataclass(frozen=True)
class DeployOptions:
    """The options.

    Attributes:
        engine: which.
        form: what is written.
        name: what requests call the model.
        port: where the engine listens.
        tensor_parallel: GPUs that share each layer.
        replicas: engines that share the requests, where something distributes them.
        max_model_len: the most tokens of a sequence; None for the model's own limit.
        max_num_seqs: the most sequences at once; None for the engine's own choice.
        cpu: whether it runs without a GPU.
        claim: llm-d's volume claim that has the checkpoint.

    Raises:
        SmeltError: a value is invalid, or two exclude each other.
    """

    engine: EngineName
    form: Form
    name: str
    port: int = 8000
    tensor_parallel: int = 1
    replicas: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    cpu: bool = False
    claim: str = "model-pvc"

    def __post_init__(self) -> None:
        if self.form not in FORMS[self.engine]:
            raise SmeltError(f"--form {self.form}: {self.engine} has {' and '.join(FORMS[self.engine])}")
        for option, value in (("--name", self.name), ("--claim", self.claim)):
            if not _NAME.fullmatch(value):
                raise SmeltError(
                    f"{option} {value!r}: it must be of at most 59 lower-case letters, digits and -, begin with a letter and end with one or a digit"
                )
        if self.cpu and self.engine != "vllm":
            raise SmeltError(f"--cpu is for vllm; {self.engine} needs GPUs")
        if self.replicas > 1 and self.form in ("command", "compose"):
            raise SmeltError(
                f"--replicas {self.replicas}: one {self.form} starts one engine; use --engine ray-llm or llm-d, or put a load balancer"
                " before several"
            )
