"""LoRA adapters beside their base, against peft's own unmerged model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import Engine, RuntimeProblem, SamplingParams
from smelt.system.errors import SmeltError
from transformers import AutoModelForCausalLM

from ...compress.coded import compressed
from ..drive import engine
from ..random_adapter import adapter_of

peft = pytest.importorskip("peft", reason="needs peft, which is in the dev extra")

PROMPT = torch.randint(4, 4096, (24,), generator=torch.Generator().manual_seed(0)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
EVERY_LINEAR = {"target_modules": "all-linear"}


def theirs(model: Any, prompt: list[int] = PROMPT, count: int = 12) -> tuple[list[int], list[float]]:
    """Greedy tokens of a transformers model and their log probabilities."""
    tokens = list(prompt)
    logprobs = []
    with torch.no_grad():
        for _ in range(count):
            row = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return tokens[len(prompt) :], logprobs


def ours(running: Engine, adapter: str | None, prompt: list[int] = PROMPT) -> tuple[list[int], list[float]]:
    (output,) = running.generate([prompt], GREEDY, adapter=adapter)
    found = output.outputs[0]
    assert found.logprobs is not None
    return found.token_ids, [each[token] for each, token in zip(found.logprobs, found.token_ids, strict=True)]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", EVERY_LINEAR),
        ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "layers_to_transform": [1]}),
        ("llama", EVERY_LINEAR | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 9}}),
        ("qwen2", {"target_modules": ["k_proj", "gate_proj"]}),
        ("gemma3_text", EVERY_LINEAR),
        ("phi3", EVERY_LINEAR),
        ("opt", {"target_modules": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]}),
        ("gpt_neox", EVERY_LINEAR),
        ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
        ("mixtral", {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
    ],
)
def test_outputs_are_those_of_peft(
    tiny: Callable[..., Path], tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    path = tiny(architecture)
    model = adapter_of(path, tmp_path / "adapter", **settings)
    running = engine(path)
    plain = ours(running, None)
    running.load_adapter("mine", tmp_path / "adapter")
    tokens, logprobs = theirs(model)
    found, our_logprobs = ours(running, "mine")
    assert found == tokens
    assert our_logprobs == pytest.approx(logprobs, abs=2e-4)
    assert our_logprobs != pytest.approx(plain[1], abs=1e-2), "the adapter changes something"
    assert ours(running, None)[1] == pytest.approx(plain[1], abs=1e-4), "and not the base"


def test_requests_of_one_batch_have_their_own_adapters(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    for seed, name in enumerate(("a", "b")):
        adapter_of(path, tmp_path / name, seed, **EVERY_LINEAR)
    running = engine(path)
    for name in ("a", "b"):
        running.load_adapter(name, tmp_path / name)
    wanted = {name: ours(running, name)[0] for name in (None, "a", "b")}
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3
    found: dict[str, list[int]] = {}
    names = {running.add_request(PROMPT, GREEDY, adapter=name): name for name in (*wanted, *wanted)}
    while running.has_work:
        found |= {output.request_id: output.outputs[0].token_ids for output in running.step()}
    assert {names[id]: tokens for id, tokens in found.items()} == wanted
    assert len(found) == 6


def scores(running: Engine, adapter: str | None = None) -> torch.Tensor:
    """Log probabilities of given tokens: of the first ones as a prompt's, of the others one after another, as when decoding."""
    given = PROMPT + list(range(50, 90))
    found = running.generate([given], SamplingParams(max_tokens=1, prompt_logprobs=1), adapter=adapter)[0]
    assert found.prompt_logprobs is not None
    return torch.tensor([each[token] for each, token in zip(found.prompt_logprobs, given[1:], strict=True)])


