"""Swapping on a real engine: the same tokens, and a session's next turn that pays only for new tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import RuntimeProblem, SamplingParams
from smelt.runtime.decoder.parts.kv_cache import PagedKeysValues
from smelt.runtime.engine.setup.host_blocks import HostBlocks
from smelt.runtime.gpu.cache import GpuKeysValues
from smelt.runtime.scheduling.plan import StepPlan

from ..drive import engine

PROMPTS = [[(7 * i + j) % 50 + 1 for j in range(40)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def _block_bytes(path: Path, **options: Any) -> int:
    found = engine(path, max_model_len=16, max_num_seqs=1, **options).reservation
    return found.cache // found.blocks


@pytest.mark.few(2)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("share", [True, False])
def test_swapped_sequences_go_on_where_they_were(tiny: Callable[..., Path], kv_cache_dtype: str, share: bool) -> None:
    path = tiny("llama")
    block = _block_bytes(path, kv_cache_dtype=kv_cache_dtype)
    expected = engine(path, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=share).generate(PROMPTS, GREEDY)
    starved = engine(
        path,
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=share,
        max_model_len=64,
        kv_cache_memory_bytes=13 * block,
        host_cache_bytes=30 * block,
        swap="swap",
        admission="immediate",
    )
    computed: list[int] = []
    execute = starved.executor.execute

    def counted(plan: StepPlan) -> Any:
        computed.append(plan.tokens)
        return execute(plan)

    starved.executor.execute = counted  # type: ignore[method-assign]
    found = starved.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert starved.scheduler.swaps == starved.scheduler.preemptions > 0
    assert sum(computed) == 4 * (40 + 19), "nothing is computed twice"
    assert starved.cache.host is not None
    starved.cache.begin_step()
    starved.cache.host.check([])


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_sessions_next_turn_computes_only_new_tokens(
    on_disk: bool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Between two turns others take the whole cache."""
    path = tiny("llama")
    block = _block_bytes(path)
    disk = tmp_path / "disk"
    disk.mkdir()
    options = {"host_cache_directory": str(disk)} if on_disk else {}
    running = engine(path, max_model_len=80, kv_cache_memory_bytes=12 * block, host_cache_bytes=40 * block, **options)
    assert not list(disk.iterdir()), "nothing that a kill could leave behind"
    first = running.generate(PROMPTS[0], GREEDY)[0]
    running.generate(PROMPTS[1:], GREEDY)
    turn = [*PROMPTS[0], *first.outputs[0].token_ids, 3, 4, 5]
    second = running.generate(turn, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert second.num_cached_tokens == 56, "of 59 computed positions, all in full blocks of 8"
    plain = engine(path).generate(turn, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert second.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_disk_without_room_is_said(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    for directory, size in ((tmp_path, 1 << 60), (tmp_path / "nowhere", 1 << 20)):
        with pytest.raises(RuntimeProblem, match=r"host_cache_directory: .* cannot hold"):
            engine(path, max_model_len=80, host_cache_bytes=size, host_cache_directory=str(directory))
    assert not list(tmp_path.glob("smelt-kv-*"))
    with pytest.raises(RuntimeProblem, match="host_cache_bytes is 0"):
        engine(path, host_cache_directory=str(tmp_path))


def test_what_a_failed_step_should_have_restored_is_not_found(tiny: Callable[..., Path]) -> None:
    path = tiny("llama")
    block = _block_bytes(path)
    running = engine(path, max_model_len=80, kv_cache_memory_bytes=12 * block, host_cache_bytes=40 * block)
    expected = running.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
    running.generate(PROMPTS[1:], GREEDY)
    execute = running.executor.execute

    def breaks(plan: StepPlan) -> Any:
        assert plan.swap_in
        raise MemoryError("no room for the logits")

    running.executor.execute = breaks  # type: ignore[method-assign]
    running.add_request(PROMPTS[0], GREEDY)
    with pytest.raises(MemoryError):
        running.step()
    running.executor.execute = execute  # type: ignore[method-assign]
    again = running.generate(PROMPTS[0], GREEDY)[0]
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [[2, 2], [2, 1, 2]])
@pytest.mark.parametrize("kind", ["torch", "gpu"])
def test_blocks_come_back_as_they_were(kind: str, heads: list[int], dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    store: Any = (
        PagedKeysValues(heads, 8, 6, 4, dtype, cpu) if kind == "torch" else GpuKeysValues(heads, 8, 6, 4, dtype, cpu)
    )
    for layer, count in enumerate(heads):
        drawn = [torch.randn(24, count, 8, generator=torch.Generator().manual_seed(layer + i)) for i in range(2)]
        store.write(layer, torch.arange(24), *drawn)
    before = [tensor.clone() for tensor in store.by_block()]
    host = HostBlocks(store, 3)
    blocks = [2, 5, 0]
    host.swap(StepPlan([], swap_out=[(block, slot) for slot, block in enumerate(blocks)]))
    for layer, count in enumerate(heads):
        store.write(layer, torch.arange(24), *(torch.zeros(24, count, 8) for _ in range(2)))
    host.swap(StepPlan([], swap_in=[(slot, block) for slot, block in enumerate(blocks)]))
    assert before
    for was, now in zip(before, store.by_block(), strict=True):
        for block in blocks:
            assert torch.equal(was[:, block].view(torch.uint8), now[:, block].contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"swap": "swap"}, "swap is 'swap', but host_cache_bytes is 0"),
        ({"swap": "disk", "host_cache_bytes": 1}, "swap is 'disk'; it must be auto, swap, recompute"),
        ({"host_cache_bytes": 1}, "it must be at least a cache block"),
        ({"host_cache_bytes": 1 << 60}, "at most the free host memory"),
        ({"host_cache_bytes": -1}, "must not be negative"),
    ],
)
def test_what_cannot_be_is_refused(tiny: Callable[..., Path], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RuntimeProblem, match=sentence):
        engine(tiny("llama"), **options)
