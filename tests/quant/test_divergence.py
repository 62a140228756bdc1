"""What rounding does to outputs, against the same written out."""

from __future__ import annotations

import torch
from smelt.quant.activations import ActivationRounding
from smelt.quant.divergence import OutputChange, divergence, squared_effect
from smelt.quant.scheme import resolve


def test_the_change_of_outputs_counts_rounded_weights_and_rounded_inputs() -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(7, 16, dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)
    other = weight + 0.1 * torch.randn_like(weight)
    plain = OutputChange(other - weight)
    torch.testing.assert_close(plain(inputs, weight), inputs @ other.T - inputs @ weight.T)
    args = resolve("W8A8").activations
    assert args is not None
    rounding = ActivationRounding(args)
    both = OutputChange(other - weight, rounding)
    torch.testing.assert_close(both(inputs, weight), rounding(inputs) @ other.T - inputs @ weight.T)
    assert not torch.allclose(both(inputs, weight), plain(inputs, weight), rtol=1e-4)


def test_squared_effects_are_summed_over_tokens() -> None:
    torch.manual_seed(0)
    gradient, change = torch.randn(2, 9, 6), torch.randn(2, 9, 6)
    expected = sum(float(g @ d) ** 2 for g, d in zip(gradient.view(-1, 6), change.view(-1, 6), strict=True))
    assert abs(squared_effect(gradient, change) / expected - 1) < 1e-5


def test_divergence_is_that_of_torch() -> None:
    torch.manual_seed(0)
    before, after = torch.randn(3, 4, 50), torch.randn(3, 4, 50)
    expected = torch.nn.functional.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), reduction="sum", log_target=True
    )
    assert abs(divergence(before, after) / float(expected) - 1) < 1e-5
