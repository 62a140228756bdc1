"""An engine that goes on with other weights generates what transformers does with those."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from smelt.runtime import Engine, RuntimeProblem, SamplingParams
from smelt.runtime.native.linears import NativeDenseLinear

from ...tiny import make_model

PROMPT = list(range(5, 45))  # longer than a cache block, so that its beginning is shared


@pytest.mark.few(4)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "opt", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_are_those_of_the_new_weights(
    architecture: str, dtype: torch.dtype, tiny: Callable[..., Path]
) -> None:
    engine = Engine(tiny(architecture, dtype), quiet=True, kv_cache_memory_bytes=1 << 24)
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    before = engine.generate([PROMPT], greedy)[0].outputs[0]
    other = make_model(architecture, dtype, seed=3).eval()
    state = {
        name: tensor for name, tensor in other.state_dict().items() if name != "lm_head.weight" or not _tied(other)
    }
    engine.take_weights(other.config, state, lambda name: state[name])
    for tensor in state.values():
        tensor.data.mul_(0.5)  # what is trained on after it was taken is not what is generated with
    other = make_model(architecture, dtype, seed=3).eval()
    after = engine.generate([PROMPT], greedy)[0].outputs[0]
    assert before.logprobs is not None
    with torch.no_grad():
        expected = other(torch.tensor([[*PROMPT, *after.token_ids]])).logits[0, len(PROMPT) - 1 : -1].float()
    assert after.logprobs is not None
    found = torch.tensor([each[token] for each, token in zip(after.logprobs, after.token_ids, strict=True)])
    assert before.logprobs[0].get(after.token_ids[0]) != after.logprobs[0][after.token_ids[0]]
    wanted = expected.log_softmax(-1).gather(-1, torch.tensor(after.token_ids).unsqueeze(-1)).squeeze(-1)
    assert (found - wanted).abs().mean() < (1e-4 if dtype == torch.float32 else 0.08)
    if dtype == torch.float32:
        assert torch.equal(expected.argmax(-1), torch.tensor(after.token_ids))


def _tied(model: torch.nn.Module) -> bool:
    return bool(model.config.tie_word_embeddings)  # type: ignore[union-attr]


def test_the_old_weights_are_given_back(tiny: Callable[..., Path]) -> None:
    """A training that writes its own text replaces them at each step."""
    engine = Engine(tiny("llama", torch.bfloat16), quiet=True, kv_cache_memory_bytes=1 << 24)
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    other = make_model("llama", torch.bfloat16, seed=3).eval()
    state = other.state_dict()
    kept = []
    for _ in range(2):
        engine.generate([PROMPT], greedy)
        engine.take_weights(other.config, state, lambda name: state[name])
        kept.append(sum(isinstance(each, NativeDenseLinear) for each in gc.get_objects()))
    assert kept[0] == kept[1]


def test_weights_do_not_change_under_requests(tiny: Callable[..., Path]) -> None:
    engine = Engine(tiny(), quiet=True, kv_cache_memory_bytes=1 << 24)
    engine.add_request(PROMPT, SamplingParams(max_tokens=4))
    model = make_model("llama", torch.float32)
    state = dict(model.state_dict())
    with pytest.raises(RuntimeProblem, match="1 requests are running"):
        engine.take_weights(model.config, state, lambda name: state[name])
    while engine.has_work:
        engine.step()
    state.pop("model.norm.weight")
    with pytest.raises(RuntimeProblem, match=r"lacks model\.norm\.weight"):
        engine.take_weights(model.config, state, lambda name: state[name])
    assert engine.generate([PROMPT], SamplingParams(max_tokens=2))[0].error is None  # with the weights that it had
