"""Tensors that kernels would read past their ends are refused as they are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.models.directory.find import find_model
from smelt.models.structure.open_model import OpenModel
from smelt.runtime import Engine
from smelt.system.errors import SmeltError
from torch import Tensor

LAYER = "model.layers.0."


def _changed(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    found = load_file(path / "model.safetensors")
    change(found)
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_short_bias(name: str, tiny: Callable[..., Path]) -> None:
    path = tiny("llama", torch.bfloat16)
    _changed(path, lambda t: t.update({f"{LAYER}{name}.bias": torch.ones(1, dtype=torch.bfloat16)}))
    with pytest.raises(SmeltError, match=rf"{name}\.bias has the shape \[1\]"):
        Engine(path, quiet=True)


def test_more_is_rotated_than_a_head_has(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", torch.bfloat16)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 8}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SmeltError, match="partial_rotary_factor in rope_parameters is 8; it must be at most 1"):
        Engine(path, quiet=True)


def test_zero_points_of_other_groups_than_the_scales(
    recipe: Callable[..., object], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from smelt.compress import run

    made = run(recipe(tiny(), {"evaluate": False}, scheme="W4A16_ASYM", group_size=32), progress=False)  # type: ignore[arg-type]
    name = f"{LAYER}mlp.up_proj.weight_zero_point"
    _changed(made.checkpoint, lambda t: t.update({name: t[name][:, :1].contiguous()}))
    with pytest.raises(SmeltError, match="which do not fit"):
        Engine(made.checkpoint, quiet=True)


def test_a_tied_head_that_is_stored_is_no_weight_of_its_own(tiny: Callable[..., Path]) -> None:
    """What changes the embedding would leave the old one beside it, which transformers then uses."""
    path = tiny("llama", torch.bfloat16, tie_word_embeddings=True)
    _changed(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = OpenModel(find_model(str(path)))
    assert model.is_tied
    assert "lm_head.weight" not in model.weights.names()
    _changed(path, lambda t: t["lm_head.weight"][5].add_(1))
    with pytest.raises(SmeltError, match="ties lm_head to the embedding, but the checkpoint has another"):
        OpenModel(find_model(str(path)))
