"""What a report says of speeds that are not what the bytes promise."""

from __future__ import annotations

import pytest
from smelt.compress.results.reasons import reasons
from smelt.compress.results.result import Speed, Spread

from ..report_samples import machine, speed


def _speed(decode: float, bytes_read: int, limit: float) -> Speed:
    return speed(decode, 100, bytes_read).model_copy(
        update={
            "decode_rate": Spread(median=decode, values=[decode]),
            "decode_bytes_per_token": bytes_read,
            "decode_limit": limit,
        }
    )


def _reasons(baseline: Speed, model: Speed) -> list[str]:
    decode = model.decode_rate.median / baseline.decode_rate.median
    prefill = model.prefill_rate.median / baseline.prefill_rate.median
    return reasons(baseline, model, machine(), decode=decode, prefill=prefill)


@pytest.mark.parametrize(
    ("decode", "bytes_read", "limit", "said"),
    [
        # The baseline reads 1 GB in 100 of its 125 ms.
        (16.0, 500_000_000, 20.0, "memory alone predicts decoding at 2.00× the baseline's speed; 2.00× was measured."),
        (10.0, 500_000_000, 20.0, "1.25× was measured: of 100.00 ms a token only 50.00 ms is reading"),
        (6.4, 500_000_000, 20.0, "0.80× was measured: of 156.25 ms a token only 50.00 ms is reading"),
        (
            20.0,
            500_000_000,
            20.0,
            "2.50× was measured: reading weights at full bandwidth would take 50.00 of its 50.00 ms",
        ),
        (6.4, 1_000_000_000, 10.0, "A token reads 1.0 GB of weights in both, so memory predicts no speedup; 0.80×"),
    ],
)
def test_the_difference_from_the_prediction_is_explained(
    decode: float, bytes_read: int, limit: float, said: str
) -> None:
    first = _reasons(_speed(8.0, 1_000_000_000, 10.0), _speed(decode, bytes_read, limit))[0]
    assert said in first


def test_weights_that_caches_hold_are_reported() -> None:
    small = _reasons(_speed(8.0, 10_000_000, 10.0), _speed(8.0, 5_000_000, 20.0))
    assert any("caches" in sentence for sentence in small)
