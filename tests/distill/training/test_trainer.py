"""The loop, its optimizer and its schedules, against torch's own and against itself after an interruption."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from smelt.distill.training.batches import ShuffledWindows, TrainingBatch
from smelt.distill.training.optimizer import MasterAdamW, Rows, Saved, Trained
from smelt.distill.training.schedule import SCHEDULES, rate_at
from smelt.distill.training.small_states import SmallStatesAdamW
from smelt.distill.training.trainer import Trainer, TrainerSettings, TrainingError, Watch
from torch import Tensor, nn
from torch.nn import functional

CORPUS = torch.randint(0, 11, (13, 6), generator=torch.Generator().manual_seed(5))


class Memory:
    """A store that keeps the last snapshot as a file would: what is saved later does not change it."""

    def __init__(self) -> None:
        self.kept: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def load(self) -> tuple[Saved, dict[str, Any]] | None:
        if self.kept is None:
            return None
        tensors, data = self.kept
        return lambda name, rows: tensors.get(name), data

    def save(self, tensors: dict[str, Tensor], rows: Mapping[str, Rows], data: dict[str, Any]) -> None:
        assert not rows  # which are for several processes
        self.kept = {name: each.clone() for name, each in tensors.items()}, data


class Bigrams:
    """A tiny model: the next token by the last one's embedding."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(11, 16).to(dtype), nn.Linear(16, 11).to(dtype)

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        logits = self.head(self.table(batch.tokens[:, :-1])).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten())
        return loss, {"text": float(loss)}

    def held_out(self) -> dict[str, float]:
        with torch.no_grad():
            return self.loss(TrainingBatch(CORPUS[:2]))[1]

    def trained(self) -> dict[str, Trained]:
        found = {f"table.{n}": Trained(p) for n, p in self.table.named_parameters()}
        return found | {f"head.{n}": Trained(p, decays=n != "bias") for n, p in self.head.named_parameters()}


def _windows(batch: int = 4, seed: int = 0) -> ShuffledWindows:
    return ShuffledWindows(lambda numbers: TrainingBatch(CORPUS[numbers], windows=numbers), len(CORPUS), batch, seed)


def _trainer(store: Memory, learner: Bigrams | None = None, watch: Watch | None = None, **changes: Any) -> Trainer:
    learner = learner or Bigrams()
    small = changes.pop("small_states", False)
    settings = TrainerSettings(**({"steps": 12, "rate": 0.01, "warmup": 2, "measures": 3} | changes))
    return Trainer(
        learner, MasterAdamW(learner.trained(), 0.1, small_states=small), _windows().at, settings, store, watch
    )


def test_every_window_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    windows = _windows(batch=13)
    orders = [windows.at(step).windows for step in range(3)]
    for order in orders:
        assert order is not None
        assert sorted(order.tolist()) == list(range(13))
    assert len({tuple(order.tolist()) for order in orders if order is not None}) == 3
    again = _windows(batch=13).at(2).windows
    assert again is not None
    assert torch.equal(again, orders[2])  # whatever was asked for before
    other = _windows(batch=13, seed=1).at(0).windows
    assert other is not None
    assert not torch.equal(other, orders[0])


def test_batches_go_on_across_epochs() -> None:
    numbers = torch.cat([_windows().at(step).windows for step in range(13)])  # 4 epochs of 13 windows
    assert torch.equal(numbers.bincount(), torch.full((13,), 4))


def test_a_corpus_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="13 windows are fewer than a batch of 14"):
        _windows(batch=14)


def test_schedules_warm_up_and_come_down() -> None:
    for name in SCHEDULES:
        rates = [rate_at(name, step, 100, 10) for step in range(100)]
        assert rates[0] == pytest.approx(1 / 11)
        assert max(rates) == pytest.approx(1.0)
        assert all(a <= b for a, b in itertools.pairwise(rates[:11]))
        assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert rate_at("constant", 99, 100, 10) == 1.0
    assert rate_at("cosine", 55, 100, 10) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert rate_at("wsd", 79, 100, 0) == 1.0
    assert rate_at("wsd", 90, 100, 0) == pytest.approx(0.5)


def test_the_optimizer_is_torchs_adamw() -> None:
    torch.manual_seed(1)
    ours, theirs = nn.Linear(8, 4), nn.Linear(8, 4)
    theirs.load_state_dict(ours.state_dict())
    mine = MasterAdamW({"w": Trained(ours.weight), "b": Trained(ours.bias, rate=0.5, decays=False)}, 0.1)
    groups = [
        {"params": [theirs.weight], "lr": 0.02, "weight_decay": 0.1},
        {"params": [theirs.bias], "lr": 0.01, "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for _ in range(5):
        inputs = torch.randn(16, 8)
        for model in (ours, theirs):
            functional.mse_loss(model(inputs), inputs[:, :4]).backward()
        mine.collect()
        norm = mine.clip(0.1)
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)), rel=1e-5)
        mine.step(0.02)
        torchs.step()
        torchs.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.bias, theirs.bias, atol=1e-6, rtol=1e-5)


