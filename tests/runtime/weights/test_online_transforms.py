"""Checkpoints whose inputs are transformed while they run are refused by everything that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from smelt.quant.stored.config import StoredSchemes
from smelt.runtime.weights.checkpoint import Checkpoint
from smelt.system.errors import SmeltError

# As llm-compressor's SpinQuantModifier writes it.
ONLINE = {
    "config_groups": {
        # In the weights already.
        "R1": {
            "type": "hadamard",
            "apply": [
                {"targets": ["re:.*embed_tokens$"], "location": "weight_output", "inverse": False, "ignore": []},
                {"targets": ["re:.*q_proj$"], "location": "weight_input", "inverse": True, "ignore": []},
            ],
        },
        "R4": {
            "type": "hadamard",
            "apply": [{"targets": ["re:.*down_proj$"], "location": "input", "inverse": False, "ignore": []}],
            "head_dim": None,
        },
    }
}


def test_online_transforms_are_refused(tiny: Callable[..., Path]) -> None:
    path = tiny()
    config = json.loads((path / "config.json").read_text())
    stored = {"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": ONLINE}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    with pytest.raises(SmeltError, match=r"transforms while it runs .transform_config: R4.,"):
        Checkpoint(path)
    with pytest.raises(SmeltError, match=r"transforms while it runs .*R4"):
        StoredSchemes(stored)
    for groups in ({}, {"R1": ONLINE["config_groups"]["R1"]}):
        stored["transform_config"] = {"config_groups": groups}
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
        Checkpoint(path)
        StoredSchemes(stored)
