"""Recipes on small shapes, and whether vLLM loads what they make: what it was found to do, which the slow test asks again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smelt.quant.scheme_names import SUPPORTED

# Heads of 64 channels, so that vLLM's attention takes them, and sizes that 32, 64 and 128 divide.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MIXTURES = {"mixtral": {}, "qwen3_moe": {"moe_intermediate_size": 256}}
OTHERS = ("mistral", "qwen2", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "opt", "gpt_neox", "gpt2")
VLLM_TAKES = ("W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "W4A8", "W4A4")
EXPERTS = ("W4A16", "W4A16_ASYM", "W8A16", "W3A16", "W2A16", "MXFP4A16", "FP8_DYNAMIC")
# vLLM on a CPU leaves their inputs as they are: their tokens are those of W4A16, to the bit.
AS_W4A16 = ("W4A8", "W4A4")


@dataclass(frozen=True)
class Case:
    """A recipe's steps on a tiny model.

    Attributes:
        name: for people.
        architecture: by transformers' name.
        changes: of its configuration.
        steps: the recipe's; none for the model itself.
        in_vllm: whether vLLM loads what comes out.
    """

    name: str
    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    steps: tuple[dict[str, Any], ...] = ()
    in_vllm: bool = True


def quantized(scheme: str = "W4A16", **settings: Any) -> dict[str, Any]:
    """A quantize step that leaves the head."""
    return {"quantize": {"scheme": scheme, "ignore": ["lm_head"]} | settings}


def cases() -> list[Case]:
    """The whole matrix."""
    found = [
        Case(f"{a} {s}", a, SIZES, (quantized(s),), s in VLLM_TAKES) for a in ("llama", "qwen3") for s in SUPPORTED
    ]
    for architecture, sizes in MIXTURES.items():
        found.append(Case(f"{architecture} plain", architecture, SIZES | sizes))
        found += [Case(f"{architecture} {s}", architecture, SIZES | sizes, (quantized(s),), False) for s in EXPERTS]
    for architecture in ("llama", "qwen3"):
        found.append(Case(f"{architecture} plain", architecture, SIZES))
        for scheme in ("W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "W8A16"):
            step = quantized(scheme, ignore=[])
            found.append(Case(f"{architecture} {scheme} head", architecture, SIZES, (step,), scheme != "W8A16"))
        step = quantized(embeddings="int8", ignore=[])
        found.append(Case(f"{architecture} W4A16 embedding", architecture, SIZES, (step,), False))
    found += [Case(f"{name} plain", name) for name in OTHERS]
    found += [Case(f"{name} W4A16", name, {}, (quantized(group_size=64),)) for name in OTHERS if name != "gpt2"]
    found += [_llama(name, step, loads) for name, step, loads in _LLAMA_STEPS]
    found += _sizes()
    return [*found, *_pruned()]


def _llama(name: str, step: dict[str, Any], loads: bool = True, **changes: Any) -> Case:
    return Case(f"llama {name}", "llama", SIZES | changes, (step,), loads)


_LLAMA_STEPS = [
    ("W4A16 g32", quantized(group_size=32), True),
    ("W4A16 by row", quantized(group_size=-1), True),
    ("W8A8 static", quantized("W8A8", inputs="static"), True),
    ("W8A8 static asymmetric", quantized("W8A8", inputs="static_asymmetric"), True),
    ("W4A8 static", quantized("W4A8", inputs="static"), False),
    ("kv fp8", quantized(kv_cache="fp8"), True),
    ("kv fp8 by head", quantized(kv_cache={"dtype": "fp8", "scales": "head"}), True),
    ("kv fp8 by token", quantized(kv_cache={"dtype": "fp8", "scales": "token"}), False),
    ("kv int8", quantized(kv_cache="int8"), False),
    ("kv int4", quantized(kv_cache="int4"), False),
    ("only kv fp8", quantized(ignore=["Linear"], kv_cache="fp8"), True),
    ("mixed", quantized(overrides=[{"targets": ["re:.*down_proj"], "scheme": "W8A8"}]), True),
    ("mixed with W8A16", quantized(overrides=[{"targets": ["re:.*down_proj"], "scheme": "W8A16"}]), False),
    ("head apart", quantized(ignore=[], overrides=[{"targets": ["lm_head"], "scheme": "W8A8"}]), True),
    ("plain down", quantized(ignore=["lm_head", "re:.*down_proj"]), True),
    ("plain queries", quantized(ignore=["lm_head", "re:.*q_proj"]), False),
    ("rotated", quantized(transforms=["rotate"]), True),
]


def _sizes() -> list[Case]:
    """Sizes that the kernel for packed weights takes or not, and those of attention heads and vocabularies."""
    found = []
    for width, packed in ((352, True), (336, False), (344, False)):
        row = quantized(group_size=-1)
        found.append(_llama(f"W4A16 of {width}", row, packed, intermediate_size=width))
        found.append(_llama(f"W8A8 of {width}", quantized("W8A8"), intermediate_size=width))
        found.append(_llama(f"FP8_DYNAMIC of {width}", quantized("FP8_DYNAMIC"), intermediate_size=width))
    for head, loads in ((16, False), (40, False), (48, True), (80, True), (144, False)):
        found.append(_llama(f"heads of {head}", quantized("W8A8"), loads, head_dim=head))
    step = quantized(group_size=64, kv_cache="fp8")
    found.append(_llama("kv fp8, heads of 48", step, False, head_dim=48))
    for scheme in ("W4A16", "W8A8"):
        found.append(_llama(f"{scheme} odd vocabulary", quantized(scheme, ignore=[]), vocab_size=4099))
    return found


def _pruned() -> list[Case]:
    whole = {
        "blocks": {"structure": "blocks", "score": "influence", "count": 1},
        "attention": {"structure": "attention", "score": "loss", "count": 1},
        "channels": {"structure": "ffn", "ratio": 0.25},
        "heads": {"structure": "heads", "ratio": 0.5},
        "hidden": {"structure": "hidden", "ratio": 0.25},
        "weights": {"structure": "weights", "sparsity": 0.5},
    }
    found = [
        Case(f"llama pruned {name}", "llama", SIZES, ({"prune": settings}, quantized(group_size=-1)))
        for name, settings in whole.items()
    ]
    shared = {"prune": {"structure": "ffn", "ratio": 0.25, "allocation": "sensitivity"}}
    return [*found, Case("llama pruned unevenly", "llama", SIZES, (shared, quantized(group_size=-1)), False)]
