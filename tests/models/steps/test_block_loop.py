"""The loop over blocks with jobs of a few lines: ended at each block in turn it resumes to the same files, and leaves no activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from smelt.models.directory.directory import ModelDirectory
from smelt.models.steps.block_loop import (
    BackwardJob,
    BlockJob,
    BlockResult,
    forward,
    run_backward,
    run_forward,
    streamed_model,
)
from smelt.models.steps.parts import block_files
from smelt.models.steps.step import RunContext
from smelt.models.streaming.backward import KeptPass
from smelt.models.streaming.streamed import StreamedModel
from smelt.models.structure.open_model import OpenModel
from smelt.system.processes.process_group import Processes
from smelt.system.progress import Progress
from smelt.system.storage.activation_store import ActivationStore
from torch import Tensor, nn

from ...tiny import make_model, save_model

BLOCKS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    path = save_model(make_model("llama"), tmp_path_factory.mktemp("model"))
    return OpenModel(ModelDirectory(str(path), path))


def _context(journal: Path) -> RunContext:
    journal.mkdir(exist_ok=True)
    tokens = torch.randint(2, 4096, (40, 64), generator=torch.Generator().manual_seed(1))  # two batches
    return RunContext(torch.float32, tokens, 0, journal, Progress(False), Processes())


def _contents(journal: Path) -> dict[str, bytes]:
    assert not list(journal.glob("activations-*"))
    return {file.name: file.read_bytes() for file in journal.iterdir()}


class _Scaling(BlockJob):
    """Multiplies a block's weights by a number that comes of what it reads, and adds up what leaves the last one."""

    description = "scaling"

    def __init__(self, streamed: StreamedModel, journal: Path, ends_at: tuple[str, int] | None = None) -> None:
        self._streamed, self._ends_at = streamed, ends_at
        self.files: list[Path | None] = [*block_files(journal, BLOCKS), journal / "behind.safetensors"]
        self.begun, self.worked = 0, list[int]()

    def begin(self) -> None:
        self.begun += 1

    @contextmanager
    def work(self, index: int, store: ActivationStore) -> Iterator[BlockResult]:
        self.worked.append(index)
        self._see("work", index)
        sums = torch.stack([store.read(batch).abs().mean() for batch in store.batches()])
        if index == BLOCKS:
            yield BlockResult({"sums": sums})
            return
        with self.restore(index, {"sums": sums}) as block:
            yield BlockResult({"sums": sums}, [], partial(self._advance, index, block, store))

    @contextmanager
    def restore(self, index: int, stored: dict[str, Tensor]) -> Iterator[nn.Module]:
        with self._streamed.block(index) as block:
            for parameter in block.parameters():
                parameter.data = parameter.data * (1 + stored["sums"].mean())
            yield block

    def _advance(self, index: int, block: nn.Module, store: ActivationStore) -> None:
        self._see("advance", index)  # saved, but the next block's inputs are not complete
        self._streamed.run_block(index, block, store)

    def _see(self, what: str, index: int) -> None:
        if (what, index) == self._ends_at:
            raise KeyboardInterrupt


def _run(model: OpenModel, journal: Path, ends_at: tuple[str, int] | None = None) -> _Scaling:
    context = _context(journal)
    streamed = streamed_model(model, context)
    job = _Scaling(streamed, journal, ends_at)
    if ends_at is None:
        run_forward(job, streamed, context)
    else:
        with pytest.raises(KeyboardInterrupt):
            run_forward(job, streamed, context)
    return job


def test_ended_at_each_block_it_resumes_to_the_same_files(model: OpenModel, tmp_path: Path) -> None:
    quiet = _run(model, tmp_path / "quiet")
    assert quiet.worked == list(range(BLOCKS + 1))
    wanted = _contents(tmp_path / "quiet")
    assert len(wanted) == BLOCKS + 1
    moments = [(what, index) for index in range(BLOCKS) for what in ("work", "advance")] + [("work", BLOCKS)]
    for number, (what, index) in enumerate(moments):
        journal = tmp_path / str(number)
        _run(model, journal, (what, index))
        saved = index + (what == "advance")
        assert _contents(journal) == dict(sorted(wanted.items(), key=_place)[:saved])
        resumed = _run(model, journal)
        assert resumed.worked == list(range(saved, BLOCKS + 1))
        assert _contents(journal) == wanted


def _place(entry: tuple[str, bytes]) -> tuple[bool, str]:
    return entry[0].startswith("behind"), entry[0]


