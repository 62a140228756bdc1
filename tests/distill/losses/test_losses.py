"""The losses' values against torch's own, and every gradient against differences in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from smelt.distill.losses import chunked, functions
from smelt.distill.losses.chunked import chunked_loss
from smelt.distill.losses.cross_entropy import cross_entropy
from smelt.distill.losses.loss_and_gradient import LossAndGradient, by_autograd
from smelt.distill.losses.options.base import LossOptions
from smelt.distill.losses.probabilities import most_likely
from smelt.distill.losses.table import LOSSES, Loss
from smelt.distill.losses.top_kl import top_kl
from smelt.distill.training.teachers import Comparison
from torch import Tensor
from torch.nn import functional

POSITIONS, VOCABULARY, WIDTH = 7, 19, 5


def _logits(seed: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(
        POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def _by_torch(name: str, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Each loss written down once more, with torch's own divergence."""
    ours, theirs = (torch.log_softmax(each / temperature, -1) for each in (student, teacher))

    def kl(of: Tensor, to: Tensor) -> Tensor:
        return functional.kl_div(to, of, log_target=True, reduction="none").sum(-1)

    if name == "forward_kl":
        found = kl(theirs, ours)
    elif name == "reverse_kl":
        found = kl(ours, theirs)
    elif name == "jsd":
        mixed = (0.5 * theirs.exp() + 0.5 * ours.exp()).log()
        found = 0.5 * kl(theirs, mixed) + 0.5 * kl(ours, mixed)
    else:
        found = (ours.exp() - theirs.exp()).abs().sum(-1) / 2
    return found * temperature**2


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_what_torch_makes_of_its_formula(name: str, temperature: float) -> None:
    student, teacher = _logits(0).requires_grad_(), _logits(1)
    loss = LOSSES[name]
    value, gradient = loss.function(student.detach(), teacher, temperature, loss.options())
    expected = _by_torch(name, student, teacher, temperature)
    torch.testing.assert_close(value, expected.detach())
    (wanted,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_jsd_takes_the_given_mixture(beta: float) -> None:
    student, teacher = _logits(0).requires_grad_(), _logits(1)
    q, p = student.softmax(-1), teacher.softmax(-1)
    mixed = beta * p + (1 - beta) * q
    expected = (beta * p * (p / mixed).log() + (1 - beta) * q * (q / mixed).log()).sum(-1)
    value, gradient = LOSSES["jsd"].function(student.detach(), teacher, 1.0, LOSSES["jsd"].options(beta=beta))
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), student)[0])


def test_cross_entropy_is_torchs_and_passes_over_what_has_no_target() -> None:
    student = _logits(0).requires_grad_()
    targets = torch.tensor([3, 0, 18, -1, 7, 7, -1])
    expected = functional.cross_entropy(student, targets, ignore_index=-1, reduction="none")
    value, gradient = cross_entropy(student.detach(), targets)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), student)[0])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_stored_teachers_lose_what_they_left_out(temperature: float) -> None:
    student, teacher = _logits(0), _logits(1)
    whole, gradient = LOSSES["forward_kl"].function(student, teacher, temperature, LOSSES["forward_kl"].options())
    all_of_it, its_gradient = top_kl(student, *most_likely(teacher, VOCABULARY, temperature), temperature)
    torch.testing.assert_close(all_of_it, whole)
    torch.testing.assert_close(its_gradient, gradient)
    some = [top_kl(student, *most_likely(teacher, k, temperature), temperature)[0] for k in (2, 5, 12)]
    for fewer, more in zip(some, [*some[1:], whole], strict=True):
        assert (fewer <= more + 1e-12).all()
    assert (some[0] >= -1e-12).all()


@pytest.mark.parametrize("kept", [1, 4])
def test_the_gradient_of_a_stored_teacher_is_right(kept: int) -> None:
    student, teacher = _logits(0).requires_grad_(), _logits(1)
    places, logs = most_likely(teacher, kept, 1.0)
    q, p = student.softmax(-1), logs.exp()
    ours = q.gather(-1, places)
    rest = 1 - p.sum(-1), 1 - ours.sum(-1)
    expected = (p * (logs - ours.log())).sum(-1) + rest[0] * (rest[0] / rest[1]).log()
    value, gradient = top_kl(student.detach(), places, logs, 1.0)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), student)[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*LOSSES, "top_kl"])
def test_gradients_through_chunks_are_those_of_differences(
    name: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "rows_at_once", lambda _: 3)  # so that there are several chunks, the last one smaller
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(POSITIONS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    added = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True) if bias else None
    teacher, targets = _logits(1), torch.arange(POSITIONS)
    counted = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 0.5, 1.0])

    def losses(logits: Tensor, rows: slice):  # type: ignore[no-untyped-def]
        if name == "top_kl":
            places, kept = most_likely(teacher[rows], 4, 1.5)
            compared = top_kl(logits, places, kept, 1.5)
        else:
            compared = LOSSES[name].function(logits, teacher[rows], 1.5, LOSSES[name].options())
        return [(0.7, compared), (0.3, cross_entropy(logits, targets[rows]))]

    def head(states: Tensor, matrix: Tensor, constant: Tensor | None) -> Tensor:
        return 4 * torch.tanh(functional.linear(states, matrix, constant) / 4)  # as models with a soft cap do

    def whole(*leaves: Tensor) -> Tensor:
        return chunked_loss(leaves[0], leaves[1], leaves[2] if bias else None, head, losses, counted)[0]

    leaves = [each for each in (hidden, weight, added) if each is not None]
    assert torch.autograd.gradcheck(whole, leaves)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(64, 16), torch.randn(100, 16)
    targets = torch.arange(64)

    def losses(logits: Tensor, rows: slice):  # type: ignore[no-untyped-def]
        return [(1.0, cross_entropy(logits, targets[rows]))]

    found = []
    for rows in (64, 5):
        monkeypatch.setattr(chunked, "rows_at_once", lambda _, rows=rows: rows)
        leaf = hidden.clone().requires_grad_()
        loss, parts = chunked_loss(leaf, weight, None, lambda h, w, _: functional.linear(h, w), losses, torch.ones(64))
        (3 * loss).backward()
        found.append((loss.detach(), parts, leaf.grad))
    expected = functional.cross_entropy(hidden @ weight.T, targets)
    torch.testing.assert_close(found[0][0], expected)
    torch.testing.assert_close(found[0], found[1])


