"""Attention for learning on CPUs against torch's own in float64: values, gradients, and when it stands aside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import smelt.models.causal_attention as module
import torch
from smelt.models.causal_attention import StripedAttention, causal_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM


def _drawn(windows: int, heads: int, length: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # In the layout in which models hand them over.
    return torch.randn(windows, length, heads, width, generator=generator).to(dtype).transpose(1, 2)


def _learned(attention: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of its inputs for a gradient that differs from token to token."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    output = attention(*leaves)
    gradient = _drawn(output.shape[0], output.shape[1], output.shape[2], output.shape[3], output.dtype, 9)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def _distances(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]


# One strip; a last one that is shorter; more windows than are worked on together; grouped heads; values of another width.
@pytest.mark.parametrize(
    ("windows", "heads", "others", "length", "width", "value_width"),
    [(2, 3, 3, 7, 16, 16), (2, 2, 2, 150, 32, 32), (5, 8, 2, 300, 16, 16), (1, 4, 4, 64, 32, 24), (1, 2, 1, 1, 8, 8)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(
    windows: int,
    heads: int,
    others: int,
    length: int,
    width: int,
    value_width: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_SCORE_BYTES", 1 << 20)
    query = _drawn(windows, heads, length, width, dtype, 1)
    key = _drawn(windows, others, length, width, dtype, 2)
    value = _drawn(windows, others, length, value_width, dtype, 3)

    def reference(*inputs: Tensor) -> Tensor:
        return scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3, enable_gqa=True)

    wanted = _learned(reference, *(each.double() for each in (query, key, value)))
    found = _learned(lambda *inputs: causal_attention(*inputs, scale=0.3), query, key, value)
    assert all(each.dtype == dtype for each in found)
    if length == 1:  # the one probability is 1, whatever the query
        assert found[1].abs().max() == 0
        assert found[2].abs().max() == 0
        found, wanted = [found[0], found[3]], [wanted[0], wanted[3]]
    assert max(_distances(found, wanted)) < (2e-6 if dtype == torch.float32 else 1e-2)


def test_takes_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_multiplies_bfloat16", lambda: True)
    taken: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        module, "causal_attention", lambda q, k, v, scale: (taken.append(q.shape), causal_attention(q, k, v, scale))[1]
    )
    inputs = [_drawn(2, 4, 96, 16, torch.bfloat16, seed) for seed in (1, 2, 3)]
    with StripedAttention():
        found = scaled_dot_product_attention(*inputs, is_causal=True)
        assert taken == [(2, 4, 96, 16)]
        # A mask, no mask at all, another type: torch's own.
        mask = torch.ones(96, 96, dtype=torch.bool).tril(3)
        masked = scaled_dot_product_attention(*inputs, attn_mask=mask)
        scaled_dot_product_attention(*inputs)
        scaled_dot_product_attention(*(each.float() for each in inputs), is_causal=True)
    assert len(taken) == 1
    wanted = scaled_dot_product_attention(*(each.double() for each in inputs), is_causal=True)
    assert _distances([found], [wanted])[0] < 1e-2
    assert torch.equal(masked, scaled_dot_product_attention(*inputs, attn_mask=mask))
    scaled_dot_product_attention(*inputs, is_causal=True)
    assert len(taken) == 1


def test_serves_transformers_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_multiplies_bfloat16", lambda: True)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.randint(50, (3, 90))
    taken: list[int] = []
    monkeypatch.setattr(
        module, "causal_attention", lambda q, k, v, scale: (taken.append(1), causal_attention(q, k, v, scale))[1]
    )
    with StripedAttention():
        found = model(tokens, labels=tokens)
    found.loss.backward()
    assert len(taken) == 2
    gradients = {name: each.grad for name, each in model.named_parameters()}
    exact = LlamaForCausalLM(config).double()
    exact.load_state_dict(model.double().state_dict())
    exact(tokens, labels=tokens).loss.backward()
    for name, each in exact.named_parameters():
        gradient = gradients[name]
        assert gradient is not None
        assert each.grad is not None
        assert _distances([gradient], [each.grad])[0] < 0.05, name
