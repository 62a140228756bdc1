"""What a load's numbers mean, on requests whose times are written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from smelt.runtime.measure.load_result import LoadResult, RequestTimes, table_of_loads
from smelt.runtime.measure.percentile import percentile


def test_the_numbers_of_a_load() -> None:
    requests = [
        RequestTimes(came=10.0, prompt=5, tokens=[10.5, 10.6, 10.9]),
        RequestTimes(came=11.0, prompt=7, tokens=[11.25]),
        RequestTimes(came=11.0, prompt=9, tokens=[12.0, 12.2]),
    ]
    found = LoadResult.of("three", requests, 2.5)
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (3, 21, 6)
    assert (found.first_token_p50, found.first_token_p99) == pytest.approx((0.5, 0.99))
    assert (found.between_tokens_p50, found.between_tokens_p99) == pytest.approx((0.2, 0.298))
    assert (found.completion_p50, found.completion_p99) == pytest.approx((0.9, 1.194))
    assert found.decode_rate == pytest.approx((2 / 0.4 + 1 / 0.2) / 2)
    assert (found.output_rate, found.total_rate) == pytest.approx((6 / 2.5, 27 / 2.5))


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [
        ([1.5, 1.75, 2.0, 2.25, 2.5], 4.0),
        ([1.5, 2.0, 2.0, 2.5, 2.5], 4.0),
        # What came with the first token was made before.
        ([1.75, 1.75, 2.0, 2.25, 2.5], 4.0),
        ([2.5, 2.5, 2.5], None),
        ([2.5], None),
    ],
)
def test_the_rate_of_decoding_does_not_depend_on_how_tokens_are_sent(tokens: list[float], rate: float | None) -> None:
    assert LoadResult.of("alone", [RequestTimes(1.0, 5, tokens)], 1.5).decode_rate == rate


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 100])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_percentiles_are_numpys(count: int, share: float) -> None:
    values = np.random.default_rng(count).normal(size=count).tolist()
    assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))


def test_single_tokens_have_nothing_between_them() -> None:
    found = LoadResult.of("one", [RequestTimes(0.0, 5, [0.5])], 1.0)
    assert found.between_tokens_p50 is None
    assert found.between_tokens_p99 is None
    heading, line = table_of_loads([found])
    assert line.split() == ["one", "1", "1.0", "500", "/", "500", "ms", "-", "0.50", "/", "0.50", "s"]
    # Each column ends where its heading does.
    assert len(heading) == len(line)


def test_no_loads_no_table() -> None:
    assert table_of_loads([]) == []
