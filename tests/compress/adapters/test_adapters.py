"""Adapters trained on compressed checkpoints with peft, and merged: against peft's own merging, and end to end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress import Recipe, SmeltError, for_training, inspect, merge, run
from smelt.compress.cli import app
from smelt.compress.evaluation.subject import Subject
from smelt.compress.export import export
from smelt.models.directory.directory import ModelDirectory
from smelt.models.directory.find import find_checkpoint
from smelt.models.structure.lora import Adapter, adapted
from smelt.quant.scheme import resolve
from smelt.quant.scheme_names import SUPPORTED
from smelt.quant.stored.compressed import open_dense
from smelt.runtime import Engine, SamplingParams
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from ..coded import compressed

peft = pytest.importorskip("peft", reason="needs peft, which is in the dev extra")

PROMPT = torch.randint(4, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
QUERY = "model.layers.1.self_attn.q_proj.weight"
SHALLOW = {"num_hidden_layers": 2}
# One scheme for each way of storing weights; the others are tried among the slow tests.
EVERY_LAYOUT = ("W4A16_ASYM", "W2A16", "FP8_BLOCK", "NVFP4A16", "MXFP4A16")


def restored(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A compressed checkpoint as transformers restores it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.no_grad():
        model(PROMPT)
    for module in model.modules():
        module.quantization_enabled = False
    return model


def adapter_on(
    path: Path, directory: Path, *, size: float = 0.2, dtype: torch.dtype = torch.float32, **settings: Any
) -> Any:
    """An adapter with random numbers in all its parts, trained nowhere, on a checkpoint as transformers restores it."""
    model = peft.get_peft_model(restored(path, dtype), peft.LoraConfig(r=4, lora_alpha=6, **settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                change = torch.randn(parameter.shape, generator=generator) * size
                parameter.copy_(change if "lora_" in name and "magnitude" not in name else parameter + 0.1 * change)
    model.save_pretrained(directory)
    return model


def opened(path: Path) -> Any:
    return open_dense(ModelDirectory(str(path), path))


@pytest.fixture
def adapter(tiny: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A W4A16 checkpoint and an adapter on half of its linears."""
    path = compressed(tiny(**SHALLOW), "W4A16", 32)
    adapter_on(path, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    return path, tmp_path / "adapter"


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
        (
            "llama",
            {
                "target_modules": "all-linear",
                "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8},
                "alpha_pattern": {"layers.0.self_attn.k_proj": 9},
            },
        ),
        ("llama", {"target_modules": ["q_proj", "up_proj"], "use_dora": True}),
        ("llama", {"target_modules": ["v_proj", "embed_tokens", "lm_head"]}),
        ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
        ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
        ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    ],
)
def test_adapted_weights_are_those_that_peft_merges(
    tiny: Callable[..., Path], tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    path = compressed(tiny(architecture, **SHALLOW), "W4A16", 32)
    theirs = adapter_on(path, tmp_path / "adapter", **settings).merge_and_unload()
    base = opened(path)
    ours = adapted(base, Adapter(tmp_path / "adapter"))
    changed = 0
    for name, tensor in theirs.state_dict().items():
        if name not in ours.names:  # what compressed-tensors keeps beside the weights that it restored
            continue
        mine = ours.weights.load(ours.names[name])
        assert torch.allclose(mine, tensor, rtol=1e-5, atol=1e-6), name
        changed += not torch.equal(mine, base.weights.load(base.names[name]))
    assert changed == len(Adapter(tmp_path / "adapter").changes)


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_merged_codes_are_the_nearest_on_the_stored_scales(
    tiny: Callable[..., Path], tmp_path: Path, scheme: str
) -> None:
    path = compressed(tiny(**SHALLOW), scheme, 32 if scheme == "W4A16" else None)
    adapter_on(path, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    done = merge(str(path), tmp_path / "adapter", tmp_path / "out", progress=False)
    assert (done.rounded, done.kept, done.plain) == (4, 10, 0)
    wanted = adapted(opened(path), Adapter(tmp_path / "adapter")).weights
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    got = restored(tmp_path / "out").state_dict()
    for name in before:
        if not re.search(r"(q|down)_proj", name):
            assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
        elif name.endswith("weight_scale"):
            weight = name.removesuffix("_scale")
            target, scale = wanted.load(weight).double(), after[name].double()
            codes = target.view(*scale.shape, -1) / scale.unsqueeze(-1)
            if scheme == "W4A16":
                codes = codes.round().clamp(-8, 7)
            else:
                codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn).double()
            nearest = (codes * scale.unsqueeze(-1)).view(target.shape)
            # Where a number lies in the middle of two codes, float32 may choose the other.
            assert (nearest - got[weight].double()).abs().gt(1e-6).float().mean() < 1e-3, weight
    record = json.loads((tmp_path / "out" / "smelt.json").read_text())
    assert record["merge"]["adapter"]["kind"] == "LoRA"
    assert record["reload"]["through"] == "transformers"
    assert (tmp_path / "out" / "README.md").exists()


def test_the_runtime_serves_what_was_merged(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    path, directory = adapter
    command = ["merge", str(path), "--adapter", str(directory), "-o", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert inspect(str(tmp_path / "out")).bytes == inspect(str(path)).bytes
    with torch.no_grad():
        logits = restored(tmp_path / "out")(PROMPT).logits
    engine = Engine(tmp_path / "out", dtype="float32", exact_inputs=True)
    (answer,) = engine.generate([PROMPT[0].tolist()], SamplingParams(max_tokens=1, temperature=0))
    assert answer.outputs[0].token_ids[0] == logits[0, -1].argmax().item()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1
    assert "pass --fresh" in again.output
    assert CliRunner().invoke(app, [*command, "--fresh"]).exit_code == 0
    # What was exported from it is another command's, though it records the merge.
    export(str(tmp_path / "out"), "dense", tmp_path / "exported")
    other = CliRunner().invoke(app, [*command[:-2], str(tmp_path / "exported"), "--fresh"])
    assert "was not made by `smelt merge`" in other.output


def test_linears_that_share_a_global_scale_are_rounded_together(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = compressed(tiny(dtype=torch.bfloat16, num_hidden_layers=1), "NVFP4")
    adapter_on(path, tmp_path / "adapter", size=0.5, dtype=torch.bfloat16, target_modules=["q_proj"])
    done = merge(str(path), tmp_path / "adapter", tmp_path / "out", progress=False)
    assert done.rounded == 3
    assert "static scales of inputs" in done.notes[0]
    before, after = (load_file(each / "model.safetensors") for each in (path, tmp_path / "out"))
    prefix = "model.layers.0.self_attn."
    shared = [after[f"{prefix}{name}_proj.weight_global_scale"] for name in "qkv"]
    assert torch.equal(shared[0], shared[1])
    assert torch.equal(shared[0], shared[2])
    assert not torch.equal(shared[0], before[f"{prefix}q_proj.weight_global_scale"])
    assert torch.equal(after[f"{prefix}q_proj.input_global_scale"], before[f"{prefix}q_proj.input_global_scale"])


def test_a_merged_layer_keeps_the_format_that_it_had(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    wider = {"targets": ["re:.*down_proj"], "scheme": "W8A16", "group_size": 64}
    asked = recipe(tiny(**SHALLOW), {"evaluate": False}, group_size=32, overrides=[wider], kv_cache="fp8")
    path = run(asked, progress=False).checkpoint
    adapter_on(path, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    done = merge(str(path.parent), tmp_path / "adapter", tmp_path / "merged", progress=False)
    assert done.rounded == 4
    assert "static scales of cached keys and values" in done.notes[0]
    said = [json.loads((each / "config.json").read_text())["quantization_config"] for each in (path, Path(done.path))]
    assert said[0] == said[1]
    wanted = adapted(opened(path), Adapter(tmp_path / "adapter")).weights
    found = opened(Path(done.path)).weights
    for name, loss in ((QUERY, 0.12), ("model.layers.1.mlp.down_proj.weight", 0.012)):
        assert (found.load(name) - wanted.load(name)).norm() < loss * wanted.load(name).norm(), name
    before, after = (load_file(each / "model.safetensors") for each in (path, Path(done.path)))
    scales = [name for name in before if name.endswith((".k_scale", ".v_scale"))]
    assert len(scales) == 4
    assert all(torch.equal(before[name], after[name]) for name in scales)


def loss_of(model: PreTrainedModel, text: Tensor) -> float:
    with torch.no_grad():
        return model(text, labels=text).loss.item()


@pytest.mark.few(1)
@pytest.mark.parametrize(("scheme", "group"), [("W4A16", 32), ("FP8_DYNAMIC", None)])
def test_an_adapter_that_was_trained_on_a_checkpoint_goes_into_it(
    tiny: Callable[..., Path], tmp_path: Path, scheme: str, group: int | None
) -> None:
    path = compressed(tiny(**SHALLOW), scheme, group)
    text = torch.randint(4, 4096, (4, 32), generator=torch.Generator().manual_seed(1))
    model = for_training(path)
    plain = loss_of(model, text)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    model.train()
    for step in range(20):
        model(text, labels=text).loss.backward()
        if step == 1:  # at the first, all B are zero, and no A has a gradient
            assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    tuned = loss_of(model, text)
    assert tuned < 0.8 * plain
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(for_training(path), tmp_path / "adapter")
    assert loss_of(again, text) == pytest.approx(tuned, rel=1e-5)
    merge(str(path), tmp_path / "adapter", tmp_path / "out", progress=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert abs(loss_of(merged, text) - tuned) < 0.15 * (plain - tuned)


@pytest.mark.parametrize(
    ("architecture", "scheme", "group"),
    [("llama", "W4A16", 32), ("qwen2", "FP8_DYNAMIC", None), ("llama", "W8A8", None), ("qwen3_moe", "W4A16", 32)],
)
def test_a_model_for_training_computes_what_transformers_does(
    tiny: Callable[..., Path], architecture: str, scheme: str, group: int | None
) -> None:
    path = compressed(tiny(architecture, **SHALLOW), scheme, group)
    theirs = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager")
    ours = for_training(path)
    with torch.no_grad():
        expected, found = theirs(PROMPT).logits, ours(PROMPT).logits
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())
    packed = [module for module in ours.modules() if type(module).__name__ == "FrozenLinear"]
    held = sum(buffer.nbytes for module in packed for buffer in module.buffers())
    assert held < 0.32 * 4 * sum(module.in_features * module.out_features for module in packed)


def test_gradients_pass_a_packed_weight_as_if_it_were_dense(tiny: Callable[..., Path]) -> None:
    path = compressed(tiny(**SHALLOW), "W4A16", 32)
    embedded = torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(2))
    found = []
    for model in (for_training(path), restored(path)):
        inputs = embedded.clone().requires_grad_()
        model(inputs_embeds=inputs).logits.square().mean().backward()
        found.append(inputs.grad)
    assert torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-7)


def test_peft_cannot_merge_into_packed_weights_and_says_so(tiny: Callable[..., Path]) -> None:
    model = for_training(compressed(tiny(**SHALLOW), "W4A16", 32))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match="merge with `smelt merge`"):
        model.merge_and_unload()


def test_of_a_mixture_all_but_experts_is_trained(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = compressed(tiny("qwen3_moe", num_hidden_layers=1), "W8A16", 32)
    model = peft.get_peft_model(for_training(path), peft.LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(4))
    model.save_pretrained(tmp_path / "adapter")
    done = merge(str(path), tmp_path / "adapter", tmp_path / "out", progress=False)
    assert (done.rounded, done.kept, done.plain) == (4, 12, 1), "attention, experts, the router"
    with torch.no_grad():
        tuned, plain = model(PROMPT).logits, for_training(path)(PROMPT).logits
        merged = for_training(tmp_path / "out")(PROMPT).logits
    assert (merged - tuned).norm() < 0.2 * (plain - tuned).norm()


def test_an_adapter_of_fused_experts_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = compressed(tiny("qwen3_moe", num_hidden_layers=1), "W4A16", 32)
    adapter_on(path, tmp_path / "adapter", target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(SmeltError, match="it changes fused experts"):
        merge(str(path), tmp_path / "adapter", tmp_path / "out", progress=False)


def test_a_recipe_merges_and_rounds_with_calibration(
    adapter: tuple[Path, Path], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    path, directory = adapter
    asked = recipe(path, {"adapter": str(directory)}, group_size=32, rounding="gptq")
    result = run(asked, progress=False)
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(result.checkpoint)(PROMPT).logits
        tuned = peft.PeftModel.from_pretrained(restored(path), directory)(PROMPT).logits
        plain = restored(path)(PROMPT).logits
    assert (found - tuned).norm() < 0.5 * (plain - tuned).norm()
    baseline, made = result.report.models
    assert baseline.name.endswith("with adapter")
    assert baseline.fingerprint != Subject("base", find_checkpoint(str(path)), "baseline").fingerprint
    assert any("not counted" in warning for warning in baseline.warnings)
    assert made.text is not None
    record = json.loads((result.checkpoint / "smelt.json").read_text())
    assert record["adapter"]["ranks"] == [4]
    assert record["model"]["bytes"] == opened(path).weights.nbytes
    # The same recipe with another adapter is another run.
    adapter_on(path, directory, size=0.3, target_modules=["q_proj", "down_proj"])
    with pytest.raises(SmeltError, match="holds another run"):
        run(asked, progress=False)
    with pytest.raises(SmeltError, match=r"^adapter: .*has no adapter_config.json"):
        run(recipe(path, {"adapter": str(path)}), progress=False)
    written = {"calibrate": {"source": "self"}, "output": str(tmp_path / "other")}
    with pytest.raises(SmeltError, match="self would generate text without the adapter"):
        run(recipe(path, {"adapter": str(directory)} | written, group_size=32, rounding="gptq"), progress=False)


def test_an_adapter_of_a_plain_model_is_merged_before_it_is_quantized(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    path = tiny(**SHALLOW)
    merged = adapter_on(path, tmp_path / "adapter", target_modules=["q_proj", "down_proj"]).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "merged" / name).write_bytes((path / name).read_bytes())
    settings: dict[str, Any] = {"group_size": 32, "rounding": "nearest"}
    nothing = {"evaluate": False}
    ours = run(recipe(path, {"adapter": str(tmp_path / "adapter")} | nothing, **settings), progress=False)
    theirs = run(
        recipe(tmp_path / "merged", {"output": str(tmp_path / "theirs")} | nothing, **settings), progress=False
    )
    found, expected = (AutoModelForCausalLM.from_pretrained(each.checkpoint) for each in (ours, theirs))
    with torch.no_grad():
        assert torch.allclose(found(PROMPT).logits, expected(PROMPT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"peft_type": "LOHA"}, "is a LOHA adapter; Smelt merges LoRA"),
        ({"init_lora_weights": "pissa"}, "also changes the base weights"),
        ({"trainable_token_indices": [3]}, "uses trainable_token_indices, which Smelt cannot merge"),
        ({"use_dora": True}, "does not fit use_dora"),
    ],
)
def test_kinds_that_cannot_be_merged_are_refused(
    adapter: tuple[Path, Path], tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    path, directory = adapter
    said = json.loads((directory / "adapter_config.json").read_text()) | settings
    (directory / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(SmeltError, match=sentence):
        merge(str(path), directory, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_model_is_refused(
    adapter: tuple[Path, Path], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path, directory = adapter
    wider = compressed(tiny(num_hidden_layers=1, intermediate_size=512), "W4A16", 32)
    with pytest.raises(SmeltError) as error:
        merge(str(wider), directory, tmp_path / "out", progress=False)
    lines = str(error.value).split("\n")
    assert "layers.0.mlp.down_proj.weight: it is for a weight of (128, 256), but the model's is (128, 512)" in lines[0]
    assert any("the model has no such weight; did you mean" in line for line in lines)
    with pytest.raises(SmeltError, match=r"has no adapter_config.json"):
        merge(str(path), path, tmp_path / "out", progress=False)
    with pytest.raises(SmeltError, match="its weights are not quantized; use a recipe"):
        merge(str(tiny(**SHALLOW)), directory, tmp_path / "out", progress=False)


def test_broken_and_half_adapters_are_refused(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    path, directory = adapter
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_B" in name)
    save_file(tensors | {name: tensors[name] * float("nan")}, file)
    with pytest.raises(SmeltError, match="NaN or infinite values; its training failed"):
        merge(str(path), directory, tmp_path / "out", progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter"]
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(SmeltError, match="lacks one of lora_A and lora_B"):
        merge(str(path), directory, tmp_path / "out", progress=False)


def test_a_head_that_is_the_embedding_cannot_be_adapted(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = compressed(tiny(tie_word_embeddings=True, num_hidden_layers=1), "W4A16", 32)
    adapter_on(path, tmp_path / "adapter", target_modules=["embed_tokens"])
    with pytest.raises(SmeltError, match="lm_head and input embedding are tied"):
        merge(str(path), tmp_path / "adapter", tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    "scheme",
    [name if name in EVERY_LAYOUT else pytest.param(name, marks=pytest.mark.slow) for name in SUPPORTED],
)
def test_every_scheme_is_restored_changed_and_written_again(
    tiny: Callable[..., Path], tmp_path: Path, scheme: str
) -> None:
    group = 32 if resolve(scheme).accepts_group_size else None
    path = compressed(tiny(dtype=torch.bfloat16, num_hidden_layers=1, vocab_size=256), scheme, group)
    base = opened(path)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        loaded = base.weights.load(name)
        assert (base.weights.info(name).dtype, base.weights.info(name).shape) == (loaded.dtype, tuple(loaded.shape))
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    down, up = torch.randn(2, 128), torch.randn(256, 2)
    prefix = "base_model.model.model.layers.0.mlp.up_proj."
    save_file({f"{prefix}lora_A.weight": down, f"{prefix}lora_B.weight": up}, directory / "adapter_model.safetensors")
    merge(str(path), directory, tmp_path / "out", progress=False)
    name = "model.layers.0.mlp.up_proj.weight"
    wanted = base.weights.load(name).float() + up @ down
    found = opened(tmp_path / "out").weights.load(name).float()
    # A rounding error of W2A16 is about a third of random weights.
    assert (found - wanted).norm() < (0.45 if "W2" in scheme else 0.2) * wanted.norm()
