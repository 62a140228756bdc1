"""From a checkpoint's directory to a model that is ready to compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...system.device import device_named
from ...system.errors import RuntimeProblem
from ..decoder.model import Model
from ..decoder.operators import Operators
from ..native.library import kernels
from ..native.operators import NativeOperators
from ..weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ..gpu.fusions import Fusions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    checkpoint: str | Path,
    *,
    dtype: str = "auto",
    native: bool = True,
    exact_inputs: bool = False,
    reproducible: bool = False,
    trust_remote_code: bool = False,
    device: str = "cpu",
    fusions: Fusions | None = None,
    compiled: bool = False,
    told: Callable[[str], object],
) -> tuple[Checkpoint, Model]:
    """Read a checkpoint's weights for the fastest operators that this machine has.

    Args:
        checkpoint: a Hugging Face directory.
        dtype: what to compute in; ``auto`` is the checkpoint's own.
        native: use Smelt's compiled CPU kernels, in bfloat16.
        exact_inputs: keep the inputs of weight-only formats in bfloat16 for any number of rows.
        reproducible: let each sequence's numbers depend on nothing but itself, to the bit.
        trust_remote_code: run the checkpoint's own Python.
        device: ``cpu``, or a GPU as torch names it.
        fusions: what is done together on a GPU; all by default.
        compiled: let torch.compile lower the layers, instead of Smelt's own kernels.
        told: hears what a person should know.

    Returns:
        The checkpoint, for its config and tokenizer; and the model.

    Raises:
        SmeltError: the checkpoint cannot be read; a RuntimeProblem, if it cannot be served.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise RuntimeProblem(f"dtype is {dtype!r}; it must be auto, {', '.join(DTYPES)}")
    where = device_named(device)
    opened = Checkpoint(checkpoint, trust_remote_code=trust_remote_code)
    computing = opened.dtype if dtype == "auto" else DTYPES[dtype]
    if reproducible:
        return opened, Model(opened, _reproducible(computing, where, native and not compiled, exact_inputs, told))
    if compiled:
        from ..decoder.compiled import CompiledOperators

        return opened, Model(opened, CompiledOperators(computing, where))
    return opened, Model(opened, _operators(computing, where, native, exact_inputs, fusions, told))


def operators_for(dtype: torch.dtype, device: torch.device, *, told: Callable[[str], object]) -> Operators:
    """The fastest operators that this machine has.

    Args:
        dtype: what is computed in.
        device: where.
        told: hears what a person should know.
    """
    return _operators(dtype, device, True, False, None, told)


def _reproducible(
    dtype: torch.dtype, device: torch.device, native: bool, exact_inputs: bool, told: Callable[[str], object]
) -> Operators:
    from ..native.reproducible import ReproducibleOperators

    compiled = kernels(told) if native and device.type == "cpu" and dtype == torch.bfloat16 else None
    if compiled is None:
        name = str(dtype).removeprefix("torch.")
        raise RuntimeProblem(
            f"reproducible needs Smelt's compiled CPU kernels, which compute in bfloat16 on processors with AVX-512 (VNNI and"
            f" BF16), and this engine would compute in {name} on {device.type} by other ones; give dtype bfloat16 on such a"
            " processor, with native and without compile, or leave reproducible off"
        )
    return ReproducibleOperators(compiled, exact_inputs)


def _operators(
    dtype: torch.dtype,
    device: torch.device,
    native: bool,
    exact_inputs: bool,
    fusions: Fusions | None,
    told: Callable[[str], object],
) -> Operators:
    if device.type != "cpu":
        from ..gpu import GpuOperators

        try:
            return GpuOperators(dtype, device, fusions)
        except ValueError as error:
            told(f"{error}; torch's operators compute")
            return Operators(dtype, device)
    compiled = kernels(told) if native and dtype == torch.bfloat16 else None
    return Operators(dtype) if compiled is None else NativeOperators(compiled, exact_inputs)
