"""Models divided between ranks: transformers' logits, and the single process's in every stored format."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from smelt.compress.export.export import export
from smelt.runtime.decoder.architectures import spec_of
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.engine.setup.loading import operators_for
from smelt.runtime.parallel.ranks import Ranks
from smelt.runtime.weights.checkpoint import Checkpoint
from smelt.system.errors import RuntimeProblem
from torch import Tensor
from transformers import AutoConfig

from ...compress.coded import Coded, compressed
from ...tiny import CONFIGS, from_transformers
from ..drive import logits_in_pieces
from .thread_ranks import CountingRanks, on_ranks

PROMPTS = [torch.randint(4, 4096, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (19, 6)]
# Prompts in pieces beside each other, then single tokens.
STEPS = [[(0, 12), (1, 4)], [(0, 6)], [(0, 1), (1, 1)], [(1, 1)]]


def divided(
    path: Path, count: int, operators: Operators | None = None, kept: torch.dtype | None = None
) -> list[Tensor]:
    """Both prompts' logits by so many ranks, which all must have the same."""
    found = on_ranks(
        count, lambda ranks: torch.cat(logits_in_pieces(path, PROMPTS, STEPS, operators, kept, ranks=ranks))
    )
    assert all(torch.equal(each, found[0]) for each in found)
    return list(found[0].split([len(prompt) for prompt in PROMPTS]))


def alone(path: Path, operators: Operators | None = None) -> list[Tensor]:
    return logits_in_pieces(path, PROMPTS, STEPS, operators)