def _huber_values(student: Tensor, teacher: Tensor, temperature: float, _options: LossOptions) -> Tensor:
    return functional.smooth_l1_loss(student / temperature, teacher.to(student.dtype), reduction="none").mean(-1)


# A loss that nobody has written a gradient for.
_HUBER = Loss(by_autograd(_huber_values))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_autograd_finds_the_gradient_that_is_written_by_hand(name: str, dtype: torch.dtype) -> None:
    student, teacher = (_logits(seed).to(dtype) for seed in (0, 1))
    wanted = LOSSES[name].function(student, teacher, 1.5, LOSSES[name].options())
    with torch.no_grad():  # as where losses are computed in chunks
        values = lambda logits: _by_torch(name, logits, teacher.to(logits.dtype), 1.5)  # noqa: E731
        found = by_autograd(values)(student)
    for ours, theirs in zip(found, wanted, strict=True):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, theirs)


def test_a_loss_of_values_alone_goes_through_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, teacher = _HUBER, _logits(1)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(POSITIONS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(chunked, "rows_at_once", lambda _: 3)

    def losses(logits: Tensor, rows: slice):  # type: ignore[no-untyped-def]
        return [(1.0, loss.function(logits, teacher[rows], 2.0, loss.options()))]

    def head(states: Tensor, matrix: Tensor, _: Tensor | None) -> Tensor:
        return functional.linear(states, matrix)

    found, _ = chunked_loss(hidden, weight, None, head, losses, torch.ones(POSITIONS))
    expected = _huber_values(hidden @ weight.T, teacher, 2.0, loss.options()).mean()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight])
    )


def test_a_gpu_takes_the_kernel_or_what_there_is_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(student: Tensor, teacher: Tensor, temperature: float, options: LossOptions) -> LossAndGradient:
        return student[:, 0] + 1, torch.zeros_like(student)

    given = _logits(0), _logits(1), 1.0, LossOptions()
    losses = {"huber": _HUBER, "with a kernel": replace(_HUBER, kernel=kernel)}
    monkeypatch.setattr(functions, "LOSSES", losses)
    torch.testing.assert_close(functions.FUSED.divergence("huber", *given), _HUBER.function(*given))
    torch.testing.assert_close(functions.FUSED.divergence("with a kernel", *given), kernel(*given))
    torch.testing.assert_close(functions.TORCH.divergence("with a kernel", *given), _HUBER.function(*given))


def test_a_student_learns_by_a_loss_of_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of the table is all that a new loss takes."""
    monkeypatch.setattr(functions, "LOSSES", {**LOSSES, "huber": _HUBER})
    comparison, teacher = Comparison("huber", LossOptions()), _logits(1).float()
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(POSITIONS, 2 * VOCABULARY, generator=generator)
    weight = torch.zeros(VOCABULARY, 2 * VOCABULARY, requires_grad=True)
    optimizer, found = torch.optim.Adam([weight], lr=0.05), list[float]()
    for _ in range(100):
        loss, _parts = chunked_loss(
            hidden,
            weight,
            None,
            lambda states, matrix, _: functional.linear(states, matrix),
            lambda logits, rows: [(1.0, comparison(logits, teacher[rows]))],
            torch.ones(POSITIONS),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.01 * found[0]


def test_a_frozen_head_gets_no_gradient_and_the_rest_the_same() -> None:
    """Which would be a third of the head's work, and a buffer of its size."""
    hidden, weight = torch.randn(64, 16), torch.randn(100, 16)
    asked: list[int] = []

    def losses(logits: Tensor, rows: slice):  # type: ignore[no-untyped-def]
        return [(1.0, cross_entropy(logits, torch.arange(64)[rows]))]

    def head(states: Tensor, matrix: Tensor, _: Tensor | None) -> Tensor:
        asked.append(matrix.requires_grad)
        return functional.linear(states, matrix)

    found = []
    for frozen in (False, True):
        leaf, table = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        chunked_loss(leaf, table, None, head, losses, torch.ones(64))[0].backward()
        assert (table.grad is None) == frozen
        found.append(leaf.grad)
    assert asked == [True, False]
    torch.testing.assert_close(found[0], found[1])


def test_where_nothing_counts_the_loss_is_nothing() -> None:
    """A part of a batch may hold prompts only."""
    hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
    losses = lambda logits, rows: [(1.0, cross_entropy(logits, torch.arange(8)[rows]))]  # noqa: E731
    loss, _ = chunked_loss(hidden, weight, None, lambda h, w, _: functional.linear(h, w), losses, torch.zeros(8))
    loss.backward()
    assert float(loss.detach()) == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
