"""Whole decoders on the GPU's kernels, in Triton's interpreter or on a GPU, against transformers and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.runtime.decoder.model import Model
from smelt.runtime.fusions import Fusions
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.gpu.cache import GpuKeysValues
from smelt.runtime.measure.counting import count_decode, count_prompt
from smelt.runtime.weights.checkpoint import Checkpoint

from ...tiny import make_model, save_model
from ..decoder.test_architectures import VARIANTS
from ..drive import logits_in_pieces
from ..kernels.interpreter import DEVICE, interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
DRAW = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(4, 4096, (length,), generator=DRAW).tolist() for length in (15, 9)]
# A prompt; a prompt beside the rest of another; single tokens; and one alone.
PIECES = [[(0, 9)], [(1, 8), (0, 4)], [(0, 1), (1, 1)], [(0, 1)]]
# One for every way of putting a layer together; what only changes numbers in tables is slow.
REPORTED = {
    "llama": ("", "rope_parameters", "layer_parts", "layer_sizes"),
    "opt": ("do_layer_norm_before",),
    "gpt_neox": ("", "use_parallel_residual", "layer_parts"),
    "phi3": ("rope_parameters",),
    "smollm3": ("no_rope_layers",),
    "gemma2": ("attn_logit_softcapping",),
    "mixtral": ("sliding_window",),
    "qwen2": ("use_sliding_window",),
    "mistral": (),
}


def _cases() -> list[Any]:
    found, seen = [], set()
    for architecture, changes in VARIANTS:
        first = next(iter(changes), "")
        kind = (architecture, first)
        quick = first in REPORTED.get(architecture, ("",)) and kind not in seen
        if first == "rope_parameters" and changes[first]["rope_type"] not in ("dynamic", "longrope"):
            quick = False
        if quick:
            seen.add(kind)
        name = f"{architecture} {' '.join(changes)} {changes.get('rope_parameters', {}).get('rope_type', '')}".strip()
        found.append(pytest.param(architecture, changes, id=name, marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(("architecture", "changes"), _cases())
def test_logits_are_those_of_transformers(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(architecture, **changes)
    path = save_model(model, tmp_path)
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    operators = GpuOperators(torch.float32, DEVICE)
    for found, reference in zip(logits_in_pieces(path, PROMPTS, PIECES, operators), expected, strict=True):
        assert (found - reference).abs().max() <= 1e-4 * max(1.0, reference.abs().max().item())


@pytest.mark.few(1)
@pytest.mark.parametrize(("architecture", "dtype"), [("qwen3_moe", torch.float16), ("mixtral", torch.bfloat16)])
def test_plain_experts_are_computed_together(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In two launches that do not wait to know which experts were chosen, so that steps can be captured."""
    model = make_model(architecture, dtype, num_hidden_layers=1, vocab_size=512)
    path = save_model(model, tmp_path)
    prompt = [token % 512 for token in PROMPTS[1]]
    with torch.no_grad():
        expected = model.float()(torch.tensor([prompt])).logits[0]
    operators = GpuOperators(dtype, DEVICE)
    loaded = Model(Checkpoint(path), operators)
    stack: Any = loaded.stack
    assert stack.captures
    for role, linear in loaded.linears().items():
        assert ("all experts in one launch" in linear.explain()) == ("expert" in role)
        assert linear.explain().startswith(f"Triton linear_dense, {str(dtype).removeprefix('torch.')}")
    found = logits_in_pieces(path, [prompt], [[(0, 8)], [(0, 1)]], operators)[0]
    assert (found - expected).norm() <= (5e-3 if dtype == torch.float16 else 3e-2) * expected.norm()


@pytest.mark.few(1)
@pytest.mark.parametrize("kept", [torch.float32, torch.int8, torch.float8_e4m3fn, torch.int4], ids=str)
@pytest.mark.parametrize("without", [("storing",), ("rotation", "attention")], ids=" ".join)
def test_the_cache_means_the_same_to_every_way_of_reading_it(
    kept: torch.dtype, without: tuple[str, ...], tiny: Callable[..., Path]
) -> None:
    """Written and read by kernels, in one launch or two, or by plain torch: the same codes must stand for the same numbers."""
    path = tiny("qwen3", num_hidden_layers=1, head_dim=24)
    logits = [
        logits_in_pieces(path, PROMPTS, PIECES, GpuOperators(torch.float32, DEVICE, fusions), kept)
        for fusions in (Fusions(), Fusions().without(*without))
    ]
    for found, expected in zip(*logits, strict=True):
        # A code is another one where two ways of adding round differently: seldom, but for int4's lowest, -7.5 of a scale.
        allowed = {torch.float32: 1e-5, torch.int4: 3e-2}.get(kept, 5e-3)
        assert (found - expected).norm() <= allowed * expected.norm()


