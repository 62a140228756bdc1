"""What tests of the runtime share."""

from __future__ import annotations

from pathlib import Path

import pytest
from smelt.compress import Recipe, run
from smelt.runtime.native.library import kernels

from ..tiny import SMELT_6M


@pytest.fixture(scope="session")
def w4in8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """smelt-6m in W4in8: a trained model, of which no two tokens are about as likely for long."""
    if kernels(print) is None:
        pytest.skip("Smelt's compiled kernels cannot be used here")
    recipe = {
        "model": str(SMELT_6M),
        "output": str(tmp_path_factory.mktemp("w4in8") / "out"),
        "calibrate": {"samples": 8, "length": 64},
        "evaluate": False,
        "steps": [{"quantize": {"scheme": "W4in8", "ignore": []}}],
    }
    return run(Recipe.model_validate(recipe), progress=False).checkpoint