def test_steps_too_small_for_bfloat16_add_up_in_the_master() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW({"w": Trained(weight)}, 0.0)
    for _ in range(40):
        weight.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.collect()
        optimizer.step(1e-4)
    torch.testing.assert_close(optimizer.masters["w"].detach(), torch.full((4,), 1 - 40e-4), atol=1e-5, rtol=0)
    assert torch.equal(weight.detach(), optimizer.masters["w"].detach().bfloat16())
    assert weight[0] < 1


def test_what_was_pruned_stays_zero() -> None:
    weight = nn.Parameter(torch.tensor([0.0, 1.0, 0.0, 2.0]))
    optimizer = MasterAdamW({"w": Trained(weight, stays=weight.detach() != 0)}, 0.1)
    for _ in range(3):
        weight.grad = torch.tensor([100.0, 1.0, 100.0, 1.0])
        optimizer.collect()
        assert optimizer.clip(None) == pytest.approx(2**0.5)
        optimizer.step(0.1)
    assert weight.tolist()[0] == weight.tolist()[2] == 0.0
    assert weight[1] < 1


def test_moments_in_eight_bits_lead_to_nearly_the_same_place() -> None:
    found = {}
    for small in (False, True):
        torch.manual_seed(2)
        model = nn.Linear(64, 64, bias=False)
        goal = torch.randn(64, 64) / 8
        optimizer = MasterAdamW({"w": Trained(model.weight)}, 0.0, small_states=small)
        for step in range(200):
            inputs = torch.randn(64, 64)
            functional.mse_loss(model(inputs), inputs @ goal.T).backward()
            optimizer.collect()
            optimizer.step(0.01 * (1 - step / 200))
        found[small] = float((model.weight.detach() - goal).norm() / goal.norm())
        kept = {name: each for name, each in optimizer.state().items() if not name.startswith(("master", "step"))}
        size = sum(each.nbytes for each in kept.values()) / model.weight.numel()
        assert size < 2.1 if small else size == 8
    assert found[True] < max(0.02, 2 * found[False])


def test_second_moments_in_eight_bits_shrink_with_the_gradient() -> None:
    """As torch's do, though each step shrinks them by less than the next code; a neighbour in the block keeps its scale."""
    weights = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    settings: Any = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    ours = SmallStatesAdamW([{"params": [weights[0]]}], **settings)
    theirs = torch.optim.AdamW([weights[1]], weight_decay=0.0, **settings)
    for step in range(200):
        for weight in weights:
            weight.grad = torch.tensor([1.0, 1.0 if step < 20 else 0.01])
        ours.step()
        theirs.step()
    expected = theirs.state[weights[1]]["exp_avg_sq"].sqrt()
    found = ours.moments(weights[0], plain=True)["exp_avg_sq"].sqrt().flatten()[:2]
    assert torch.allclose(found, expected, rtol=0.1)
    assert torch.allclose(weights[0], weights[1], rtol=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"average": 0.9, "parts": 2},
        {"spike": 1.05},
        {"average": 0.9, "small_states": True},
        {"judge": lambda losses: losses["text"], "rate": 0.3, "measures": 7},
    ],
)
def test_an_interrupted_training_ends_bit_for_bit_as_one_that_was_not(changes: dict[str, Any]) -> None:
    whole = _trainer(Memory(), **changes).run()
    for stop in (1, 5, 11):
        store = Memory()

        def track(steps: Iterable[int], stop: int = stop) -> Iterator[int]:
            for step in steps:
                if step == stop:
                    raise KeyboardInterrupt
                yield step

        with pytest.raises(KeyboardInterrupt):
            _trainer(store, watch=Watch(track), **changes).run()
        rest = _trainer(store, **changes)
        found = rest.run()
        assert [one.step for one in rest.metrics] == list(range(1, 13))
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)


class Unseen(Bigrams):
    """Judged by text of the same tokens in another order, of which training learns little and forgets it."""

    def held_out(self) -> dict[str, float]:
        with torch.no_grad():
            return self.loss(
                TrainingBatch(
                    CORPUS.flatten()[torch.randperm(78, generator=torch.Generator().manual_seed(1))].view(13, 6)
                )
            )[1]


