"""Where things are computed: a CPU, or a GPU as torch names it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from ..errors import RuntimeProblem
from .machine import available_memory


def device_named(name: str) -> torch.device:
    """A device as torch names it.

    Raises:
        RuntimeProblem: it is none, or not here.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise RuntimeProblem(f"device is {name!r}; it must be cpu or cuda, or one GPU such as cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RuntimeProblem(
            f"device is {name!r}, but torch sees {torch.cuda.device_count() or 'no'} GPUs here; use cpu"
        )
    return device


def on(
    device: torch.device, also: Callable[[], AbstractContextManager[object]] | None = None
) -> AbstractContextManager[object]:
    """Tensors are made, and kernels launched, there; a CPU is where that happens anyway. May be entered again and again.

    Args:
        device: where.
        also: makes a context that is entered, too, on a GPU.
    """
    return nullcontext() if device.type == "cpu" else _On(device, also)


def free_memory(device: torch.device) -> int:
    """Bytes that may still be allocated there."""
    if device.type == "cpu":
        return available_memory()
    give_back(device)
    return torch.cuda.mem_get_info(device)[0]


def give_back(device: torch.device) -> None:
    """Let others have the memory of models and caches that nothing here uses any more."""
    gc.collect()  # a model's parts know each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _On:
    def __init__(self, device: torch.device, also: Callable[[], AbstractContextManager[object]] | None) -> None:
        self._device, self._also = device, also
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        if self._also is not None:
            stack.enter_context(self._also())
        stack.enter_context(torch.cuda.device(self._device))
        stack.enter_context(self._device)
        self._entered.append(stack)

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()
