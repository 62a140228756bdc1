"""Losses by the runtime's kernels, in Triton's interpreter: those of torch's operators in float64."""

from __future__ import annotations

import pytest
import torch
from smelt.distill.losses.chunked import chunked_loss
from smelt.distill.losses.functions import FUSED, TORCH, LossFunctions, functions_for
from smelt.distill.losses.probabilities import most_likely
from smelt.distill.losses.table import LOSSES
from smelt.distill.training.teachers import Comparison
from torch import Tensor
from torch.nn import functional

from ...runtime.kernels.interpreter import interpreted

POSITIONS, VOCABULARY, WIDTH = 6, 70, 8
WAYS = [*LOSSES, "top_kl"]


def _through(way: str, functions: LossFunctions, dtype: torch.dtype) -> list[Tensor]:
    """The loss through a head, with its parts and its gradients."""
    draw = torch.Generator().manual_seed(5)
    hidden, weight, teacher = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        for shape in ((POSITIONS, WIDTH), (VOCABULARY, WIDTH), (POSITIONS, VOCABULARY - 6))
    )
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    targets = torch.tensor([3, 0, -1, 69, 5, 5])
    places, kept = most_likely(teacher, 7, 1.5)

    def losses(logits: Tensor, rows: slice):  # type: ignore[no-untyped-def]
        if way == "top_kl":
            compared = functions.of_top("forward_kl", logits, places[rows], kept[rows], 1.5)
        else:
            compared = Comparison(way, LOSSES[way].options(), 1.5, functions)(logits, teacher[rows])
        return [(0.7, compared), (0.3, functions.cross_entropy(logits, targets[rows]))]

    loss, parts = chunked_loss(
        *leaves, None, lambda states, matrix, _: functional.linear(states, matrix), losses, torch.ones(POSITIONS)
    )
    loss.backward()
    return [loss.detach(), parts, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@interpreted
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_compute_the_losses_of_torch(way: str) -> None:
    for ours, wanted in zip(_through(way, FUSED, torch.float32), _through(way, TORCH, torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=1e-4, atol=1e-6)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_all_tokens_kept_is_the_whole_divergence() -> None:
    student, teacher = (torch.randn(3, 40) for _ in range(2))
    found = FUSED.of_top("forward_kl", student, *most_likely(teacher, 40, 1.0), 1.0)
    wanted = TORCH.divergence("forward_kl", student.double(), teacher.double(), 1.0, LOSSES["forward_kl"].options())
    for ours, each in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), each, rtol=1e-4, atol=1e-6)


def test_what_computes_is_chosen_by_device() -> None:
    assert functions_for(torch.device("cpu")) is TORCH
    assert functions_for(torch.device("cuda")) is FUSED
