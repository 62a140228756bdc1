"""What is said of offload, against arithmetic."""

from __future__ import annotations

import pytest
from smelt.runtime.weights.offload import StreamCounts, hiding_sequences


def load(sequences: int, *, compute: float, read: float) -> tuple[int, StreamCounts]:
    """Ten steps, each of which reads for some seconds, and computes for some for each sequence."""
    computing = 10 * compute * sequences
    return sequences, StreamCounts(10, 10, 10 * read, max(0.0, 10 * read - computing), computing)


def test_the_number_that_hides_the_reading_is_where_both_take_as_long() -> None:
    found = hiding_sequences([load(count, compute=0.01, read=0.5) for count in (1, 4, 16)])
    assert found == "about 50 sequences at once would hide it"


def test_a_number_that_was_measured_is_said() -> None:
    found = hiding_sequences([load(count, compute=0.1, read=0.5) for count in (1, 4, 5, 16)])
    assert found == "5 sequences at once hide it"


@pytest.mark.parametrize("loads", [[], [load(4, compute=0.01, read=0.5)], [(1, StreamCounts()), (4, StreamCounts())]])
def test_what_cannot_be_known_is_not_said(loads: list[tuple[int, StreamCounts]]) -> None:
    assert hiding_sequences(loads) is None


def test_counts_of_a_part() -> None:
    before, after = StreamCounts(1, 10, 1.0, 0.5, 2.0), StreamCounts(4, 40, 3.0, 1.0, 5.0)
    assert after.since(before) == StreamCounts(3, 30, 2.0, 0.5, 3.0)
    assert not after.hidden
    assert "would hide it" in after.sentence(10.0)
