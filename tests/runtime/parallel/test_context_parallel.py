"""Sequences that are divided between ranks: transformers' logits, and the single process'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from smelt.runtime.decoder.parallel import context_parallel
from smelt.runtime.decoder.parallel.context_parallel import merged, partial_attention
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.engine.setup.loading import operators_for
from smelt.runtime.parallel.stages import divided
from torch import Tensor
from torch.nn import functional

from ...compress.coded import compressed
from ...tiny import CONFIGS, from_transformers
from ..drive import logits_in_pieces
from .thread_ranks import CountingRanks, on_ranks

PROMPTS = [torch.randint(4, 4096, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (45, 6, 17)]
# Prompts in pieces, pieces that only one rank has, and single tokens of several sequences.
STEPS = [[(0, 21), (1, 1)], [(0, 9), (1, 2), (2, 16)], [(0, 11)], [(0, 1), (1, 1), (2, 1)], [(0, 3)], [(1, 2)]]


def around(
    path: Path, tp: int, cp: int, operators: Operators | None = None, kept: torch.dtype | None = None
) -> list[Tensor]:
    """The prompts' logits, which all ranks must have."""

    def work(world: CountingRanks) -> list[Tensor]:
        place = divided(world, tp, cp=cp)
        return logits_in_pieces(path, PROMPTS, STEPS, operators, kept, ranks=place.ranks, context=place.context)

    found = on_ranks(tp * cp, work)
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))
    return found[0]


@pytest.mark.few(6)
@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_logits_are_those_of_transformers(tiny: Callable[..., Path], architecture: str) -> None:
    path = tiny(architecture)
    model = from_transformers(path)
    for prompt, found in zip(PROMPTS, around(path, 1, 2), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "NVFP4A16"])
@pytest.mark.parametrize(("tp", "cp"), [(1, 4), (2, 2)])
def test_formats_on_rings_of_ranks(tiny: Callable[..., Path], scheme: str, tp: int, cp: int) -> None:
    path = tiny("qwen3")
    exact = logits_in_pieces(path, PROMPTS, STEPS)
    compressed(path, scheme, 32 if scheme == "W4A16" else None)
    for true, wanted, found in zip(exact, logits_in_pieces(path, PROMPTS, STEPS), around(path, tp, cp), strict=True):
        if scheme == "W8A8":  # of many rounded inputs, some are at the edge between two codes
            assert (found - true).norm() < 1.1 * (wanted - true).norm()
        else:
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rounded_keys_and_values(tiny: Callable[..., Path], kept: torch.dtype) -> None:
    path = tiny("llama")
    wanted = logits_in_pieces(path, PROMPTS, STEPS, kept=kept)
    for one, found in zip(wanted, around(path, 1, 2, kept=kept), strict=True):
        torch.testing.assert_close(found, one, atol=1e-3, rtol=1e-3)


def test_the_cpus_kernels_beside_it(tiny: Callable[..., Path]) -> None:
    """Whose linears get no rows where a rank has none of a step's tokens."""
    exact = logits_in_pieces(tiny("llama"), PROMPTS, STEPS)
    path = compressed(tiny("llama", torch.bfloat16), "W4A16", 32)
    operators = operators_for(torch.bfloat16, torch.device("cpu"), log=lambda _: None)
    wanted = logits_in_pieces(path, PROMPTS, STEPS, operators)
    for true, whole, parts in zip(exact, wanted, around(path, 1, 2, operators), strict=True):
        assert (parts - true).norm() < 1.1 * (whole - true).norm()


def test_a_long_sequence_is_read_in_parts(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of which a window does not reach."""
    monkeypatch.setattr(context_parallel, "_KEYS", 8)
    path = tiny("gemma3_text", sliding_window=5)
    for wanted, found in zip(logits_in_pieces(path, PROMPTS, STEPS), around(path, 1, 2), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    seen=st.floats(0, 1),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_parts_merge_to_attention_in_float64(lengths: list[int], seen: float, group: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, tokens, shared, size = sum(lengths), 3, 2, 4
    queries = torch.randn(1, tokens, shared * group, size, generator=generator)
    keys, values = (torch.randn(1, shared, count, size, generator=generator) for _ in range(2))
    mask = torch.rand(1, tokens, count, generator=generator) < seen
    parts = [
        partial_attention(queries, k, v, m, 0.7, None)
        for k, v, m in zip(keys.split(lengths, 2), values.split(lengths, 2), mask.split(lengths, 2), strict=True)
        if k.shape[2]
    ]
    if not parts:
        return
    found, _ = merged(*(torch.stack(each) for each in zip(*parts, strict=True)))
    wide = (queries.double().transpose(1, 2), keys.double(), values.double())
    wanted = functional.scaled_dot_product_attention(*wide, mask[:, None], scale=0.7, enable_gqa=True).transpose(1, 2)
    rows = mask.any(-1)
    torch.testing.assert_close(found[rows].double(), wanted[rows], atol=1e-5, rtol=1e-5)
    assert not found[~rows].any()
