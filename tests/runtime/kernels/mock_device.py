"""Tensors that say they are on a GPU and are kept in the host's memory, so that all Python of a GPU's path runs without one.

torch itself is asked to compute; what a GPU would refuse is refused here, too: operators that mix tensors of both places.
Nothing is launched (see mock_driver.py), so outputs of kernels are whatever was in their memory: zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
# What takes tensors of both places on a GPU: copies, and indices on the host.
_BOTH = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "lift_fresh", "_pin_memory")


class OnDevice(Tensor):
    """A tensor whose numbers are on the host, or on ``meta``."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        # A view of what was made outside inference mode is no inference tensor, even inside.
        with torch.inference_mode(inner.is_inference()):
            found = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=CUDA,
            )
        found.inner = inner
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def data_ptr(self) -> int:
        """As Triton asks, to see what it is a multiple of."""
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError("only dense CPU tensors can be pinned")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    here = [each for each in tensors if isinstance(each, OnDevice)]
    others = [each for each in tensors if not isinstance(each, OnDevice) and each.dim() and each.device.type != "meta"]
    name = func.overloadpacket.__name__
    if here and others and name not in _BOTH:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} has cuda:0 and cpu")
    asked = [each for each in leaves if isinstance(each, torch.device)]
    there = asked[0].type == "cuda" if asked else bool(here)
    if name == "copy_":
        there = isinstance(args[0], OnDevice)
    owners = {id(each.inner): each for each in here}

    def on_host(each: Any) -> Any:
        if isinstance(each, torch.device) and each.type == "cuda":
            return torch.device("cpu")
        return each.inner if isinstance(each, OnDevice) else each

    given = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    args, given = tree_map(on_host, (args, given))
    found = func(*args, **given)
    if name.startswith(("empty", "new_empty")):
        found.zero_()

    def placed(each: Any) -> Any:
        if not isinstance(each, Tensor) or isinstance(each, OnDevice):
            return each
        return owners[id(each)] if id(each) in owners else OnDevice(each)

    return tree_map(placed, found) if there else found


class _Placing(TorchDispatchMode):
    """For operators that make tensors out of none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Making(TorchFunctionMode):
    """For tensors of Python's numbers, which torch makes below its operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        # The current device, which torch would ask for, is the CPU's (see below).
        args = tuple(_with_index(each) for each in args)
        kwargs = {name: _with_index(each) for name, each in (kwargs or {}).items()}
        # What `with torch.device(...)` says is added behind this.
        device = kwargs.get("device") or _device.CURRENT_DEVICE
        cuda = device is not None and torch.device(device).type == "cuda"
        if func in (torch.tensor, torch.as_tensor) and cuda:
            return OnDevice(func(*args, **{**kwargs, "device": "cpu"}))
        if isinstance(kwargs.get("generator"), Drawing) and not cuda:
            raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")
        if func is torch.autograd.grad:
            # Its engine wants threads of the device.
            return tuple(torch.zeros_like(each.detach()) for each in args[1])
        return func(*args, **kwargs)


def _with_index(value: Any) -> Any:
    unnamed = value == "cuda" if isinstance(value, str) else isinstance(value, torch.device) and value.index is None
    return CUDA if unnamed and torch.device(value).type == "cuda" else value


class Drawing(torch.Generator):
    """A generator that says it is the GPU's."""

    device = CUDA


class _Graph:
    """Captures what runs; replays nothing."""

    def pool(self) -> object:
        return self

    def replay(self) -> None:
        pass


class _Nothing:
    """A stream or an event, which has nothing to wait for; also their contexts."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Event(_Nothing):
    """One that comes after what was asked for, a millisecond after any other."""

    def query(self) -> bool:
        return False

    def elapsed_time(self, _: object) -> float:
        return 1.0


def _let_torch_switch_devices() -> None:
    """A torch that was built without CUDA has nothing to switch the current GPU with; the CPU's, which does nothing, serves."""
    guards = (ctypes.c_void_p * 2).in_dll(
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[1] = guards[1] or guards[0]


@contextlib.contextmanager
def mock_device(units: int = 132) -> Iterator[None]:
    """Let torch see one H100 inside.

    Args:
        units: its streaming multiprocessors.
    """
    facts = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=units,
        shared_memory_per_block_optin=232448,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
    )
    changes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: facts,
        "get_device_name": lambda *_: facts.name,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (79 << 30, 80 << 30),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 1 << 20,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "current_stream": _Nothing,
        "Stream": _Nothing,
        "Event": _Event,
        "_sleep": lambda cycles: None,
        "CUDAGraph": _Graph,
        "graph": _Nothing,
        "device": _Nothing,
        "stream": _Nothing,
    }
    before = {name: getattr(torch.cuda, name) for name in changes}
    _let_torch_switch_devices()
    pinned = Tensor.pin_memory
    for name, value in changes.items():
        setattr(torch.cuda, name, value)
    Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    try:
        with _Making(), _Placing():
            yield
    finally:
        Tensor.pin_memory = pinned  # type: ignore[method-assign]
        for name, value in before.items():
            setattr(torch.cuda, name, value)
