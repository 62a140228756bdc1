"""Random requests: against the distributions' own formulas."""

from __future__ import annotations

import itertools
import statistics

import pytest
from smelt.runtime import RuntimeProblem
from smelt.runtime.requests.synthetic import LengthDistribution, synthetic

FOREVER = 10**9


def _many(text: str, count: int = 20_000, **options: float) -> list[int]:
    lengths, one = LengthDistribution.parse(text, "--prompts"), LengthDistribution.parse("fixed:1", "--outputs")
    return [each.prompt for each in synthetic(lengths, one, count=count, rate=1.0, longest=FOREVER, **options)]


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("fixed:512", 512, 0),
        ("uniform:100,300", 200, 200 / 12**0.5),
        ("exponential:400", 400, 400),
        ("lognormal:300,0.5", 300, 300 * (2.718281828 ** (0.5**2) - 1) ** 0.5),
        # Variance of a Pareto distribution: m^2 / (shape (shape - 2)), at its mean m.
        ("pareto:100,5", 100, 100 / (5 * 3) ** 0.5),
    ],
)
def test_lengths_have_the_mean_and_spread_that_their_names_say(text: str, mean: float, deviation: float) -> None:
    found = _many(text)
    assert statistics.mean(found) == pytest.approx(mean, rel=0.03)
    assert statistics.pstdev(found) == pytest.approx(deviation, rel=0.1, abs=0.5)


@pytest.mark.parametrize("burstiness", [0.0, 1.0, 4.0])
def test_arrivals_have_the_rate_and_burstiness(burstiness: float) -> None:
    one = LengthDistribution.parse("fixed:1", "--prompts")
    found = synthetic(one, one, count=20_000, rate=5.0, longest=FOREVER, burstiness=burstiness)
    pauses = [b.at - a.at for a, b in itertools.pairwise(found)]
    assert statistics.mean(pauses) == pytest.approx(0.2, rel=0.1)
    assert statistics.pstdev(pauses) / statistics.mean(pauses) == pytest.approx(burstiness, rel=0.1, abs=0.01)


def test_none_is_longer_than_the_longest() -> None:
    lengths = LengthDistribution.parse("pareto:100,1.1", "--prompts")
    found = synthetic(lengths, lengths, count=2000, rate=1.0, longest=300)
    assert max(each.prompt + each.output for each in found) == 300
    assert min(min(each.prompt, each.output) for each in found) >= 1


@pytest.mark.parametrize(
    "text", ["", "512", "fixed", "fixed:x", "fixed:-3", "fixed:nan", "uniform:3,1", "pareto:9,1", "zipf:3"]
)
def test_what_is_no_distribution_is_said(text: str) -> None:
    with pytest.raises(RuntimeProblem, match=r"--prompts: .* is not a distribution of lengths; give fixed:N"):
        LengthDistribution.parse(text, "--prompts")
