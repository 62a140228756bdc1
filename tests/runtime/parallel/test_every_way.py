"""Every way of dividing a model, in every kind of format: the logits of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime.decoder.linears.cpu import Int8Linear
from smelt.runtime.parallel.stages import divided
from smelt.runtime.weights.host_stream import HostLayers
from smelt.runtime.weights.layer_stream import DiskLayers
from torch import Tensor

from ...compress.coded import compressed
from ..drive import logits_in_pieces
from .thread_ranks import CountingRanks, on_ranks

PROMPTS = [torch.randint(4, 4096, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 6)]
STEPS = [[(0, 21), (1, 4)], [(0, 18)], [(0, 1), (1, 1)], [(1, 1)]]
WAYS: dict[str, dict[str, Any]] = {
    "tp=2": {"tp": 2},
    "pp=2": {"tp": 1, "pp": 2},
    "tp=2, pp=2": {"tp": 2, "pp": 2},
    "cp=2": {"tp": 1, "cp": 2},
    "tp=2, expert parallel": {"tp": 2, "divides_experts": True},
    "pp=2, offload to a disk": {"tp": 1, "pp": 2, "offload": lambda: DiskLayers(Path(tempfile.gettempdir()))},
    "offload to the host": {"offload": lambda: HostLayers(torch.device("cpu"))},
    "offload to a disk": {"offload": lambda: DiskLayers(Path(tempfile.gettempdir()))},
}
# A rank rounds its own inputs by their own largest, and of many some are at the edge between two codes. So errors differ, by up to a fifth
# over several seeds, either way; a wrong scale would make them many times as large.
ROUNDED, AS_LARGE = ("W8A8", "FP8_DYNAMIC"), 1.3


def by_way(path: Path, kept: torch.dtype | None, way: dict[str, Any]) -> list[Tensor]:
    """The first rank's logits."""
    tp, pp, cp = (way.get(name, 1) for name in ("tp", "pp", "cp"))

    def work(world: CountingRanks) -> list[Tensor]:
        place = divided(world, tp, pp, cp)
        return logits_in_pieces(
            path,
            PROMPTS,
            STEPS,
            kept=kept,
            ranks=place.ranks,
            stages=place.stages,
            context=place.context,
            divides_experts=way.get("divides_experts", False),
            offload=way["offload"]() if "offload" in way else None,
        )

    return on_ranks(tp * pp * cp, work)[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("scheme", ["plain", "W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "int8 cache"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_logits_are_those_of_one_process(
    tiny: Callable[..., Path], architecture: str, scheme: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # oneDNN's weights are in memory of its own.
    monkeypatch.setattr(Int8Linear, "takes", lambda matrix, dtype: False)
    if "expert" in way and architecture != "mixtral":
        pytest.skip("it has no experts")
    path = tiny(architecture)
    kept = torch.int8 if scheme == "int8 cache" else None
    exact = logits_in_pieces(path, PROMPTS, STEPS, kept=kept)
    if scheme not in ("plain", "int8 cache"):
        compressed(path, scheme, 32 if scheme == "W4A16" else None)
    wanted = logits_in_pieces(path, PROMPTS, STEPS, kept=kept)
    for true, one, found in zip(exact, wanted, by_way(path, kept, WAYS[way]), strict=True):
        if scheme in ROUNDED:
            assert (found - true).norm() < AS_LARGE * (one - true).norm()
        else:
            rounding = 5e-3 if kept is not None else 2e-4
            torch.testing.assert_close(found, one, atol=rounding, rtol=rounding)