@pytest.mark.few(6)
@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_logits_are_those_of_transformers(tiny: Callable[..., Path], architecture: str) -> None:
    path = tiny(architecture)
    model = from_transformers(path)
    for prompt, found in zip(PROMPTS, divided(path, 2), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (4, {}),  # two ranks have a copy of each key-value head
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 200}),
        (3, {"num_attention_heads": 8, "num_key_value_heads": 4}),  # the ranks' parts differ in size
    ],
)
def test_any_number_of_ranks(tiny: Callable[..., Path], count: int, changes: dict[str, int]) -> None:
    path = tiny("olmo2", **changes)  # whose norms see all heads
    for wanted, found in zip(alone(path), divided(path, count), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_heads_that_cannot_be_divided_are_refused(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", hidden_size=96, num_attention_heads=3, num_key_value_heads=1)
    with pytest.raises(RuntimeProblem, match="3 query heads and 1 key-value heads cannot be divided between 2 ranks"):
        divided(path, 2)


@pytest.mark.few(6)
# Some of them have groups as long as all inputs of a rank, or longer.
@pytest.mark.parametrize(
    ("scheme", "group"),
    [
        ("W4A16", 32), ("W4A16", 64), ("W4A16", 128), ("W8A16", 32), ("W3A16", 32), ("W2A16", 32), ("FP8_BLOCK", None),
        ("NVFP4A16", None), ("MXFP4A16", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_formats_are_divided(tiny: Callable[..., Path], architecture: str, scheme: str, group: int | None) -> None:
    path = compressed(tiny(architecture, num_hidden_layers=2), scheme, group)
    for wanted, found in zip(alone(path), divided(path, 2), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_keys_and_values_in_int8(tiny: Callable[..., Path]) -> None:
    path = tiny("llama")
    for wanted, found in zip(
        logits_in_pieces(path, PROMPTS, STEPS, kept=torch.int8), divided(path, 2, kept=torch.int8), strict=True
    ):
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_linears_are_divided_as_the_model_itself_plans(tiny: Callable[..., Path], architecture: str) -> None:
    """transformers' ``base_model_tp_plan``: which linears have their outputs divided, and which their inputs."""
    path = tiny(architecture)
    config = AutoConfig.from_pretrained(path)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        pytest.skip("transformers has no plan for it")
    names = spec_of(config).names
    by_outputs = {*names.query_key_value, *names.gate_up}
    by_inputs = {names.out, names.down}
    planned = {name.rpartition("*.")[2]: how for name, how in plan.items() if "*." in name}
    own = {name: how for name, how in planned.items() if name in by_outputs | by_inputs}
    assert len(own) >= 3
    for name, how in own.items():
        assert ("colwise" in how) == (name in by_outputs), name
        assert ("rowwise" in how) == (name in by_inputs), name


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_rounded_inputs_have_scales_of_each_rank(tiny: Callable[..., Path], architecture: str, scheme: str) -> None:
    """A rank rounds its own inputs, as in vLLM: not to the same codes, and not further from what they stand for."""
    exact = alone(tiny(architecture, num_hidden_layers=2))
    path = compressed(tiny(architecture, num_hidden_layers=2), scheme)
    for true, whole, parts in zip(exact, alone(path), divided(path, 2), strict=True):
        assert (parts - true).norm() < 1.1 * (whole - true).norm()


@pytest.mark.few(7)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "options", [{"symmetric": False}, {"symmetric": False, "order": True}, {"order": True}, {"group": -1}]
)
def test_zero_points_and_activation_order_are_divided(
    coded: Callable[..., Coded], bits: int, options: dict[str, bool | int]
) -> None:
    path = coded(bits=bits, **options).path
    for wanted, found in zip(alone(path), divided(path, 2), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("gptq", {"bits": 4}), ("gptq", {"bits": 3}), ("gptq-v2", {"bits": 4, "symmetric": False}),
        ("gptq-v2", {"bits": 4, "symmetric": False, "order": True}), ("awq", {"bits": 4, "symmetric": False}),
    ],
)  # fmt: skip
def test_layouts_of_other_libraries_are_divided(
    coded: Callable[..., Coded], tmp_path: Path, to: str, options: dict[str, bool | int]
) -> None:
    export(str(coded(**options).path), to, tmp_path / "out")
    for wanted, found in zip(alone(tmp_path / "out"), divided(tmp_path / "out", 2), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scheme", [None, "W4A16", "W8A8"])
def test_the_cpus_kernels_compute_parts(tiny: Callable[..., Path], scheme: str | None) -> None:
    """In bfloat16, where sums of parts are rounded once more."""
    exact = alone(tiny("llama"))
    path = tiny("llama", torch.bfloat16)
    if scheme is not None:
        path = compressed(path, scheme, 32 if scheme == "W4A16" else None)
    operators = operators_for(torch.bfloat16, torch.device("cpu"), log=lambda _: None)
    for true, whole, parts in zip(exact, alone(path, operators), divided(path, 2, operators), strict=True):
        assert (parts - true).norm() < 1.1 * (whole - true).norm()


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("scheme", [None, "W4A16", "NVFP4A16"])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_experts_are_divided(tiny: Callable[..., Path], architecture: str, scheme: str | None, count: int) -> None:
    path = tiny(architecture, num_attention_heads=12, num_key_value_heads=3)
    if scheme is not None:
        compressed(path, scheme, 32 if scheme == "W4A16" else None)

    def counted(ranks: CountingRanks) -> tuple[Tensor, Counter[str]]:
        found = logits_in_pieces(path, PROMPTS, STEPS, ranks=ranks, divides_experts=True)
        return torch.cat(found), ranks.counts

    found = on_ranks(count, counted)
    assert all(torch.equal(each, found[0][0]) for each, _ in found)
    layers = 3 * len(STEPS)
    assert found[0][1] == Counter(all_reduce=layers + len(STEPS), all_to_all=4 * layers, all_gather=layers + len(STEPS))
    torch.testing.assert_close(found[0][0], torch.cat(alone(path)), atol=2e-4, rtol=1e-4)


@pytest.mark.few(5)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 25])
@pytest.mark.parametrize("scheme", ["W8A8", "FP8_BLOCK"])
def test_experts_round_their_inputs_as_on_one_process(
    tiny: Callable[..., Path], scheme: str, tokens: int, count: int
) -> None:
    """They are whole, and rows that are rounded do not see each other; some ranks may have no token."""
    path = compressed(tiny("mixtral"), scheme)
    hidden = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(tokens))

    def computed(ranks: Ranks) -> Tensor:
        model = Model(Checkpoint(path), Operators(torch.float32), ranks=ranks, divides_experts=True)
        mixture = model.layers[1].parts.feed_forward
        assert mixture is not None
        with torch.inference_mode():
            return mixture(hidden)

    wanted = computed(Ranks())
    for found in on_ranks(count, computed):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def _model(path: Path) -> Callable[[CountingRanks], Model]:
    return lambda ranks: Model(Checkpoint(path), Operators(torch.float32), ranks=ranks)


def test_a_layer_has_two_sums(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", num_hidden_layers=5)

    def counted(ranks: CountingRanks) -> Counter[str]:
        logits_in_pieces(path, [[5, 6, 7]], [[(0, 3)]], ranks=ranks)
        return ranks.counts

    # Besides: the embedding's rows, and the vocabulary's logits.
    assert on_ranks(2, counted) == [Counter(all_reduce=2 * 5 + 1, all_gather=1)] * 2


@pytest.mark.parametrize("scheme", [None, "W4A16", "W8A8", "FP8_BLOCK", "NVFP4A16"])
def test_each_rank_reads_and_keeps_its_share(
    tiny: Callable[..., Path], scheme: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("llama", torch.bfloat16)
    if scheme is not None:
        compressed(path, scheme, 32 if scheme == "W4A16" else None)
    read: Counter[int] = Counter()
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        read[threading.get_ident()] += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    whole = Model(Checkpoint(path), Operators(torch.bfloat16)).nbytes()
    stored = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    read.clear()
    kept = on_ranks(2, lambda ranks: _model(path)(ranks).nbytes())
    assert all(each <= 0.55 * 2 * whole for each in kept), "in float32, of twice the size"
    assert len(read) == 2
    assert all(count <= 0.55 * stored for count in read.values()), (read, stored)
