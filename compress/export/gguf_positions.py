"""RoPE for llama.cpp: the fields and tensors that define how queries and keys are rotated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from gguf import MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES
from torch import Tensor

from ...runtime.decoder.architectures import DecoderSpec
from ...runtime.decoder.parts.rope import Rope
from .gguf_architectures import Architecture

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass
class Positions:
    """A file's description of positions.

    Attributes:
        fields: its fields, without the architecture prefix.
        tensors: per-frequency factors, by name.
        problems: why llama.cpp would rotate differently, one sentence each.
        notes: acceptable differences.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def positions_of(config: Any, spec: DecoderSpec, architecture: Architecture) -> Positions:
    """The rotary positions of a model; empty for one with learned positions."""
    found = Positions()
    if not spec.ropes:
        return found
    main = spec.ropes.get(_FULL) or next(iter(spec.ropes.values()))
    rope = config.rope_parameters
    parameters = rope[_FULL] if _FULL in rope else rope.get(_SLIDING, rope)
    found.fields["rope.freq_base"] = float(parameters["rope_theta"])
    rotated = 2 * len(main.frequencies(0)[0])
    found.fields["rope.dimension_count"] = rotated
    if architecture.neighbours and rotated != spec.head_size:
        found.problems.append(
            f"it rotates {rotated} of {spec.head_size} channels of a head; llama.cpp's {architecture.arch.name} rotates all"
        )
    scaling = _SCALINGS.get(main.kind)
    if scaling is None:
        found.problems.append(f"its RoPE scaling is {main.kind!r}, which llama.cpp does not support")
    else:
        scaling(found, main, parameters, spec, architecture)
    sliding = spec.ropes.get(_SLIDING)
    if sliding is not None and _FULL in spec.ropes:
        found.fields["rope.freq_base_swa"] = float(rope[_SLIDING]["rope_theta"])
        if sliding.kind != "default":
            found.problems.append("it scales RoPE in layers with a sliding window, which llama.cpp does not support")
    return found


def _default(*_: Any) -> None:
    return


def _linear(found: Positions, rope: Rope, parameters: dict[str, Any], *_: Any) -> None:
    found.fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(parameters["factor"])}


def _dynamic(found: Positions, rope: Rope, parameters: dict[str, Any], spec: DecoderSpec, _: Architecture) -> None:
    found.notes.append(
        f"llama.cpp does not scale RoPE by the prompt's length: beyond {spec.unscaled_length} tokens its outputs differ"
    )


def _yarn(found: Positions, rope: Rope, parameters: dict[str, Any], spec: DecoderSpec, _: Architecture) -> None:
    factor = float(parameters["factor"])
    found.fields |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": int(rope.original_length),
        "rope.scaling.yarn_beta_fast": float(parameters.get("beta_fast") or 32),
        "rope.scaling.yarn_beta_slow": float(parameters.get("beta_slow") or 1),
    }
    # llama.cpp multiplies its own factor of cosines and sines, which is transformers' where the config gives none.
    attention = rope.frequencies(0)[1] / (0.1 * math.log(factor) + 1)
    if abs(attention - 1) > 1e-6:
        found.fields["rope.scaling.attn_factor"] = attention
    if parameters.get("truncate") is False:
        found.problems.append("its yarn scaling does not round its range to whole dimensions, as llama.cpp does")


def _llama3(found: Positions, rope: Rope, parameters: dict[str, Any], _: DecoderSpec, to: Architecture) -> None:
    if not to.rope_factors:
        found.problems.append(f"its RoPE scaling is 'llama3', which llama.cpp's {to.arch.name} does not support")
        return
    plain = _unscaled(parameters, found.fields["rope.dimension_count"])
    found.tensors[_weight(MODEL_TENSOR.ROPE_FREQS)] = plain / rope.frequencies(0)[0]


def _longrope(found: Positions, rope: Rope, parameters: dict[str, Any], _: DecoderSpec, to: Architecture) -> None:
    if MODEL_TENSOR.ROPE_FACTORS_LONG not in MODEL_TENSORS[to.arch]:
        found.problems.append(f"its RoPE scaling is 'longrope', which llama.cpp's {to.arch.name} does not support")
        return
    found.fields |= {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": int(rope.original_length),
        "rope.scaling.attn_factor": float(rope.frequencies(1)[1]),
    }
    for kind, name in (
        (MODEL_TENSOR.ROPE_FACTORS_LONG, "long_factor"),
        (MODEL_TENSOR.ROPE_FACTORS_SHORT, "short_factor"),
    ):
        found.tensors[_weight(kind)] = torch.tensor(parameters[name], dtype=torch.float32)
    found.notes.append(
        f"llama.cpp uses the long factors if its context is set above {rope.original_length} tokens, regardless of the prompt's length"
    )


def _unscaled(parameters: dict[str, Any], rotated: int) -> Tensor:
    return 1.0 / parameters["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)


def _weight(kind: MODEL_TENSOR) -> str:
    return f"{TENSOR_NAMES[kind]}.weight"


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
