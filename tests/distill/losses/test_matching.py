"""What is compared inside of two models: against transformers' own hidden states, and against differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from smelt.distill.losses.attention_matching import AttentionMatching
from smelt.distill.losses.hidden_matching import HiddenMatching, paired
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ...tiny import make_model

TOKENS = torch.randint(2, 4000, (3, 24), generator=torch.Generator().manual_seed(3))


def _apart(theirs: Tensor, ours: Tensor, counted: Tensor) -> Tensor:
    """Transcribed: probabilities ``[windows, heads, length, length]`` to the mean divergence."""
    divergence = torch.where(theirs > 0, theirs * (theirs.clamp_min(1e-300).log() - ours.clamp_min(1e-300).log()), 0.0)
    return (divergence.sum(-1).mean(1) * counted).sum() / counted.sum()


def _pair(architecture: str, **smaller: Any) -> tuple[Any, Any]:
    return make_model(architecture, torch.float64, seed=1), make_model(architecture, torch.float64, seed=2, **smaller)


@pytest.mark.parametrize(
    ("architecture", "smaller"),
    [
        ("llama", {}),
        ("llama", {"num_hidden_layers": 2}),
        ("gpt_neox", {}),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 2}),
    ],
)
def test_attention_is_compared_as_transformers_returns_it(architecture: str, smaller: dict[str, Any]) -> None:
    teacher, student = _pair(architecture, **smaller)
    blocks = [list(model.base_model.layers) for model in (student, teacher)]
    pairs = paired(len(blocks[0]), len(blocks[1]))
    heads = student.config.num_attention_heads, teacher.config.num_attention_heads
    matching = AttentionMatching(*blocks, pairs, [heads] * len(pairs))
    counted = torch.rand(TOKENS.shape, dtype=torch.float64)
    with matching.watching("teacher"), torch.no_grad():
        teacher(TOKENS, use_cache=False)
    with matching.watching("student"):
        student(TOKENS, use_cache=False)
    found = matching(counted)
    found.backward()
    gradients = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
    student.zero_grad()
    for model in (teacher, student):
        model.set_attn_implementation("eager")
    ours = student(TOKENS, use_cache=False, output_attentions=True).attentions
    theirs = teacher(TOKENS, use_cache=False, output_attentions=True).attentions
    wanted = torch.zeros((), dtype=torch.float64)
    for i, j in pairs:
        mine = ours[i]
        if heads[0] != heads[1]:  # mixtures begin with as much of each
            mine = mine.mean(1, keepdim=True)
        wanted = wanted + _apart(theirs[j].detach(), mine, counted) / len(pairs)
    assert len(gradients) > len(pairs)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)  # whose softmax is float32
    wanted.backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, student.get_parameter(name).grad, rtol=1e-3, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_attention_are_those_of_differences(mixed: bool, masked: bool) -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    theirs = [torch.randn(2, 4 if mixed else 2, 5, 4, dtype=torch.float64) for _ in range(2)]
    mask = torch.ones(5, 5, dtype=torch.bool).tril().triu(-2)[None, None] if masked else None

    class Attends(nn.Module):
        def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
            return scaled_dot_product_attention(queries, keys, keys, attn_mask=mask, is_causal=not masked)

    block = Attends()
    matching = AttentionMatching([block], [block], [(0, 0)], [(2, 4) if mixed else (2, 2)]).double()
    mixtures = [nn.Parameter(torch.randn(4, 2, dtype=torch.float64))] if mixed else []
    matching.mixtures = nn.ParameterList(mixtures)
    counted = torch.rand(2, 5, dtype=torch.float64)

    def loss(queries: Tensor, keys: Tensor, *_: Tensor) -> Tensor:
        with matching.watching("teacher"):
            block(*theirs)
        with matching.watching("student"):
            block(queries, keys)
        return matching(counted)

    assert torch.autograd.gradcheck(loss, (query, key, *mixtures))


def test_attention_is_compared_where_both_may_look() -> None:
    """A student with a sliding window beside a teacher without one."""
    teacher, student = _pair("mistral", sliding_window=8)
    teacher.config.sliding_window = None
    blocks = [list(model.base_model.layers) for model in (student, teacher)]
    matching = AttentionMatching(*blocks, [(0, 0)], [(4, 4)])
    for who, model in (("teacher", teacher), ("student", student)):
        with matching.watching(who):
            model(TOKENS, use_cache=False)
    assert 0 < matching(None).item() < 50


def test_attention_that_is_computed_otherwise_is_refused() -> None:
    model = make_model("llama", torch.float32)
    model.set_attn_implementation("eager")
    matching = AttentionMatching(model.model.layers, model.model.layers, [(0, 0)], [(4, 4)])
    with (
        pytest.raises(ValueError, match="does not use torch's scaled_dot_product_attention"),
        matching.watching("teacher"),
    ):
        model(TOKENS)


def test_gradients_of_hidden_states_are_those_of_differences() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    student, teacher = nn.Identity(), nn.Identity()
    matching = HiddenMatching([student], [teacher], [(0, 0)], (4, 6))
    wanted = torch.randn(2, 3, 6)

    def loss(states: Tensor) -> Tensor:
        with matching.watching("teacher"):
            teacher(wanted)
        with matching.watching("student"):
            student(states.float())
        return matching(torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.0, 2.0]])).double()

    assert torch.autograd.gradcheck(loss, (inputs,), eps=1e-3, atol=1e-2, rtol=1e-2)
