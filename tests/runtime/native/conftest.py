"""The compiled kernels, where this machine has them."""

from __future__ import annotations

from types import ModuleType

import pytest
from smelt.runtime.native import library


@pytest.fixture(scope="module")
def compiled() -> ModuleType:
    notices: list[str] = []
    found = library.kernels(notices.append)
    if found is None:
        pytest.skip(notices[-1])
    return found
