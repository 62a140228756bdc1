"""GPTQ that makes up for the error in its inputs, within whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from smelt.compress import Recipe, run
from smelt.compress.pipeline.plan import Plan
from smelt.models.directory.directory import ModelDirectory
from smelt.models.streaming.streamed import StreamedModel
from smelt.models.structure.open_model import OpenModel
from smelt.quant.activations import rounded_inputs
from smelt.quant.blockwise.block_passes import BlockPasses
from smelt.quant.blockwise.unrounded import UnroundedInputs
from smelt.quant.scheme import resolve
from smelt.system.processes.process_group import Processes
from smelt.system.storage.activation_store import ActivationStore

from ...interruption import interrupt_after
from ...tiny import make_model, save_model

AWARE = {"method": "gptq", "error_aware": 0.5}


def _stored(windows: torch.Tensor, directory: Path) -> ActivationStore:
    store = ActivationStore((windows.shape[0], windows.shape[1], windows.shape[2]), windows.dtype, directory)
    store.write(slice(None), windows)
    return store


def test_what_linears_read_is_compared_token_by_token(tmp_path: Path) -> None:
    """The down projection's statistics are those of two runs of transformers' own block, hooked by hand."""
    path = save_model(make_model("llama"), tmp_path / "model")
    model = OpenModel(ModelDirectory(str(path), path))
    streamed = StreamedModel(model.skeleton, model.weights, torch.float32, tmp_path)
    anatomy = model.anatomy.blocks[1]
    group = next(group for group in anatomy.groups if group.linears == ("mlp.down_proj",))
    args = resolve("W4A8", 32).activations
    plain, moved = torch.randn(2, 4, 24, 128, generator=torch.Generator().manual_seed(1))
    with streamed.block(1) as block:
        seen: list[torch.Tensor] = []
        handle = block.get_submodule("mlp.down_proj").register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0].reshape(-1, inputs[0].shape[-1]).double())
        )
        outputs = [streamed.call(1, hidden).run(block, hidden) for hidden in (plain, moved)]
        handle.remove()
        entering, store = _stored(plain, tmp_path), _stored(moved, tmp_path)
        leaving = entering.beside(128)
        unrounded = UnroundedInputs({"mlp.down_proj": args}, Processes())
        unrounded.record(block, lambda hidden: streamed.call(1, hidden), entering, leaving)
        passes = BlockPasses(
            block, anatomy, store, lambda hidden: streamed.call(1, hidden), store.tokens, Processes(), unrounded
        )
        ((_, stats),) = passes.observe([group], hessian=True)
        assert torch.equal(leaving.read(slice(None)), outputs[0])
        for opened in (passes, unrounded, entering, store, leaving):
            opened.close()
    assert args is not None
    computed = rounded_inputs(seen[1].float(), args).double()
    assert stats.hessian is not None
    assert stats.shift is not None
    torch.testing.assert_close(stats.hessian.double(), computed.T @ computed / 96, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(stats.shift.double(), (seen[0] - computed).T @ computed / 96, rtol=1e-3, atol=1e-5)
    assert not list(tmp_path.glob("activations-*"))


@pytest.mark.slow
def test_a_trained_model_stays_closer_to_itself(recipe: Callable[..., Recipe]) -> None:
    top = {
        "calibrate": {"samples": 32, "length": 128},
        "evaluate": {"windows": 8, "length": 128, "samples": 0, "speed": False},
    }
    divergences = []
    for rounding in ("gptq", AWARE):
        made = recipe("builtin:smelt-6m", top, scheme="W2A16", group_size=64, rounding=rounding)
        divergences.append(run(made, fresh=True).report.as_data()["models"][1]["against"]["kl"])
    assert divergences[1] < 0.9 * divergences[0]


@pytest.mark.slow
def test_an_interrupted_run_continues_with_the_same_bytes(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where inputs are rounded and scales are moved, after which the same linears read other numbers."""
    path = tiny("llama", torch.bfloat16)
    settings = {"scheme": "W4A4", "group_size": 32, "rounding": AWARE, "transforms": ["rotate", "smooth"]}
    made = recipe(path, {"evaluate": False}, **settings)
    quiet = {p.name: p.read_bytes() for p in run(made).checkpoint.iterdir()}
    interrupt_after(1, monkeypatch, lambda: run(made, fresh=True))
    assert {p.name: p.read_bytes() for p in run(made).checkpoint.iterdir()} == quiet


def test_routed_tokens_are_not_compared(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    """Experts are rounded as by plain gptq where what they read is the same; attention makes up for errors."""
    path = tiny("mixtral", torch.bfloat16, num_hidden_layers=1)
    found = []
    for rounding in ("gptq", AWARE):
        made = recipe(path, {"evaluate": False}, rounding=rounding, group_size=32, scheme="W3A16")
        found.append(load_file(run(made, fresh=True).checkpoint / "model.safetensors"))
    first = "model.layers.0.self_attn.q_proj.weight_packed"
    assert torch.equal(found[0][first], found[1][first])  # nothing has been rounded before it
    output = first.replace("q_proj", "o_proj")
    assert not torch.equal(found[0][output], found[1][output])


def test_a_few_tokens_are_enough(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    """So few that an expert would be shown them all."""
    top = {"evaluate": False, "calibrate": {"samples": 1, "length": 32}}
    made = run(recipe(tiny("llama", num_hidden_layers=1), top, rounding=AWARE, group_size=32), progress=False)
    (step,) = json.loads((made.checkpoint / "smelt.json").read_text())["steps"]
    assert not any("reached this expert" in note for layer in step["layers"] for note in layer["notes"])


def test_the_plan_counts_what_is_compared(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    path = tiny("llama")
    plain, aware = (Plan.make(recipe(path, rounding=rounding)).cost for rounding in ("gptq", AWARE))
    assert aware.operations > plain.operations
    assert aware.disk > plain.disk
