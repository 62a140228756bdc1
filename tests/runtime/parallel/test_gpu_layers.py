"""Models divided between ranks on the GPU's kernels, in Triton's interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.batch import Run
from smelt.runtime.engine.drafters.draft_model import DraftModel
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.gpu.layers import GpuLayers
from smelt.runtime.gpu.nested import NestedGpuOperators
from smelt.runtime.parallel.stages import RankPlace, divided
from smelt.runtime.weights.checkpoint import Checkpoint
from torch import Tensor

from ...compress.coded import compressed
from ..drive import logits_in_pieces
from ..kernels.interpreter import interpreted
from .thread_ranks import CountingRanks, on_ranks

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
CPU = torch.device("cpu")
PROMPTS = [torch.randint(4, 4096, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (15, 9)]
# A prompt; a prompt beside the rest of another; single tokens.
STEPS = [[(0, 9)], [(1, 8), (0, 5)], [(0, 1), (1, 1)]]
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter replaces functions of its own module while a kernel runs, and rewrites a kernel before, with Python's ast, which
    fails in several threads.
    """
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    lock = threading.RLock()

    def alone(work: Callable[..., object]) -> Callable[..., object]:
        def locked(*given: object, **options: object) -> object:
            with lock:
                return work(*given, **options)

        return locked

    monkeypatch.setattr(GridExecutor, "__call__", alone(GridExecutor.__call__))
    monkeypatch.setattr(InterpretedFunction, "rewrite", alone(InterpretedFunction.rewrite))


@pytest.mark.parametrize(
    ("architecture", "scheme", "tp", "pp"),
    [
        ("llama", "W4A16", 2, 1),
        pytest.param("llama", None, 2, 2, marks=SLOW),
        pytest.param("qwen3", "FP8_BLOCK", 2, 1, marks=SLOW),
        pytest.param("gemma3_text", "NVFP4A16", 2, 1, marks=SLOW),
        pytest.param("mixtral", "W4A16", 2, 1, marks=SLOW),
        pytest.param("mixtral", None, 1, 2, marks=SLOW),
        pytest.param("olmo2", None, 2, 1, marks=SLOW),  # whose norms see all heads: layer by layer
    ],
)
def test_logits_are_those_of_one_process(
    tiny: Callable[..., Path],
    architecture: str,
    scheme: str | None,
    tp: int,
    pp: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, together = GpuLayers.run, []
    monkeypatch.setattr(GpuLayers, "run", lambda *given: together.append(1) or run(*given))
    path = tiny(architecture, num_hidden_layers=2)
    exact = logits_in_pieces(path, PROMPTS, STEPS)
    if scheme is not None:
        compressed(path, scheme, 32 if scheme == "W4A16" else None)
    operators = GpuOperators(torch.float32, CPU)

    def work(world: CountingRanks) -> list[Tensor]:
        place = divided(world, tp, pp)
        return logits_in_pieces(path, PROMPTS, STEPS, operators, ranks=place.ranks, stages=place.stages)

    found = on_ranks(tp * pp, work)[0]
    assert bool(together) == (architecture != "olmo2")
    wanted = logits_in_pieces(path, PROMPTS, STEPS, operators)
    for true, one, parts in zip(exact, wanted, found, strict=True):
        if scheme == "FP8_BLOCK":  # of many rounded inputs, some are at the edge between two codes
            assert (parts - true).norm() < 1.1 * (one - true).norm()
        else:
            torch.testing.assert_close(parts, one, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "scheme", "kept"),
    [("llama", "W4A16", None), ("llama", "W4A16", torch.int4), ("mixtral", None, None)],
)
def test_a_ring_of_ranks(
    tiny: Callable[..., Path], architecture: str, scheme: str | None, kept: torch.dtype | None
) -> None:
    """Some have none of a step's tokens."""
    path = tiny(architecture, torch.float16, num_hidden_layers=2)
    if scheme is not None:
        compressed(path, scheme, 32)
    operators = GpuOperators(torch.float16, CPU)

    def work(world: CountingRanks) -> list[Tensor]:
        return logits_in_pieces(path, PROMPTS, STEPS, operators, kept, context=divided(world, 1, cp=2).context)

    found = on_ranks(2, work)[0]
    wanted, exact = (logits_in_pieces(path, PROMPTS, STEPS, operators, each) for each in (kept, None))
    for one, parts, true in zip(wanted, found, exact, strict=True):
        if kept is None:
            assert (parts - one).norm() < 2e-2 * one.norm()
        else:  # 4-bit codes are other ones where sums are rounded differently
            assert (parts - true).norm() < 1.1 * (one - true).norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "tp", "pp", "divides_experts"),
    [("llama", 2, 1, False), ("llama", 1, 2, False), ("mixtral", 2, 1, False), ("mixtral", 2, 1, True)],
)
def test_each_rank_has_its_share_of_the_upper_bits(
    tiny: Callable[..., Path], architecture: str, tp: int, pp: int, divides_experts: bool
) -> None:
    path = tiny(architecture, torch.float16, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    compressed(path, "W8A16", 32)

    def work(world: CountingRanks) -> list[Tensor]:
        place, opened = RankPlace() if world.count == 1 else divided(world, tp, pp), Checkpoint(path)
        operators = NestedGpuOperators(torch.float16, CPU)
        model = Model(opened, operators, place.ranks, place.stages, divides_experts=divides_experts)
        drafter = DraftModel.nested(opened, model, place, divides_experts=divides_experts, log=lambda _: None)
        run = Run(PROMPTS[0], 0, [0], len(PROMPTS[0]), len(PROMPTS[0]))
        return [each(each.batch([run], 16), each.keys_values(1, 16, each.dtype)) for each in (model, drafter.model)]

    (whole, upper), (found, found_upper) = on_ranks(1, work)[0], on_ranks(tp * pp, work)[0]
    assert (upper - whole).norm() > 5e-2 * whole.norm()
    assert (found - whole).norm() < 1e-2 * whole.norm()
    assert (found_upper - upper).norm() < 1e-2 * upper.norm()
