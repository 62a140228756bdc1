"""Where jobs run: a GPU, or for rehearsals a CPU on which Triton's interpreter stands in for one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from smelt.runtime.kernels.tools import timing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smelt.runtime import Engine


@dataclass(frozen=True)
class Place:
    """A device.

    Attributes:
        device: where tensors are.
        rehearses: whether only the code is tried: on a CPU, with tiny shapes; times then mean nothing.
        quick: a tenth of the work.
        runs: how often a case must give the same bits.
        scratch: where random models are written meanwhile; None for where temporary files go.
        output: where results go; None for nowhere.
    """

    device: torch.device
    rehearses: bool
    quick: bool
    runs: int
    scratch: Path | None
    output: Path | None

    @classmethod
    def here(cls, *, rehearses: bool, quick: bool, runs: int, scratch: Path | None, output: Path | None) -> Place:
        """This machine's.

        Raises:
            SystemExit: it has no GPU and nothing is rehearsed, or Triton would interpret kernels on the GPU.
        """
        interprets = os.environ.get("TRITON_INTERPRET") == "1"
        if rehearses:
            if not interprets:
                sys.exit("a rehearsal needs TRITON_INTERPRET=1")
            return cls(torch.device("cpu"), True, quick, 2, scratch, output)
        if not torch.cuda.is_available():
            sys.exit("benchmarks/gpu needs a GPU, and torch sees none here; --rehearse tries the code on a CPU")
        if interprets:
            sys.exit("TRITON_INTERPRET is set; unset it to run on the GPU")
        return cls(torch.device("cuda"), False, quick, runs, scratch, output)

    def facts(self) -> dict[str, Any]:
        """The device and the versions that results are taken with."""
        known: dict[str, Any] = {"device": "no GPU, a rehearsal"}
        if self.device.type == "cuda":
            device = torch.cuda.get_device_properties(0)
            known = {
                "device": device.name,
                "units": device.multi_processor_count,
                "memory_gb": round(device.total_memory / 1e9, 1),
                "cache_mb": round(device.L2_cache_size / 1e6, 1),
                "cuda": torch.version.cuda or torch.version.hip,
            }
        return {**known, "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}

    def seconds(self, calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
        """The median time of one call (see timing.py)."""
        if self.device.type == "cuda":
            return timing.seconds(calls, replays)
        begun = time.perf_counter()
        for call in calls[:1]:
            call()
        return time.perf_counter() - begun

    def copies(self, nbytes: int) -> int:
        """How many inputs to take turns with, so that no cache holds them."""
        return timing.copies_needed(nbytes, self.device) if self.device.type == "cuda" else 2

    def wait(self) -> None:
        """Until the device has done all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def alive(self) -> bool:
        """Whether the device still computes: after an illegal access it never does again in this process."""
        return self.device.type != "cuda" or timing.device_lives()

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Engines that are made inside compute on the GPU's kernels, also where they are interpreted."""
        from smelt.runtime.engine.setup import loading
        from smelt.runtime.gpu import GpuOperators

        before = loading._operators  # pyright: ignore[reportPrivateUsage]
        if self.rehearses:
            loading._operators = lambda dtype, _, config, *__, **___: GpuOperators(dtype, self.device, config.fusions)  # type: ignore[assignment]
        try:
            yield
        finally:
            loading._operators = before  # type: ignore[assignment]

    def engine(self, checkpoint: Path, **options: Any) -> Engine:
        """An engine on the kernels."""
        from smelt.runtime import Engine

        with self.kernels():
            return Engine(checkpoint, device=self.device.type, quiet=True, **options)
