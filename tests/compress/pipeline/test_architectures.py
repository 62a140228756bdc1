"""Every architecture: streaming equals transformers, and the quantized checkpoint reloads there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from smelt.compress import Recipe, SmeltError, config_for, run
from smelt.models.directory.find import find_model
from smelt.models.streaming.streamed import StreamedModel
from smelt.models.structure.open_model import OpenModel
from smelt.quant.scheme import resolve
from smelt.quant.scheme_names import OWN_ROUNDING, SUPPORTED
from smelt.system.progress import Progress
from transformers import AutoModelForCausalLM

from ...tiny import CONFIGS, from_transformers

QUANTIZABLE = [name for name in CONFIGS if name != "gpt2"]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_streaming_gives_transformers_logits(architecture: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny(architecture)
    tokens = torch.randint(0, 4096, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path).eval()(tokens, use_cache=False).logits
    model = OpenModel(find_model(str(path)))
    streamed = StreamedModel(model.skeleton, model.weights, torch.float32, tmp_path)
    store = streamed.final_hidden(tokens, Progress(False), "")
    found = streamed.head()(store.read(slice(None)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.few(3)
@pytest.mark.parametrize("architecture", QUANTIZABLE)
def test_quantized_checkpoint_reloads_and_stays_close(
    architecture: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    path = tiny(architecture, torch.bfloat16)
    # More tokens than columns: with fewer, GPTQ fits the noise of those it sees.
    text = {"calibrate": {"samples": 64, "length": 32}}
    result = run(recipe(path, top=text, scheme="W8A16", group_size=64, rounding="gptq"))
    tokens = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        # Not in bfloat16, whose own rounding differs between processors.
        before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).logits
        after = AutoModelForCausalLM.from_pretrained(result.checkpoint, dtype=torch.float32).eval()(tokens).logits
    # Random routers send borderline tokens to other experts at the slightest change.
    assert (after - before).norm() / before.norm() < (0.25 if "experts" in str(CONFIGS[architecture]) else 0.08)
    facts = json.loads((result.checkpoint / "smelt.json").read_text())
    assert facts["reload"]["through"] == "transformers"
    names = {layer["name"] for layer in facts["steps"][0]["layers"]}
    linears = [
        n for n, m in AutoModelForCausalLM.from_pretrained(path).named_modules() if isinstance(m, torch.nn.Linear)
    ]
    outside = {"lm_head", "embed_out", "model.decoder.project_in", "model.decoder.project_out"}
    assert set(linears) - outside <= names


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        *(("mixtral", scheme) for scheme in SUPPORTED),
        *(
            pytest.param("qwen3_moe", scheme, marks=[] if scheme == "W4A16" else [pytest.mark.slow])
            for scheme in SUPPORTED
        ),
    ],
)
def test_experts_are_quantized(
    architecture: str, scheme: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    group = {"group_size": 32} if resolve(scheme).accepts_group_size else {}
    rounding = OWN_ROUNDING.get(scheme, "gptq")
    result = run(recipe(tiny(architecture, torch.bfloat16), scheme=scheme, rounding=rounding, **group))
    layers = {layer.name: layer for layer in result.report.candidates[0].layers}
    experts = [name for name in layers if ".experts." in name]
    assert len(experts) == 3 * 4 * 3
    assert all((layers[name].error or 1) < (0.8 if scheme in ("W2A16", "W3A16") else 0.2) for name in experts)


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["W8A8", "NVFP4", "FP8_BLOCK"])
def test_transformers_does_not_read_these_experts_without_the_plug_in(
    scheme: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    """If it begins to, the plug-in is no longer needed for them."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    result = run(recipe(tiny("mixtral", torch.bfloat16, **sizes), {"evaluate": False}, scheme=scheme))
    (found,) = (each for each in result.report.candidates[0].loaders if each.name == "transformers")
    assert "does not restore experts" in found.why
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = from_transformers(result.checkpoint, config=config_for(result.checkpoint))(tokens).logits.float()
    try:
        with torch.no_grad():
            plain = from_transformers(result.checkpoint)(tokens).logits.float()
    except Exception:
        return  # whatever transformers raises
    assert (plain - expected).norm() > 0.1 * expected.norm()


def test_gpt2_is_refused_with_the_reason(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(SmeltError, match="Conv1D modules, which transformers does not load"):
        run(recipe(tiny("gpt2"), scheme="W4A16", group_size=32))
