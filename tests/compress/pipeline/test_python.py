"""The Python interface: what it offers, and recipes as mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import smelt.compress
import smelt.runtime
from smelt.compress import SmeltError, run


def test_names_are_listed_though_they_are_loaded_late() -> None:
    assert {"run", "evaluate", "quantize", "Recipe"} <= set(dir(smelt.compress))
    assert {"Engine", "SamplingParams"} <= set(dir(smelt.runtime))
    assert set(smelt.compress.__all__) <= set(dir(smelt.compress))


def test_a_recipe_may_be_a_mapping(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {
        "model": "builtin:smelt-6m",
        "output": str(tmp_path / "out"),
        "evaluate": False,
        "steps": [{"quantize": {"scheme": "W8A16"}}],
    }
    result = run(recipe, progress=False)
    assert (result.checkpoint / "config.json").is_file()
    with pytest.raises(SmeltError, match=r"steps\.0.*scheme"):
        run(recipe | {"steps": [{"quantize": {"scheme": "W5A16"}}]})
