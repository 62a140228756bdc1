"""Objects as a model may write them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.text('{}[]",:\\\n \'</a', max_size=12),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text('a{}"\\', max_size=4), inner, max_size=3)
    ),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.one_of(st.text(max_size=4), st.text('ab{}",:\\', max_size=4)), VALUES, max_size=4)


def written(value: Any, style: int) -> str:
    """As json may write it: on one line, indented, or without spaces; with characters or escapes."""
    options: dict[str, Any] = [{}, {"indent": 2}, {"separators": (",", ":")}, {"separators": (" ,\t", " : ")}][
        style % 4
    ]
    return json.dumps(value, ensure_ascii=style >= 4, **options)
