"""Norms' two ways to round, against transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from smelt.runtime.gpu.norms import GpuNorm
from smelt.runtime.kernels.rows.normalize_rows import Norm, normalize_rows
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..interpreter import interpreted

DRAW = torch.Generator().manual_seed(0)


def _same_bits(norm: nn.Module, weight: Tensor, rounds_first: bool) -> float:
    """The share of a kernel's outputs that are the module's to the last bit."""
    x = (3 * torch.randn(40, 640, generator=DRAW)).half()
    with torch.no_grad():
        expected = norm(x)
    found = normalize_rows(x, norm=Norm("rms", weight, None, 1e-6, rounds_first))[1]
    return (found == expected).double().mean().item()


@interpreted
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_norm_rounds_where_transformers_does(kind: str) -> None:
    drawn = torch.randn(640, generator=DRAW).half()
    if kind == "llama":
        norm: nn.Module = LlamaRMSNorm(640, eps=1e-6).half()
        weight = drawn
    else:
        norm = Gemma2RMSNorm(640, eps=1e-6).half()
        weight = 1.0 + drawn.float()
    with torch.no_grad():
        norm.weight.copy_(drawn)  # type: ignore[operator]
    right, wrong = (_same_bits(norm, weight, first == (kind == "llama")) for first in (True, False))
    # Sums are taken in another order, which moves a few over the edge between two numbers.
    assert right > 0.99
    assert wrong < 0.9


def test_rows_that_no_program_can_hold_are_normed_by_torch() -> None:
    """Three states of a model that is 8192 wide, which a draft head may norm together."""
    norm = LlamaRMSNorm(3 * 8192, eps=1e-6)
    x = torch.randn(2, 3 * 8192, generator=DRAW)
    with torch.no_grad():
        assert torch.equal(GpuNorm(Norm("rms", norm.weight, None, 1e-6, True), norm)(x), norm(x))