def test_ended_again_and_again_each_run_does_one_block(model: OpenModel, tmp_path: Path) -> None:
    _run(model, tmp_path / "quiet")
    for index in range(BLOCKS):
        assert _run(model, tmp_path / "out", ("advance", index)).worked == [index]
    assert _run(model, tmp_path / "out").worked == [BLOCKS]
    assert _contents(tmp_path / "out") == _contents(tmp_path / "quiet")


def test_what_is_finished_is_not_begun(model: OpenModel, tmp_path: Path) -> None:
    _run(model, tmp_path / "out")
    again = _run(model, tmp_path / "out")
    assert (again.begun, again.worked) == (0, [])


def test_blocks_of_which_nothing_is_kept_are_done_again(model: OpenModel, tmp_path: Path) -> None:
    for name in ("quiet", "out"):
        context = _context(tmp_path / name)
        streamed = streamed_model(model, context)
        job = _Scaling(streamed, context.journal, ("work", 2) if name == "out" else None)
        job.files[0] = None
        if name == "quiet":
            run_forward(job, streamed, context)
            continue
        with pytest.raises(KeyboardInterrupt):
            run_forward(job, streamed, context)
        job = _Scaling(streamed, context.journal)
        job.files[0] = None
        run_forward(job, streamed, context)
        assert job.worked == [0, 2, 3]
    assert _contents(tmp_path / "out") == _contents(tmp_path / "quiet")


class _Sizes(BackwardJob):
    """The size of the gradient that enters each block, of the sum of all logits."""

    description = "measuring gradients"

    def __init__(self, streamed: StreamedModel, journal: Path, ends_at: int | None = None) -> None:
        self._streamed, self._ends_at = streamed, ends_at
        self.files = [*block_files(journal, BLOCKS, "json"), journal / "head.json"]
        self.measured: list[int] = []

    def work(self, index: int, kept: KeptPass, flow: ActivationStore, *, finished: bool) -> list[float]:
        if index == self._ends_at:
            raise KeyboardInterrupt
        if not finished:
            self.measured.append(index)
        if index == BLOCKS:
            kept.head_backward(self._streamed.head(), flow, lambda logits, _: torch.ones_like(logits))
        else:
            with self._streamed.block(index) as block:
                kept.block_backward(index, block, flow)
        return [flow.read(batch).norm().item() for batch in flow.batches()]


@pytest.mark.slow
def test_backwards_it_resumes_to_the_same_files(model: OpenModel, tmp_path: Path) -> None:
    def backward(journal: Path, ends_at: int | None = None) -> list[int]:
        context = _context(journal)
        streamed = streamed_model(model, context)
        job = _Sizes(streamed, journal, ends_at)
        if ends_at is None:
            run_backward(job, streamed, context.tokens, context.progress)
        else:
            with pytest.raises(KeyboardInterrupt):
                run_backward(job, streamed, context.tokens, context.progress)
        return job.measured

    everything = list(reversed(range(BLOCKS + 1)))
    assert backward(tmp_path / "quiet") == everything
    wanted = _contents(tmp_path / "quiet")
    assert len(wanted) == BLOCKS + 1
    for ends_at in everything:
        journal = tmp_path / str(ends_at)
        done = backward(journal, ends_at)
        assert done == everything[: len(done)]
        assert len(_contents(journal)) == BLOCKS - ends_at
        assert backward(journal) == everything[len(done) :]
        assert _contents(journal) == wanted
    assert backward(tmp_path / "quiet") == []


def test_gradients_are_those_of_the_whole_model(model: OpenModel, tmp_path: Path) -> None:
    context = _context(tmp_path / "out")
    streamed = streamed_model(model, context)
    run_backward(_Sizes(streamed, context.journal), streamed, context.tokens, context.progress)
    whole = make_model("llama").float()
    embedded = whole.get_input_embeddings()(context.tokens[:32]).detach().requires_grad_()
    whole(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    assert embedded.grad is not None
    found = float((context.journal / "block-00000.json").read_text().strip("[]\n").split(",")[0])
    assert found == pytest.approx(embedded.grad.norm().item(), rel=1e-4)


def test_a_loop_that_fails_leaves_no_activations(model: OpenModel, tmp_path: Path) -> None:
    context = _context(tmp_path / "out")
    streamed = streamed_model(model, context)

    def failing() -> None:
        with forward(streamed, context.tokens, context.progress, "failing") as (store, blocks):
            for index in blocks:
                assert list(context.journal.glob("activations-*"))
                with streamed.block(index) as block:
                    streamed.run_block(index, block, store)
                if index == 1:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not _contents(context.journal)