@pytest.mark.parametrize(("rate", "first"), [(0.03, False), (0.3, True)])
def test_the_best_weights_are_those_with_the_lowest_held_out_loss(rate: float, first: bool) -> None:
    """Among those that were measured, the first ones, too, which training at such a rate only makes worse."""
    learner = Unseen()
    seen: dict[int, dict[str, Tensor]] = {}

    def see(metrics: list[Any]) -> None:
        seen[len(metrics)] = {name: each.detach().clone() for name, each in trainer._optimizer.masters.items()}

    watch = Watch(on_step=see)
    trainer = _trainer(Memory(), learner, watch, rate=rate, measures=7, judge=lambda losses: losses["text"])
    see([])
    found = trainer.run()
    assert trainer.started is not None
    losses = {0: trainer.started["text"]} | {m.step: m.held_out["text"] for m in trainer.metrics if m.held_out}
    assert len(losses) == 7
    least = min(losses, key=lambda step: losses[step])
    assert least < 12
    assert (least == 0) == first
    assert trainer.best is not None
    assert trainer.best.step == least
    assert all(torch.equal(found[name], seen[least][name]) for name in found)
    assert learner.held_out()["text"] == pytest.approx(losses[least])
    assert trainer.ended == {"text": losses[least]}


@pytest.mark.parametrize("stop", [3, 6])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_within_a_step_keeps_the_steps_before(
    stop: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the loss is computed, and while the optimizer changes weights, which it ends first."""
    whole = _trainer(Memory()).run()
    handlers = {each: signal.signal(each, _interrupted) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        for where in ("loss", "step"):
            store = Memory()
            first = _trainer(store)
            owner = first._learner if where == "loss" else first._optimizer
            usual, calls = getattr(owner, where), list[int]()

            def stopping(*args: Any, usual: Any = usual, calls: list[int] = calls) -> Any:
                calls.append(1)
                if len(calls) == stop + 1:
                    signal.raise_signal(number)
                return usual(*args)

            monkeypatch.setattr(owner, where, stopping)
            with pytest.raises(KeyboardInterrupt):
                first.run()
            assert len(first.metrics) == (
                stop + 1 if where == "step" else stop - 1
            )  # the loss of a held-out batch came first
            assert store.kept is not None
            assert len(store.kept[1]["metrics"]) == len(first.metrics)
            rest = _trainer(store)
            found = rest.run()
            assert [one.step for one in rest.metrics] == list(range(1, 13))
            assert all(torch.equal(found[name], whole[name]) for name in whole)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_moments_in_eight_bits_are_the_same_when_they_are_rounded_again() -> None:
    optimizer = SmallStatesAdamW([{"params": [torch.zeros(40, 40)]}], lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    (parameter,) = optimizer.param_groups[0]["params"]
    for _ in range(3):
        parameter.grad = torch.randn(40, 40).exp() * torch.randn(40, 40).sign()
        optimizer.step()
    first = optimizer.moments(parameter, plain=False)
    plain = optimizer.moments(parameter, plain=True)
    optimizer.go_on(parameter, lambda name, _: plain.get(name), None)
    again = optimizer.moments(parameter, plain=False)
    assert all(torch.equal(first[name], again[name]) for name in ("average", "square"))


def test_parts_of_a_batch_are_the_whole_batch() -> None:
    found = []
    for parts in (1, 2):
        learner = Bigrams(torch.float32)
        found.append(_trainer(Memory(), learner, parts=parts).run())
    for name, each in found[0].items():
        torch.testing.assert_close(each, found[1][name], atol=1e-5, rtol=1e-4)


def test_the_loss_falls_and_is_measured_on_text_that_is_kept() -> None:
    trainer = _trainer(Memory(), steps=60)
    trainer.run()
    assert trainer.started is not None
    last = trainer.metrics[-1]
    assert last.held_out is not None
    assert last.held_out["text"] < trainer.started["text"]
    assert [one.step for one in trainer.metrics if one.held_out] == [30, 60]
    assert last.tokens == 60 * 24


def test_a_loss_that_is_no_number_ends_training_with_its_batch() -> None:
    class Broken(Bigrams):
        def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
            loss, parts = super().loss(batch)
            return (loss * torch.nan, parts) if torch.equal(batch.tokens, _windows().at(3).tokens) else (loss, parts)

    learner = Broken()
    with pytest.raises(TrainingError, match="step 4: the loss is nan") as caught:
        _trainer(Memory(), learner).run()
    assert torch.equal(caught.value.batch.tokens, _windows().at(3).tokens)


def test_spikes_are_passed_over() -> None:
    class Spiky(Bigrams):
        def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
            loss, parts = super().loss(batch)
            return (1000 * loss if torch.equal(batch.tokens, _windows().at(9).tokens) else loss), parts

    trainer = _trainer(Memory(), Spiky(), spike=10.0)
    trainer.run()
    assert [one.step for one in trainer.metrics if one.skipped] == [10]
