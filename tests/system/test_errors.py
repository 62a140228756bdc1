"""Names that are suggested for misspelled ones."""

from __future__ import annotations

import pytest
from smelt.system.errors import nearest_name

DEVICES = ["h100-sxm", "h100-pcie", "h200", "mi300x"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("h100", "; did you mean h100-sxm or h100-pcie?"),
        ("mi300", "; did you mean mi300x?"),
        ("H200", "; did you mean h200?"),
        ("h20", "; did you mean h200?"),
        ("tokenizer", ""),
    ],
)
def test_what_begins_like_it_comes_first(given: str, said: str) -> None:
    assert nearest_name(given, DEVICES) == said
