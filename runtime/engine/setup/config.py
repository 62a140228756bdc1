"""The engine's options: one object for the Python API, the command line and benchmarks.

Nothing here imports torch, so that a command can refuse a wrong option at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from ....system.errors import RuntimeProblem, nearest_name
from ...cache_types import BY_NAME
from ...fusions import Fusions
from ...scheduling.policies.table import POLICIES
from ...scheduling.swapping import SWAP_MODES, SwapMode

LOOKUP, NESTED = "lookup", "nested"
LOOKUP_FIRST = f"{LOOKUP}+"
EARLY_EXIT = re.compile(r"early-exit:([1-9]\d{0,3})")
MOST_DRAFTS = 64
MOST_BRANCHES = 16
DTYPE_NAMES = ("float32", "bfloat16", "float16")


def sources_of(drafter: str) -> tuple[bool, str | None]:
    """Whether a drafter looks drafts up, and what drafts with weights where it does not: ``lookup+nested`` is both."""
    if drafter == LOOKUP:
        return True, None
    return drafter.startswith(LOOKUP_FIRST), drafter.removeprefix(LOOKUP_FIRST)


def draft_checkpoint(drafter: str) -> str | None:
    """The checkpoint that a drafter names; None if it is only part of the model or of its text."""
    _, weights = sources_of(drafter)
    return None if weights in (None, NESTED) or EARLY_EXIT.fullmatch(weights) else weights


# Where a field is called otherwise, for who writes vLLM's name.
_AS_IN_VLLM = {
    "gpu_memory_utilization": "memory_utilization",
    "scheduling_policy": "policy",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "num_speculative_tokens": "draft_tokens",
    "speculative_config": "drafter",
    "speculative_model": "drafter",
    "swap_space": "host_cache_bytes",
    "cpu_offload_gb": "offload",
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine computes, how it uses memory and how it schedules.

    Attributes:
        dtype: compute dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        max_model_len: the most tokens of a sequence, prompt included; by default the model's own limit.
        max_num_seqs: the most sequences that run at once.
        max_num_batched_tokens: the most tokens computed in a step; long prompts are computed in pieces.
        block_size: positions in a cache block.
        kv_cache_memory_bytes: memory for keys and values; by default the rest of ``memory_utilization``.
        memory_bytes: memory for weights, activations and cache together, instead of ``memory_utilization``; for several engines on one device.
        adapter_bytes: memory for LoRA adapters; by default what weights, activations and cache leave.
        host_cache_bytes: host memory for blocks that the KV cache evicts and for preempted sequences; none by default.
        host_cache_directory: a directory of a disk that holds these blocks instead of memory; it may hold more than memory does.
        swap: what happens to a preempted sequence if there is such memory: ``auto`` (what is predicted to take less time), ``swap`` or
            ``recompute``.
        memory_utilization: the share of the currently free memory for weights, activations and cache.
        enable_prefix_caching: prefix caching: prompts with a common prefix share its cache blocks.
        policy: which requests start, run and are preempted first, and how prompts share steps with decodes:
            ``fcfs``, ``static`` (the baseline: a batch starts only when the previous one has ended), ``orca``, ``prefill_first``, ``sarathi``, ``priority``, ``deadline``, ``shortest`` or ``mlfq``; see docs/runtime.md.
        admission: ``predicted``: a request starts only if the cache is predicted to hold all that run until they end, from the
            lengths of earlier outputs; ``immediate``: as soon as there is room for its prompt.
        max_waiting: the most requests that wait; further ones are refused with QueueFull. No limit by default, and
            none for the prompts of one call of ``generate``.
        seed: from which requests without one get theirs, in the order in which they come.
        trust_remote_code: run the checkpoint's Python code; off by default.
        kv_cache_dtype: KV cache dtype: ``auto`` (the compute dtype), ``int8``, ``fp8`` or, on a GPU, ``int4``,
            with a scale for each head and position; int4 keys are rotated, which spreads their outliers.
        native: use Smelt's compiled CPU kernels, in bfloat16; otherwise torch's operators.
        exact_inputs: inputs of weight-only formats keep 16 bits on a CPU also for many rows, where int8 is faster.
        reproducible: batch-invariant: give a request bitwise the same tokens and log probabilities, regardless of other requests,
            chunked prefill and preemption; in bfloat16 on Smelt's compiled CPU kernels. docs/runtime.md has its cost.
        device: ``cpu``, or ``cuda`` for a GPU with all of a step on Triton kernels; see docs/gpu.md for what has run on one.
        fusions: which operations are fused into one launch on a GPU; all by default.
        tp: how many processes divide each layer between them (tensor parallelism).
        pp: how many processes have some of the layers each (pipeline parallelism); with ``tp`` there are ``tp`` times as many.
        cp: how many processes have a part of each sequence's keys and values each (context parallelism, ring attention); each of them is
            ``tp`` processes.
        enable_expert_parallel: whether the ``tp`` processes have whole experts of a mixture each, instead of a share of all.
        step_timeout: the seconds after which a step of several processes is given up, because one of them does not answer.
        offload: for models that are larger than the memory. ``disk``: the layers' weights are in a file, from which each is read while
            the one before computes; on a CPU. ``cpu``: a GPU's weights are in the host's memory, and copied likewise. None: neither.
        offload_directory: where that file is; the system's directory for temporary files by default.
        drafter: speculative decoding: what proposes tokens, which the model then verifies several at a time; its output stays its own.
            ``lookup`` (what followed earlier occurrences of the last tokens), ``nested`` (the upper four of a checkpoint's 8 bits, best
            of scheme W4in8), ``early-exit:N`` (the model's first N layers, best of a model trained for it) or a checkpoint's directory: a
            compressed form of the model, any cheaper one with its tokenizer, or a draft head of EAGLE-3. ``lookup+`` before one of these: lookup
            where it finds something that is more often right for its time, the other one elsewhere. None: none.
        draft_tokens: how many tokens it proposes: ``auto`` (what is expected to be the fastest, from acceptance, load and measured times; none
            where none is) or a number.
        draft_branches: token trees: how many branches a chain of draft tokens may have, of tokens that may come instead of its own; 0 for
            chains alone. With draft_tokens ``auto`` as many as are expected to pay.
        upper_bits_at: while at least so many requests wait, those that arrive are answered from the upper four of the weights' 8 bits, which is
            faster and less exact; their outputs say so. With drafter ``nested`` only. None: never.
        compile: use torch.compile for the layers instead of Smelt's kernels; it takes a minute at the first
            prompt and the first decode step.
        quiet: print nothing.

    Raises:
        RuntimeProblem: a value is invalid.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    adapter_bytes: int | None = None
    host_cache_bytes: int = 0
    host_cache_directory: str | None = None
    swap: SwapMode = "auto"
    memory_utilization: float = 0.9
    memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    admission: str = "predicted"
    max_waiting: int | None = None
    seed: int = 0
    trust_remote_code: bool = False
    kv_cache_dtype: str = "auto"
    native: bool = True
    exact_inputs: bool = False
    reproducible: bool = False
    device: str = "cpu"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    enable_expert_parallel: bool = False
    step_timeout: float = 600.0
    offload: str | None = None
    offload_directory: str | None = None
    fusions: Fusions | None = None
    drafter: str | None = None
    draft_tokens: int | str = "auto"
    draft_branches: int = 0
    upper_bits_at: int | None = None
    compile: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise RuntimeProblem(
                f"max_model_len is {self.max_model_len}; it must be at least 2 (one prompt token and one generated token)"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "tp", "pp", "cp"):
            if getattr(self, name) < 1:
                raise RuntimeProblem(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.memory_utilization <= 1:
            raise RuntimeProblem(f"memory_utilization is {self.memory_utilization}; it must be above 0 and at most 1")
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, tuple(BY_NAME))
        _check_choice("dtype", self.dtype, ("auto", *DTYPE_NAMES))
        _check_choice("swap", self.swap, SWAP_MODES)
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise RuntimeProblem(f"memory_bytes is {self.memory_bytes}; it must be at least 1")
        for name in ("host_cache_bytes", "adapter_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise RuntimeProblem(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.host_cache_directory is not None and not self.host_cache_bytes:
            raise RuntimeProblem(
                "host_cache_directory is set, but host_cache_bytes is 0; set it to the bytes to use there"
            )
        if self.swap == "swap" and not self.host_cache_bytes:
            raise RuntimeProblem("swap is 'swap', but host_cache_bytes is 0; set it to the host memory to use")
        _check_choice("policy", self.policy, tuple(POLICIES))
        _check_choice("admission", self.admission, ("predicted", "immediate"))
        if self.max_waiting is not None and self.max_waiting < 1:
            raise RuntimeProblem(f"max_waiting is {self.max_waiting}; it must be at least 1")
        if self.offload not in (None, "cpu", "disk"):
            raise RuntimeProblem(f"offload is {self.offload!r}; it must be cpu or disk, or left out")
        if self.offload is not None:
            if self.compile or self.reproducible:
                raise RuntimeProblem("offload is without compile and reproducible; leave these out, or offload")
            if (self.device == "cpu") != (self.offload == "disk"):
                where = "a CPU" if self.device == "cpu" else "a GPU"
                raise RuntimeProblem(
                    f"offload is {self.offload}, and the device is {where}: a CPU's weights can go to the disk, a GPU's to the"
                    " host's memory (cpu)"
                )
        if self.offload != "disk" and self.offload_directory is not None:
            raise RuntimeProblem("offload_directory is set, but offload is not disk; set it to disk")
        self._check_drafter()
        if self.enable_expert_parallel and self.tp == 1:
            raise RuntimeProblem(
                "enable_expert_parallel divides experts between tp processes, but tp is 1; raise it, or leave it out"
            )
        if not self.step_timeout > 0:
            raise RuntimeProblem(f"step_timeout is {self.step_timeout}; it must be above 0")
        if self.pp > 1 and self.cp > 1:
            raise RuntimeProblem(
                f"pp is {self.pp} and cp is {self.cp}; stages do not divide sequences, use one of them"
            )
        if self.ranks > 1 and (self.compile or self.reproducible or self.fusions is not None):
            raise RuntimeProblem(
                f"{self.division}; compile, reproducible and fusions are for one process, leave them out"
            )

    def _check_drafter(self) -> None:
        if isinstance(self.draft_tokens, str) and self.draft_tokens.isdecimal():
            object.__setattr__(self, "draft_tokens", int(self.draft_tokens))
        if self.draft_tokens != "auto" and not (
            isinstance(self.draft_tokens, int) and 1 <= self.draft_tokens <= MOST_DRAFTS
        ):
            raise RuntimeProblem(f"draft_tokens is {self.draft_tokens!r}; it must be auto, or from 1 to {MOST_DRAFTS}")
        if self.drafter is None and self.draft_tokens != "auto":
            raise RuntimeProblem("draft_tokens is set, but drafter is not; set it to lookup, nested or a checkpoint")
        if not 0 <= self.draft_branches <= MOST_BRANCHES:
            raise RuntimeProblem(f"draft_branches is {self.draft_branches}; it must be from 0 to {MOST_BRANCHES}")
        if self.draft_branches and self.drafter is None:
            raise RuntimeProblem("draft_branches is set, but drafter is not; set it to lookup, nested or a checkpoint")
        if self.draft_branches and self.cp > 1:
            raise RuntimeProblem(
                f"draft_branches is {self.draft_branches}, and cp is {self.cp}, which divides sequences; leave one of them out"
            )
        if self.upper_bits_at is not None and (self.draft_weights != NESTED or self.upper_bits_at < 1):
            raise RuntimeProblem(
                f"upper_bits_at is {self.upper_bits_at} and drafter is {self.drafter}; it must be at least 1, with drafter nested, whose planes it needs"
            )
        if self.exit_layer is not None and self.offload is not None:
            raise RuntimeProblem(
                f"drafter is {self.drafter}, and offload is {self.offload}: its layers would be brought for each draft token; use lookup"
            )
        if self.draft_weights == NESTED and (self.reproducible or self.compile or self.offload):
            raise RuntimeProblem(
                "drafter is nested, which does without reproducible, compile and offload; leave these out, or use another drafter"
            )

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up in texts."""
        return self.drafter is not None and sources_of(self.drafter)[0]

    @property
    def draft_weights(self) -> str | None:
        """What drafts with weights; None if nothing does."""
        return None if self.drafter is None else sources_of(self.drafter)[1]

    @property
    def exit_layer(self) -> int | None:
        """How many of the model's layers draft; None if the drafter is another."""
        found = EARLY_EXIT.fullmatch(self.draft_weights or "")
        return None if found is None else int(found[1])

    @property
    def ranks(self) -> int:
        """How many processes compute a step together."""
        return self.tp * self.pp * self.cp

    @property
    def division(self) -> str:
        """How they divide the work, for messages."""
        values = {"tp": self.tp, "pp": self.pp, "cp": self.cp}
        return " and ".join(f"{name} is {value}" for name, value in values.items() if value > 1)

    @property
    def block_positions(self) -> int:
        """Positions in a cache block, on all processes that divide sequences."""
        return self.block_size * self.cp

    @classmethod
    def of(cls, config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
        """A configuration with some fields replaced.

        Args:
            config: the configuration; the default one if None.
            options: fields and their values.

        Raises:
            TypeError: one of ``options`` is not a field.
            RuntimeProblem: a value is invalid.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                same = _AS_IN_VLLM.get(name)
                hint = nearest_name(name, known) if same is None else f"; vLLM's {name} is {same} here"
                raise TypeError(f"unknown engine option {name!r}; known: {', '.join(known)}{hint}")
        return replace(config or cls(), **options)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RuntimeProblem(f"{name} is {value!r}; it must be {', '.join(choices)}")
