"""The check of a written checkpoint: transformers' model and ours, compared as they run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from smelt.compress import Recipe
from smelt.compress.pipeline import lockstep
from smelt.compress.pipeline.pipeline import run
from smelt.compress.pipeline.verify import reload
from smelt.models.directory.directory import ModelDirectory
from smelt.models.structure.open_model import OpenModel
from smelt.quant.scheme import Scheme
from smelt.quant.stored.dense_weights import DenseWeights
from smelt.system.errors import SmeltError
from torch import Tensor, nn

TOKENS = torch.arange(2 * 16).view(2, 16)


@pytest.fixture
def made(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> tuple[OpenModel, Path]:
    """A model of three blocks and what a run made of it."""
    path = tiny("llama", torch.bfloat16, num_hidden_layers=3)
    checkpoint = run(recipe(path, {"evaluate": False}, group_size=32, rounding="nearest")).checkpoint
    return OpenModel(ModelDirectory(str(path), path)), checkpoint


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "model.embed_tokens", "lm_head"])
def test_one_number_that_reads_otherwise_is_found_and_named(
    name: str, made: tuple[OpenModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, read_parts = DenseWeights.load, DenseWeights.parts

    def otherwise(self: DenseWeights, key: str) -> Tensor:
        tensor = read(self, key)
        if key == f"{name}.weight" and key not in self.packed:
            tensor = tensor.clone()
            tensor[3, 5] += tensor.abs().max()
        return tensor

    def other_parts(self: DenseWeights, key: str) -> tuple[dict[str, Tensor], Scheme]:
        parts, scheme = read_parts(self, key)
        if key == f"{name}.weight":
            parts["weight_packed"][3, 5] ^= 8
        return parts, scheme

    model, checkpoint = made
    assert reload(model, checkpoint, TOKENS, tmp_path).largest_difference == 0
    monkeypatch.setattr(DenseWeights, "load", otherwise)
    monkeypatch.setattr(DenseWeights, "parts", other_parts)
    with pytest.raises(SmeltError, match=rf"{name} reloads with other weights"):
        reload(model, checkpoint, TOKENS, tmp_path)


def test_no_two_blocks_are_restored_at_once(
    made: tuple[OpenModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = lockstep.decompress_module
    order: list[nn.Module] = []
    held: list[int] = []

    def counted(module: nn.Module) -> None:
        restore(module)
        order.append(module)
        held.append(sum(each.weight.numel() > 0 for each in order))  # type: ignore[operator]

    monkeypatch.setattr(lockstep, "decompress_module", counted)
    reload(*made, TOKENS, tmp_path)
    assert len(order) == 3 * 7
    assert max(held) == 7
