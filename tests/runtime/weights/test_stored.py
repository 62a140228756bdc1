"""Every way that weights are stored, against transformers' own loading or the format's definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from smelt.compress import Recipe, SmeltError, config_for, run
from smelt.quant.scheme import resolve
from smelt.quant.scheme_names import SUPPORTED
from smelt.runtime import RuntimeProblem
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.native import library
from smelt.runtime.native.operators import NativeOperators
from smelt.runtime.weights.checkpoint import Checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from ...packing import awq_packed, packed
from ...tiny import from_transformers, make_model, save_model
from ..drive import engine, logits_in_pieces

PROMPT = torch.randint(4, 4096, (40,), generator=torch.Generator().manual_seed(0)).tolist()
GENERATOR = torch.Generator().manual_seed(11)


STATIC = [("W8A8", "static"), ("W8A8", "static_asymmetric"), ("W4A8", "static"), ("W4AFP8", "static")]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("architecture", "scheme", "inputs"),
    [
        *((architecture, scheme, None) for architecture in ("llama", "phi3", "mixtral") for scheme in SUPPORTED),
        *(("llama", *kind) for kind in STATIC),
    ],
)
def test_a_checkpoint_of_smelt_computes_what_transformers_computes(
    architecture: str, scheme: str, inputs: str | None, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    if architecture == "mixtral" and resolve(scheme, inputs=inputs).activations is not None:
        pytest.skip("transformers does not round the inputs of experts, as the scheme says and the runtime does")
    size = {"hidden_size": 256, "intermediate_size": 256} if architecture == "llama" else {}
    # transformers restores the 4-bit floats as bfloat16, as it first computes; from then on it may compute in float32.
    dtype = torch.bfloat16 if "FP4" in scheme else torch.float32
    path = tiny(architecture, dtype, **size)
    group = {"group_size": 32} if scheme.startswith(("W4A16", "W3A16", "W2A16")) else {}
    asked = recipe(path, {"evaluate": False}, scheme=scheme, inputs=inputs, **group, rounding="nearest")
    made = run(asked, progress=False)
    plugged_in = architecture == "mixtral" and not resolve(scheme).experts_reload
    config = {"config": config_for(made.checkpoint)} if plugged_in else {}
    reference = from_transformers(made.checkpoint, dtype=dtype, experts_implementation="eager", **config)
    with torch.no_grad():
        reference(torch.tensor([PROMPT]))
        expected = torch.nn.Module.float(reference)(torch.tensor([PROMPT])).logits[0]
    found = logits_in_pieces(made.checkpoint, [PROMPT], [[(0, 40)]])[0]
    if (scheme, inputs) in (("W8A8", None), ("W8A8", "static")):
        # Sums in another order put an input on the other side of a code's edge now and then, and every later
        # token sees it; test_int8_is_what_the_rounded_product_is compares the products themselves.
        difference = (found - expected).abs()
        assert difference.amax(-1).min() <= 1e-4 * expected.abs().max()
        assert difference.mean() <= 3e-2 * expected.abs().mean()
        return
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.slow
def test_linears_of_the_same_inputs_that_round_them_differently(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    """Keys and values, or gate and up, with other scales than what they are computed beside; by Smelt they never have."""
    path = tiny("llama", hidden_size=128)
    asked = recipe(path, {"evaluate": False}, scheme="W8A8", inputs="static_asymmetric", rounding="nearest")
    made = run(asked, progress=False).checkpoint
    tensors = load_file(made / "model.safetensors")
    for name in ("self_attn.k_proj", "mlp.up_proj"):
        tensors[f"model.layers.1.{name}.input_scale"] *= 1.5
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        expected = from_transformers(made, dtype=torch.float32)(torch.tensor([PROMPT])).logits[0]
    for operators in (Operators(torch.float32), GpuOperators(torch.float32, torch.device("cpu"))):
        found = logits_in_pieces(made, [PROMPT], [[(0, 40)]], operators)[0]
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    explanations = engine(made).explain()
    assert "inputs rounded to int8 with a fixed scale and zero-point" in explanations["attention out"]
    for lost, sentence in (("input_scale", "its input_scale is missing"), ("input_zero_point", "input_zero_point is")):
        kept = {name: value for name, value in tensors.items() if name != f"model.layers.1.mlp.up_proj.{lost}"}
        save_file(kept, made / "model.safetensors")
        with pytest.raises(RuntimeProblem, match=f"model.layers.1.mlp.up_proj: .*{sentence}"):
            engine(made)


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["W8A8", "W4A8"])
def test_a_trained_model_with_fixed_scales_on_the_cpu_kernels(scheme: str, recipe: Callable[..., Recipe]) -> None:
    """In bfloat16, a prompt and then single tokens; a trained model does not magnify what roundings differ in."""
    kernels = library.kernels(lambda _: None)
    if kernels is None:
        pytest.skip("this machine cannot run the compiled kernels")
    asked = recipe("builtin:smelt-6m", {"evaluate": False}, scheme=scheme, inputs="static", rounding="nearest")
    made = run(asked, progress=False).checkpoint
    reference = from_transformers(made, dtype=torch.bfloat16)
    with torch.no_grad():
        text = reference.generate(torch.tensor([PROMPT[:8]]), max_new_tokens=24, do_sample=False)[0].tolist()
        expected = reference(torch.tensor([text])).logits[0].float()
    pieces = [[(0, 20)], *([(0, 1)] for _ in range(len(text) - 20))]
    operators = NativeOperators(kernels, exact=False)
    for role, linear in Model(Checkpoint(made), operators).linears().items():
        explanation = "weights, inputs rounded to int8 with a fixed scale"
        assert role == "head" or (
            linear.explain().startswith("Smelt's kernel, int") and explanation in linear.explain()
        )
    found = logits_in_pieces(made, [text], pieces, operators)[0]
    assert (found - expected).norm() <= 3e-2 * expected.norm()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("order", ["stored", "activation"])
def test_gptq_means_what_its_packing_says(bits: int, version: str, symmetric: bool, order: str, tmp_path: Path) -> None:
    rows, columns, group = 64, 128, 32
    codes = torch.randint(0, 2**bits, (rows, columns), generator=GENERATOR)
    low = 1 if version == "gptq" else 0
    zeros = (
        torch.full((rows, columns // group), 2 ** (bits - 1))
        if symmetric
        else (torch.randint(low, 2**bits, (rows, columns // group), generator=GENERATOR))
    )
    scale = (torch.rand(rows, columns // group, generator=GENERATOR) + 0.1).half()
    places = torch.arange(columns) // group
    if order == "activation":
        places = places[torch.randperm(columns, generator=GENERATOR)]
    expected = ((codes - zeros[:, places]).half() * scale[:, places]).float()
    stored = {
        "qweight": packed(codes, bits).T.contiguous(),
        "qzeros": packed(zeros.T - int(version == "gptq"), bits),
        "scales": scale.T.contiguous(),
        "g_idx": places.int(),
    }
    found = _checkpoint(tmp_path, stored, {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}).matrix(
        "linear"
    )
    assert torch.equal(found.dense(torch.float32), expected)
    assert (found.order is not None) == (order == "activation")
    assert found.zero is None or not symmetric


@pytest.mark.parametrize("columns", [80, 96])
@pytest.mark.parametrize("order", ["absent", "stored", "activation"])
def test_gptq_whose_last_group_is_shorter(columns: int, order: str, tmp_path: Path) -> None:
    group = 64
    groups = -(-columns // group)
    codes = torch.randint(0, 16, (32, columns), generator=GENERATOR)
    zeros = torch.randint(1, 16, (32, groups), generator=GENERATOR)
    scale = (torch.rand(32, groups, generator=GENERATOR) + 0.1).half()
    places = torch.arange(columns) // group
    if order == "activation":
        places = places[torch.randperm(columns, generator=GENERATOR)]
    # Words of zero-points hold eight of the 32 rows.
    stored = {
        "qweight": packed(codes, 4).T.contiguous(),
        "qzeros": packed(zeros.T - 1, 4),
        "scales": scale.T.contiguous(),
    }
    if order != "absent":
        stored["g_idx"] = places.int()
    config = {"quant_method": "gptq", "bits": 4, "group_size": group}
    found = _checkpoint(tmp_path, stored, config).matrix("linear")
    assert torch.equal(found.dense(torch.float32), ((codes - zeros[:, places]).half() * scale[:, places]).float())


@pytest.mark.parametrize("places", ["activation", "unset", "uneven", "outside"])
def test_compressed_tensors_in_activation_order(places: str, tmp_path: Path) -> None:
    rows, columns, group = 64, 128, 32
    codes = torch.randint(-8, 8, (rows, columns), generator=GENERATOR, dtype=torch.int8)
    scale = torch.rand(rows, columns // group, generator=GENERATOR) + 0.1
    of_group = torch.arange(columns) // group
    stored_places = of_group[torch.randperm(columns, generator=GENERATOR)].int()
    if places == "unset":
        stored_places = torch.full((columns,), -1, dtype=torch.int32)
    if places == "uneven":
        stored_places[stored_places == 1] = 2
    if places == "outside":
        stored_places[5] = 4
    stored = {
        "weight_packed": pack_to_int32(codes, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
        "weight_g_idx": stored_places,
    }
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    checkpoint = _checkpoint(tmp_path, stored, config)
    if places == "outside":
        with pytest.raises(RuntimeProblem, match="must give each of 128 columns one of 4 groups"):
            checkpoint.matrix("linear")
        return
    used = of_group if places == "unset" else stored_places.long()
    assert torch.equal(checkpoint.matrix("linear").dense(torch.float32), codes.float() * scale[:, used])


def test_awq_means_what_its_packing_says(tmp_path: Path) -> None:
    rows, columns, group = 64, 128, 32
    codes = torch.randint(0, 16, (rows, columns), generator=GENERATOR)
    zeros = torch.randint(0, 16, (rows, columns // group), generator=GENERATOR)
    scale = (torch.rand(rows, columns // group, generator=GENERATOR) + 0.1).half()
    expected = ((codes - zeros.repeat_interleave(group, 1)).half() * scale.repeat_interleave(group, 1)).float()
    stored = {"qweight": awq_packed(codes.T), "qzeros": awq_packed(zeros.T), "scales": scale.T.contiguous()}
    found = _checkpoint(tmp_path, stored, {"quant_method": "awq", "bits": 4, "version": "gemm"}).matrix("linear")
    assert torch.equal(found.dense(torch.float32), expected)
    assert found.format == "int4 g32"


@pytest.mark.parametrize("order", ["stored", "activation"])
def test_a_gptq_model_runs_as_its_dense_twin(order: str, tmp_path: Path) -> None:
    """Fused q/k/v and gate/up keep their codes; the logits are those of the values written out."""
    model = make_model("llama")
    dense, stored = {}, {}
    for name, weight in model.state_dict().items():
        if "proj" not in name:
            dense[name] = stored[name] = weight.clone()
            continue
        rows, columns = weight.shape
        scale = (weight.abs().view(rows, columns // 32, 32).amax(-1) / 7.5).half()
        codes = (weight.view(rows, -1, 32) / scale.float().unsqueeze(-1)).round().clamp(-8, 7).view(
            rows, columns
        ).long() + 8
        places = torch.arange(columns) // 32
        if order == "activation":  # linears with the same inputs have the same
            places = places[torch.randperm(columns, generator=torch.Generator().manual_seed(len(name.split(".")[3])))]
        dense[name] = (codes - 8).half().mul(scale[:, places]).float()
        base = name.removesuffix("weight")
        stored[base + "qweight"] = packed(codes, 4).T.contiguous()
        stored[base + "qzeros"] = packed(torch.full((columns // 32, rows), 7), 4)
        stored[base + "scales"] = scale.T.contiguous()
        stored[base + "g_idx"] = places.int()
    path = save_model(model, tmp_path / "model")
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}})
    )
    model.load_state_dict(dense)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    found = logits_in_pieces(path, [PROMPT], [[(0, 40)]])[0]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert "int4 g32" in engine(path).explain()["query, key, value"]
    kernels = library.kernels(lambda _: None)
    if kernels is not None:  # in pieces and one by one, as the kernels have ways of their own for both
        pieces = [[(0, 30)], *([(0, 1)] for _ in range(10))]
        found = logits_in_pieces(path, [PROMPT], pieces, NativeOperators(kernels, exact=False))[0]
        # Int8 inputs and bfloat16 cost this random model 6%; columns in a wrong order would cost all.
        assert (found - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; the runtime reads"),
        ({"quant_method": "gptq", "bits": 5}, "GPTQ of 5 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "not 4 bits in marlin"),
        (
            {"quant_method": "compressed-tensors", "config_groups": 3},
            "config_groups is 3; it must be an object of groups",
        ),
    ],
)
def test_what_cannot_be_read_is_said(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match=sentence):
        _checkpoint(tmp_path, {"weight": torch.zeros(2, 2)}, config)


def test_shards_that_hold_the_same_tensor_are_refused(tmp_path: Path) -> None:
    path = save_model(make_model("llama"), tmp_path)
    tensors = load_file(path / "model.safetensors")
    for shard in ("a", "b"):
        save_file(tensors, path / f"{shard}.safetensors")
    names = dict.fromkeys(tensors, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(SmeltError, match="is in two shards"):
        Checkpoint(path)


def _checkpoint(path: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Checkpoint:
    config = {"model_type": "llama", "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    save_file({f"linear.{kind}": tensor.contiguous() for kind, tensor in tensors.items()}, path / "model.safetensors")
    return Checkpoint(path)


def test_the_plug_in_restores_in_the_dtype_that_is_asked_for(recipe: Callable[..., Recipe]) -> None:
    """As transformers alone does: bfloat16 scales times codes are float32 numbers."""
    made = run(
        recipe("builtin:smelt-6m", {"evaluate": False}, scheme="W4A16", rounding="nearest", group_size=64),
        progress=False,
    ).checkpoint
    tokens = torch.arange(5, 45).unsqueeze(0)
    with torch.no_grad():
        alone, ours = (
            AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, **more)(tokens).logits
            for more in ({}, {"config": config_for(made)})
        )
    assert (alone - ours).abs().max() < 1e-4
