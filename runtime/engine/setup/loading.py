"""Loading a checkpoint's directory as a model."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ....system.errors import RuntimeProblem
from ....system.hardware.device import device_named, on
from ....system.progress import Log
from ...decoder.model import Head, Model
from ...decoder.parts.operators import Operators
from ...kernels.base.launch import overlapping
from ...native.library import kernels
from ...native.nested import NestedOperators
from ...native.operators import NativeOperators
from ...parallel.stages import OnlyHead, RankPlace
from ...speculation.eagle.head_checkpoint import is_head
from ...weights.checkpoint import Checkpoint
from ...weights.host_stream import HostLayers
from ...weights.layer_stream import DiskLayers
from .config import DTYPE_NAMES, NESTED, EngineConfig

T = TypeVar("T")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def load_model(
    checkpoint: str | Path,
    config: EngineConfig | None = None,
    *,
    log: Log,
    place: RankPlace | None = None,
    drafts: bool = False,
) -> tuple[Checkpoint, Model]:
    """Load a checkpoint for the fastest operators on this machine.

    Args:
        checkpoint: a Hugging Face directory.
        config: operators, dtype and device; the defaults if None.
        log: gets messages for the user.
        place: of this process among others that load a share each; None for one process.
        drafts: whether it drafts, so that speed counts more than the last bit.

    Returns:
        The checkpoint, for its config and tokenizer; and the model.

    Raises:
        SmeltError: the checkpoint cannot be read; a RuntimeProblem if it cannot be served.
    """
    config = config or EngineConfig()
    where = device_named(config.device)
    if is_head(Path(checkpoint)):
        raise RuntimeProblem(
            f"{checkpoint} is a draft head, which is no model; set drafter to it, beside the model that it was trained for"
        )
    opened = Checkpoint(checkpoint, trust_remote_code=config.trust_remote_code)
    computing = opened.dtype if config.dtype == "auto" else DTYPES[config.dtype]
    if config.reproducible:
        return opened, Model(opened, _reproducible(computing, where, config, log))
    if config.compile:
        from ...decoder.compiled import CompiledOperators

        return opened, Model(opened, CompiledOperators(computing, where))
    place = place or RankPlace()
    offload = None
    if config.offload == "disk":
        offload = DiskLayers(Path(config.offload_directory or tempfile.gettempdir()))
    elif config.offload == "cpu":
        offload = HostLayers(where)
    return opened, Model(
        opened,
        _operators(computing, where, config, log, drafts=drafts),
        ranks=place.ranks,
        stages=place.stages,
        context=place.context,
        offload=offload,
        divides_experts=config.enable_expert_parallel,
    )


def load_head(checkpoint: str | Path, config: EngineConfig, *, log: Log) -> Head:
    """Load only a checkpoint's head, whole, without its layers.

    Args:
        checkpoint: a Hugging Face directory.
        config: operators, dtype and device.
        log: gets messages for the user.

    Raises:
        SmeltError: the checkpoint cannot be read.
    """
    alone = replace(config, tp=1, pp=1, cp=1, enable_expert_parallel=False, offload=None)
    return load_model(checkpoint, alone, log=log, place=RankPlace(stages=OnlyHead()))[1].head


def on_device_of(model: Model) -> AbstractContextManager[object]:
    """Where a model's steps are laid out and computed. May be entered again and again."""
    fusions = model.operators.fusions
    return on(model.device, partial(overlapping, fusions is None or fusions.overlap))


def in_own_thread(work: Callable[[], T]) -> T:
    """What a function returns, or raises, in a thread that ends with it.

    The OpenMP threads of whoever loads a model stay as long as that thread, and slow those of an engine's own thread down
    (:class:`.engine_thread.EngineThread`).

    Args:
        work: such as the constructor of an engine.
    """
    future = _started(work)
    return future.result()


async def awaited_thread(work: Callable[[], T]) -> T:
    """The same for an asyncio task, which other tasks do not wait for; neither does the end of the process."""
    return await asyncio.wrap_future(_started(work))


def _started(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as problem:
            future.set_exception(problem)

    # A daemon, so that an interrupt need not wait for it.
    threading.Thread(target=run, name="smelt-load", daemon=True).start()
    return future


def load_operators(dtype: torch.dtype, config: EngineConfig, *, log: Log, drafts: bool = False) -> Operators:
    """The fastest operators for a part beside a model.

    Args:
        dtype: the model's compute dtype.
        config: of the engine.
        log: gets messages for the user.
        drafts: whether it drafts, so that speed counts more than the last bit.
    """
    return _operators(dtype, device_named(config.device), config, log, drafts=drafts)


def operators_for(dtype: torch.dtype, device: torch.device, *, log: Log) -> Operators:
    """The fastest operators on this machine.

    Args:
        dtype: the compute dtype.
        device: where.
        log: gets messages for the user.
    """
    return _operators(dtype, device, EngineConfig(), log)


def _reproducible(dtype: torch.dtype, device: torch.device, config: EngineConfig, log: Log) -> Operators:
    from ...native.reproducible import ReproducibleOperators

    native = config.native and not config.compile
    compiled = kernels(log) if native and device.type == "cpu" and dtype == torch.bfloat16 else None
    if compiled is None:
        name = str(dtype).removeprefix("torch.")
        raise RuntimeProblem(
            "reproducible needs Smelt's compiled CPU kernels, which compute in bfloat16 on processors with AVX2,"
            f" but this engine would compute in {name} on {device.type} with others; set dtype bfloat16 on such a"
            " processor, with native on and compile off, or leave reproducible off"
        )
    return ReproducibleOperators(compiled, config.exact_inputs)


def _operators(
    dtype: torch.dtype, device: torch.device, config: EngineConfig, log: Log, *, drafts: bool = False
) -> Operators:
    if device.type != "cpu":
        from ...gpu import GpuOperators
        from ...gpu.linears import HALVES
        from ...gpu.nested import NestedGpuOperators

        try:
            if config.draft_weights != NESTED:
                return GpuOperators(dtype, device, config.fusions)
            if dtype not in HALVES:
                raise RuntimeProblem(
                    f"drafter is nested, whose planes Smelt's GPU kernels multiply in bfloat16 or float16, not in"
                    f" {str(dtype).removeprefix('torch.')}; set dtype to one of these, or use another drafter"
                )
            return NestedGpuOperators(dtype, device, config.fusions)
        except ValueError as error:
            if config.draft_weights == NESTED:
                raise RuntimeProblem(
                    f"drafter is nested, which needs Smelt's GPU kernels, but {error}; use another drafter"
                ) from None
            log(f"{error}; using torch's operators instead")
            return Operators(dtype, device)
    compiled = kernels(log) if config.native and dtype == torch.bfloat16 else None
    if config.draft_weights == NESTED:
        if compiled is None:
            raise RuntimeProblem(
                "drafter is nested, which needs Smelt's compiled CPU kernels, in bfloat16 on a processor with AVX2; set dtype"
                " bfloat16 on such a processor, with native on, or use another drafter"
            )
        return NestedOperators(compiled, config.exact_inputs)
    if compiled is None:
        return Operators(dtype)
    return NativeOperators(compiled, config.exact_inputs, few_exact=not drafts)
