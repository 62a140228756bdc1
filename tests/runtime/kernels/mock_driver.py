"""A driver for Triton that compiles for sm_90 and launches nothing: all of a launch but the GPU.

What Triton's own launcher would refuse is refused here, too: pointers to the host's memory, integers that do not fit
their type, grids and shared memory beyond what an H100 takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
_POINTS_TO = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}
_GRID = (2**31 - 1, 65535, 65535)


@dataclass
class MockDriver:
    """Stands for Triton's driver of one GPU.

    Attributes:
        launched: kernels' names, in order.
        seen: called with each launch: the kernel's name, and its arguments by name.
        arch: that is compiled for.
    """

    launched: list[str] = field(default_factory=list)
    seen: Callable[[str, dict[str, Any]], object] = lambda name, arguments: None
    overlapped: list[bool] = field(default_factory=list)
    arch: int = 90

    def __post_init__(self) -> None:
        self.utils = self

    def install(self) -> MockDriver:
        """As Triton's driver, for the rest of the process."""
        driver.set_active(self)  # pyright: ignore[reportArgumentType]
        return self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, str, int, int, int]:
        assert binary.startswith(b"\x7fELF")
        return object(), name, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What Triton calls with a kernel's grid and arguments."""
        names, signature = source.fn.arg_names, list(source.signature.values())
        assert metadata.global_scratch_size == 0

        def launch(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            assert function == metadata.name
            arguments = dict(zip(names, rest[4:], strict=True))
            for extent, most in zip((x, y, z), _GRID, strict=True):
                assert 0 < extent <= most, f"{function} has a grid of {x}, {y}, {z}"
            for name, kind in zip(names, signature, strict=True):
                _check(f"{function}'s {name}", kind, arguments[name])
            self.launched.append(source.fn.__name__.strip("_"))
            self.overlapped.append(metadata.launch_pdl)
            self.seen(self.launched[-1], arguments)

        return launch


def _check(name: str, kind: str, value: Any) -> None:
    if kind == "constexpr":
        return
    if kind.startswith("*"):
        assert isinstance(value, Tensor), f"{name} is {value!r}"
        assert value.device.type in ("cuda", "meta"), f"{name} is in the host's memory"
        assert kind[1:] == _POINTS_TO[value.dtype], f"{name} is {value.dtype}, compiled for {kind}"
        return
    assert type(value) is int, f"{name} is {value!r}, compiled for {kind}"
    bits = _BITS[kind]
    assert -(1 << (bits - 1)) <= value < 1 << (bits - 1), f"{name} is {value}, too much for {kind}"
