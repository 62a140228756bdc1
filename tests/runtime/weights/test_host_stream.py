"""Layers whose weights are copied from host memory for each step; here a CPU stands for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from smelt.runtime.decoder.linears.cpu import Int8Linear
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.weights.checkpoint import Checkpoint
from smelt.runtime.weights.host_stream import HostLayers

from ...compress.coded import compressed
from ..drive import logits_in_pieces

CPU = torch.device("cpu")
PROMPTS = [torch.randint(4, 4096, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (19, 6)]
STEPS = [[(0, 12), (1, 4)], [(0, 6)], [(0, 1), (1, 1)], [(1, 1)]]
WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}


@pytest.mark.few(3)
@pytest.mark.parametrize("scheme", [None, "W4A16", "W8A8", "FP8_BLOCK", "NVFP4A16"])
@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt_neox"])
def test_logits_are_those_of_weights_that_stay(
    tiny: Callable[..., Path], architecture: str, scheme: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # oneDNN's weights are in memory of its own.
    monkeypatch.setattr(Int8Linear, "takes", lambda matrix, dtype: False)
    if scheme is not None and architecture == "gpt_neox":
        pytest.skip("its linears are not named as those that are rounded here")
    path = tiny(architecture, **WIDE)
    if scheme is not None:
        compressed(path, scheme, 32 if scheme == "W4A16" else None)
    wanted = logits_in_pieces(path, PROMPTS, STEPS)
    for one, found in zip(wanted, logits_in_pieces(path, PROMPTS, STEPS, offload=HostLayers(CPU)), strict=True):
        assert torch.equal(one, found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [("llama", "W4A16"), ("llama", "FP8_BLOCK"), ("mixtral", None)],
)
def test_kernels_read_what_was_copied(tiny: Callable[..., Path], architecture: str, scheme: str | None) -> None:
    path = tiny(architecture, torch.float16, **WIDE)
    if scheme is not None:
        compressed(path, scheme, 32 if scheme == "W4A16" else None)
    operators = GpuOperators(torch.float16, CPU)
    steps = [[(0, 19)], [(1, 5)], [(1, 1)]]
    host = HostLayers(CPU)
    wanted = logits_in_pieces(path, PROMPTS, steps, operators)
    for one, found in zip(wanted, logits_in_pieces(path, PROMPTS, steps, operators, offload=host), strict=True):
        assert torch.equal(one, found)


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "qwen3_moe", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("kind", [Operators, GpuOperators])
def test_all_weights_go_to_the_host(tiny: Callable[..., Path], architecture: str, kind: type[Operators]) -> None:
    path = tiny(architecture, torch.float16, **{**WIDE, "hidden_size": 256})
    host = HostLayers(CPU)
    Model(Checkpoint(path), kind(torch.float16, CPU), offload=host)
    whole = Model(Checkpoint(path), kind(torch.float16, CPU))
    layers = sum(linear.nbytes for layer in whole.layers for linear in layer.linears().values())
    assert 0.99 * layers <= host.bytes <= 1.05 * layers


def test_only_two_layers_are_there(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", **WIDE)
    host = HostLayers(CPU)
    model = Model(Checkpoint(path), Operators(torch.float32), offload=host)
    whole = Model(Checkpoint(path), Operators(torch.float32))
    layers = sum(linear.nbytes for layer in whole.layers for linear in layer.linears().values())
    assert host.bytes == layers == 3 * host.largest
    assert model.resident_bytes() == whole.nbytes() - host.largest
    rooms = {
        tensor.untyped_storage().data_ptr()
        for layer in model.layers
        for linear in layer.linears().values()
        for tensor in vars(linear).values()
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1000
    }
    assert len(rooms) == 2
    model.stream_layers(host.largest)
    assert model.stream is not None
    assert model.stream.first == 1