def test_rotating_keys_spreads_their_outliers() -> None:
    """One number of a key that is much larger than the others takes their digits; rotated, it does not."""
    keys = torch.randn(6, 2, 64, generator=DRAW)
    keys[..., 5] *= 20
    errors = {}
    for name, values in (("rotated", keys), ("as they are", keys)):
        store = GpuKeysValues([2], 64, 1, 16, torch.int4, CPU)
        store.write(0, torch.arange(6), keys, values)
        read = store.read(0, torch.tensor([0]), torch.float32)
        errors[name] = (read[name != "rotated"][:, :6].transpose(0, 1) - keys).norm() / keys.norm()
    assert errors["rotated"] < 0.5 * errors["as they are"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("gemma2", name) for name in ("norm", "rotation", "activation", "attention")),
        ("opt", "activation"),
        *(pytest.param("opt", name, marks=pytest.mark.slow) for name in ("norm", "rotation", "residual")),
    ],
)
def test_a_fusion_that_is_switched_off_changes_no_logits(
    architecture: str, name: str, tiny: Callable[..., Path]
) -> None:
    path = tiny(architecture, num_hidden_layers=1)
    found, expected = (
        logits_in_pieces(path, PROMPTS[1:], [[(0, 8)], [(0, 1)]], GpuOperators(torch.float16, DEVICE, fusions))[0]
        for fusions in (Fusions().without(name), Fusions())
    )
    assert (found - expected).norm() <= 5e-3 * expected.norm()


@interpreted
@pytest.mark.parametrize(
    ("architecture", "few", "prompt"),
    [
        ("llama", 7, 9),
        ("qwen3", 7, 9),
        ("gemma2", 7, 9),
        ("olmo2", 7, 9),
        ("gpt2", 7, 9),
        ("opt", 7, 9),
        ("gpt_neox", 7, 10),
    ],
)
def test_a_block_takes_few_launches(architecture: str, few: int, prompt: int, tiny: Callable[..., Path]) -> None:
    """Another layer's launches, so that what stands before and after the layers is left out."""
    counts = []
    for layers in (2, 4):
        path = tiny(architecture, torch.bfloat16, num_hidden_layers=layers)
        model = Model(Checkpoint(path), GpuOperators(torch.bfloat16, CPU))
        steps = (count_decode(model, 1, 32), count_decode(model, 20, 32), count_prompt(model, 100))
        counts.append([step.launches for step in steps])
    assert [(b - a) / 2 for a, b in zip(*counts, strict=True)] == [few, few, prompt]


@interpreted
@pytest.mark.parametrize(("name", "more"), [("norm", 10), ("storing", 1), ("activation", 2), ("residual", 0)])
def test_each_fusion_saves_launches(name: str, more: int, tiny: Callable[..., Path]) -> None:
    path = tiny("llama", torch.bfloat16)
    fused, other = (
        count_decode(Model(Checkpoint(path), GpuOperators(torch.bfloat16, CPU, fusions)), 1, 32)
        for fusions in (Fusions(), Fusions().without(name))
    )
    layers = 3
    assert other.launches - fused.launches >= layers * more
    assert other.moved >= fused.moved


@interpreted
@pytest.mark.parametrize(("scheme", "tokens", "prompt"), [("W4A16", 7, 8), ("W8A8", 9, 9), ("FP8_DYNAMIC", 9, 9)])
def test_a_quantized_block_takes_few_launches(
    scheme: str, tokens: int, prompt: int, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    """Inputs of 8 bits are rounded by norms, by attention of prompts, and otherwise by a launch of their own."""
    counts = []
    for layers in (1, 2):
        path = tiny("llama", torch.bfloat16, hidden_size=128, intermediate_size=128, num_hidden_layers=layers)
        asked = recipe(path, {"evaluate": False, "output": str(path.parent / "out")}, scheme=scheme, rounding="nearest")
        made = run(asked, progress=False)
        model = Model(Checkpoint(made.checkpoint), GpuOperators(torch.bfloat16, CPU))
        steps = (
            count_decode(model, 1, 32),
            count_decode(model, 20, 32),
            count_prompt(model, 8),
            count_prompt(model, 100),
        )
        counts.append([step.launches for step in steps])
    assert [b - a for a, b in zip(*counts, strict=True)] == [tokens, tokens, prompt, prompt]
