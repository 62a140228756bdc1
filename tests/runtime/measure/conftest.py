"""A server for the tests of measuring one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from smelt.runtime.engine.engine import Engine

from ...tiny import SMELT_6M
from ..serve.serving import Serving, served, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """smelt-6m in float32 at a free port."""
    with serving([served(Engine(SMELT_6M, dtype="float32", max_num_seqs=16, quiet=True))]) as found:
        yield found
