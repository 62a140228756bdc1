"""One engine and one server for all tests of serving."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from smelt.runtime.engine.engine import Engine

from ...tiny import SMELT_6M
from .serving import Serving, served, serving


@pytest.fixture(scope="session")
def engine() -> Engine:
    """smelt-6m in float32, so that its tokens do not depend on what else runs."""
    return Engine(SMELT_6M, dtype="float32", max_num_seqs=16, quiet=True)


@pytest.fixture(scope="session")
def server(engine: Engine) -> Iterator[Serving]:
    """smelt-6m at a free port."""
    with serving([served(engine)]) as found:
        yield found