def test_native_kernels_apply_adapters_as_exactly_as_merged_weights(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    adapter_of(path, tmp_path / "adapter", **EVERY_LINEAR).merge_and_unload().save_pretrained(tmp_path / "merged")
    running, merged = engine(path, dtype="bfloat16"), engine(tmp_path / "merged", dtype="bfloat16")
    running.load_adapter("mine", tmp_path / "adapter")
    exact = scores(engine(tmp_path / "merged"))
    assert (scores(running, "mine") - exact).abs().mean() < 1.5 * (scores(merged) - exact).abs().mean()
    # Decoding, where layers without adapters run in one call of the kernels.
    greedy = [running.generate([PROMPT], GREEDY, adapter=name)[0].outputs[0].token_ids for name in (None, "mine", None)]
    assert greedy[0] == greedy[2] != greedy[1]


def test_packed_weights_take_adapters(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    adapter_of(path, tmp_path / "adapter", **EVERY_LINEAR)
    packed = compressed(path, "W4A16", 32)
    base = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    with torch.no_grad():
        base(torch.tensor([PROMPT]))  # before that it has no weights
    running = engine(packed)
    running.load_adapter("mine", tmp_path / "adapter")
    tokens, logprobs = theirs(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval())
    found, our_logprobs = ours(running, "mine")
    assert found == tokens
    assert our_logprobs == pytest.approx(logprobs, abs=2e-4)


def test_an_adapter_under_an_old_name_finds_nothing_of_the_old_one(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    models = [adapter_of(path, tmp_path / str(seed), seed, **EVERY_LINEAR) for seed in range(2)]
    running = engine(path)
    for seed, model in enumerate(models):
        running.load_adapter("mine", tmp_path / str(seed))
        assert ours(running, "mine")[0] == theirs(model)[0]
        running.unload_adapter("mine")
    assert running.adapters == []
    with pytest.raises(RuntimeProblem, match="no adapter named 'mine'"):
        ours(running, "mine")


def test_an_adapter_stays_while_requests_need_it(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    adapter_of(path, tmp_path / "adapter", **EVERY_LINEAR)
    running = engine(path)
    running.load_adapter("mine", tmp_path / "adapter")
    with pytest.raises(RuntimeProblem, match="already"):
        running.load_adapter("mine", tmp_path / "adapter")
    request = running.add_request(PROMPT, GREEDY, adapter="mine")
    with pytest.raises(RuntimeProblem, match="1 requests for the adapter"):
        running.unload_adapter("mine")
    running.abort(request)
    running.unload_adapter("mine")


def test_an_adapter_that_does_not_fit_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    adapter = adapter_of(path, tmp_path / "adapter", target_modules=["o_proj"])
    rank = adapter.peft_config["default"].r
    layers = [layer.self_attn.o_proj for layer in AutoModelForCausalLM.from_pretrained(path).model.layers]
    needed = 4 * rank * sum(layer.in_features + layer.out_features for layer in layers)
    running = engine(path, adapter_bytes=2 * needed - 1)
    running.load_adapter("first", tmp_path / "adapter")
    with pytest.raises(RuntimeProblem, match="unload another one"):
        running.load_adapter("second", tmp_path / "adapter")
    running.unload_adapter("first")
    running.load_adapter("second", tmp_path / "adapter")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "DoRA cannot be served"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "a trained parameter cannot"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.weight: it cannot be served"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tiny: Callable[..., Path], tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    path = tiny("llama")
    adapter_of(path, tmp_path / "adapter", **settings)
    running = engine(path)
    with pytest.raises(SmeltError, match=match):
        running.load_adapter("mine", tmp_path / "adapter")
    assert running.adapters == []


def test_an_adapter_of_another_model_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    adapter_of(tiny("llama", hidden_size=64, num_attention_heads=2), tmp_path / "adapter", **EVERY_LINEAR)
    running = engine(tiny("llama"))
    with pytest.raises(SmeltError, match="it is for a weight of"):
        running.load_adapter("mine", tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(SmeltError, match="IA3"):
        running.load_adapter("mine", tmp_path / "adapter")


def test_operators_that_cannot_apply_adapters_say_so(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    adapter_of(path, tmp_path / "adapter", **EVERY_LINEAR)
    running = engine(path, compile=True)
    with pytest.raises(RuntimeProblem, match="without compile"):
        running.load_adapter("mine", tmp_path / "adapter")
