"""Losses with a bound: ``acc loss <= 1% @95%`` is certified, refuted, or needs more items."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...system.errors import SmeltError
from ..results.betting import lower_bound, more_values, upper_bound
from ..results.result import Guaranteed, ModelResult
from ..results.tasks import primary_tasks
from .scoring.aggregations import is_right_or_wrong

_FORM = re.compile(
    r"^\s*((?P<what>acc|ppl|task:\S+)\s+loss\s*<=\s*(?P<limit>\d+(\.\d+)?)\s*%|kl\s*<=\s*(?P<nats>\d+(\.\d+)?))"
    r"\s*(@\s*(?P<confidence>\d+(\.\d+)?)\s*%)?\s*$"
)
_CONFIDENCE = 95.0
# A window's loss of likelihood and its divergence have no bound of their own: no more than so many nats a token are counted.
_MOST_NATS = 1.0


@dataclass(frozen=True)
class Guarantee:
    """A claim on how much a model loses beside its baseline.

    Attributes:
        text: as it was written.
        what: ``acc`` (every task whose items are right or wrong), ``task:NAME``, ``ppl`` or ``kl``.
        limit: of the loss: a share of the items or of the perplexity; for ``kl`` of the divergence, in nats a token.
        confidence: with which it is to hold.
    """

    text: str
    what: str
    limit: float
    confidence: float

    @classmethod
    def parse(cls, text: str) -> Guarantee:
        """Read ``acc loss <= 1% @95%``, ``task:piqa loss <= 0.5%``, ``ppl loss <= 2%`` or ``kl <= 0.02``; 95% are the default.

        Raises:
            SmeltError: it is none.
        """
        found = _FORM.match(text)
        if found is None:
            raise SmeltError(
                f"guarantee {text!r}: expected acc, ppl or task:NAME, `loss <=`, a percentage, and a confidence, such as acc loss <= 1% @95%;"
                " or kl <= and a number of nats"
            )
        confidence = float(found["confidence"] or _CONFIDENCE)
        if not 50 <= confidence < 100:
            raise SmeltError(f"guarantee {text!r}: the confidence must be at least 50% and below 100%")
        if found["nats"] is not None:
            limit = float(found["nats"])
            if not 0 < limit < _MOST_NATS:
                raise SmeltError(f"guarantee {text!r}: the divergence must be above 0 and below {_MOST_NATS:g} nats")
            return cls(text, "kl", limit, confidence / 100)
        limit = float(found["limit"]) / 100
        if not 0 < limit < 1:
            raise SmeltError(f"guarantee {text!r}: the loss must be above 0% and below 100%")
        return cls(text, found["what"], limit, confidence / 100)

    @property
    def is_about_text(self) -> bool:
        """Whether it claims something of how text is predicted."""
        return self.what in ("ppl", "kl")

    def is_about(self, task: str) -> bool:
        """Whether it claims something of a task, if its items are right or wrong."""
        return self.what in ("acc", f"task:{task}")


@dataclass(frozen=True)
class _Claim:
    """A claim on one model.

    Attributes:
        losses: of each item.
        limit: of their mean.
        least, most: as how little and how much each of them counts.
    """

    guarantee: Guarantee
    name: str
    losses: list[float]
    limit: float
    least: float
    most: float
    of: int | None = None


def planned(guarantees: Sequence[Guarantee], tasks: Sequence[str], models: int) -> int:
    """How many claims there will be at most.

    Args:
        guarantees: claimed of each model.
        tasks: that are measured.
        models: how many there are beside the baseline.
    """
    return models * sum(sum(map(each.is_about, tasks)) if not each.is_about_text else 1 for each in guarantees)


def guaranteed(
    baseline: ModelResult,
    models: Sequence[ModelResult],
    guarantees: Sequence[Guarantee],
    *,
    kl: Mapping[str, Sequence[float]] | None = None,
    planned: int = 0,
) -> dict[str, list[Guaranteed]]:
    """What is known of claims, by model. Each may be wrong with a part of the probability, so that all hold together.

    Args:
        baseline: beside which models lose.
        models: the others.
        guarantees: claimed of each.
        kl: the mean divergence of each window, by model.
        planned: how many claims there will be, if some have not been measured yet.
    """
    claims = {
        model.name: [
            claim for each in guarantees for claim in _claims(each, baseline, model, (kl or {}).get(model.name))
        ]
        for model in models
    }
    count = max(planned, sum(map(len, claims.values())))
    return {name: [_settled(claim, count) for claim in of_model] for name, of_model in claims.items()}


def uncompared(baseline: ModelResult, model: ModelResult, guarantee: Guarantee) -> list[str]:
    """The tasks that a guarantee is about and nothing is known of, since the baseline answered others, or otherwise.

    Args:
        baseline: beside which models lose.
        model: one of them, with what is known of its guarantees.
        guarantee: claimed of it.
    """
    known = [] if model.against is None else model.against.guarantees
    named = {each.what for each in known if each.claim == guarantee.text}
    others = {each.task for each in baseline.tasks} | {each.task for each in model.tasks}
    found = [
        result.task
        for result, _ in primary_tasks(model, with_members=True)
        if guarantee.is_about(result.task) and result.by_item and is_right_or_wrong(result.by_item)
    ]
    if guarantee.what.startswith("task:") and (name := guarantee.what.removeprefix("task:")) not in others:
        found.append(name)
    return [name for name in found if name not in named]


def _claims(
    guarantee: Guarantee, baseline: ModelResult, model: ModelResult, kl: Sequence[float] | None
) -> Iterator[_Claim]:
    if guarantee.what == "kl":
        if kl:
            of = model.text.of if model.text else None
            # Below 0 it is by rounding only.
            yield _Claim(guarantee, "kl", [max(each, 0.0) for each in kl], guarantee.limit, 0.0, _MOST_NATS, of)
        return
    if guarantee.what == "ppl":
        if model.text and baseline.text and model.text.text_sha256 == baseline.text.text_sha256:
            tokens = model.text.length - 1
            losses = [(b - a) / tokens for a, b in zip(baseline.text.nll, model.text.nll, strict=True)]
            yield _Claim(guarantee, "ppl", losses, math.log1p(guarantee.limit), -_MOST_NATS, _MOST_NATS, model.text.of)
        return
    theirs = {(each.task, each.metric, each.filter): each for each in baseline.tasks}
    for result, _ in primary_tasks(model, with_members=True):
        before = theirs.get((result.task, result.metric, result.filter))
        if before is None or not before.answers_the_same(result):
            continue
        values = [*before.by_item, *result.by_item]
        if not guarantee.is_about(result.task) or not values or not is_right_or_wrong(values):
            continue
        sign = 1.0 if result.higher_is_better else -1.0
        losses = [sign * (float(a) - float(b)) for a, b in zip(before.by_item, result.by_item, strict=True)]
        yield _Claim(guarantee, result.task, losses, guarantee.limit, -1.0, 1.0, result.of)


def _settled(claim: _Claim, count: int) -> Guaranteed:
    alpha = (1 - claim.guarantee.confidence) / count
    limit, least, most = claim.limit, claim.least, claim.most
    losses = [min(max(each, least), most) for each in claim.losses]
    upper, lower = (bound(losses, least, most, alpha) for bound in (upper_bound, lower_bound))
    # What counts less than it lost cannot show that little was lost, and the other way round.
    certified = upper <= limit and max(claim.losses) <= most
    refuted = lower > limit and min(claim.losses) >= least
    if not certified and not refuted:
        # Both ends are named, and may be wrong with that probability together.
        upper, lower = (bound(losses, least, most, alpha / 2) for bound in (upper_bound, lower_bound))
    to_percent = math.expm1 if claim.guarantee.what == "ppl" else lambda value: value
    return Guaranteed(
        claim=claim.guarantee.text,
        what=claim.name,
        limit=claim.guarantee.limit,
        confidence=claim.guarantee.confidence,
        claims=count,
        verdict="certified" if certified else "refuted" if refuted else "undecided",
        items=len(losses),
        of=claim.of,
        loss=to_percent(math.fsum(claim.losses) / len(claim.losses)),
        at_most=to_percent(upper),
        at_least=to_percent(lower),
        smallest=to_percent(upper_bound([0.0] * len(losses), least, most, alpha)),
        more_items=None
        if certified or refuted or max(claim.losses) > most
        else more_values(losses, limit, least, most, alpha),
    )
