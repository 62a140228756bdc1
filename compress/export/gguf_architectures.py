"""What llama.cpp makes of each architecture, as data: its name there, and where it computes less than the config may ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gguf import MODEL_ARCH

from ...runtime.decoder.architectures import DecoderSpec

Limit = Callable[[DecoderSpec], str | None]


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp describes one of transformers' architectures.

    Attributes:
        arch: its name there.
        neighbours: whether neighbouring numbers of a head are rotated together, for which rows of queries and keys are
            put in another order; transformers rotates the first half with the second.
        activations: those that llama.cpp computes; the first is meant.
        windows: by default, every so-many-th layer sees all and the others a sliding window; 0 if it has none.
        head: ``optional``: without one the embedding is the head; ``always``: it wants one; ``tied``: it takes none.
        all_biases: whether linears other than queries, keys and values may have biases.
        rope_factors: whether it reads factors of single frequencies.
        writes_parallel: whether a field says that attention and feed-forward read the same input.
        limits: what it cannot do, each a sentence's end if a checkpoint asks for it.
    """

    arch: MODEL_ARCH
    neighbours: bool = False
    activations: tuple[str, ...] = ("silu",)
    windows: int = 0
    head: str = "optional"
    all_biases: bool = False
    rope_factors: bool = False
    writes_parallel: bool = False
    limits: tuple[Limit, ...] = ()


def _usual_scale(spec: DecoderSpec) -> str | None:
    usual = spec.head_size**-0.5
    if all(abs(layer.scale / usual - 1) < 1e-6 for layer in spec.layers):
        return None
    return "scales attention scores by another number than the root of the head size"


def _gemma_scale(spec: DecoderSpec) -> str | None:
    # llama.cpp knows the 27B models by their number of layers.
    large = len(spec.layers) in (46, 62)
    usual = (spec.hidden / spec.heads) ** -0.5 if large else spec.head_size**-0.5
    if all(abs(layer.scale / usual - 1) < 1e-6 for layer in spec.layers):
        return None
    return "scales attention scores by another number than its published models do"


def _heads_fill_hidden(spec: DecoderSpec) -> str | None:
    fill = spec.heads * spec.head_size == spec.hidden
    return None if fill else "has heads that are together wider or narrower than the hidden state"


def _every_fourth_unrotated(spec: DecoderSpec) -> str | None:
    usual = all((layer.rope is None) == ((i + 1) % 4 == 0) for i, layer in enumerate(spec.layers))
    return None if usual else "rotates positions in other layers than three of four"


def _all_sparse(spec: DecoderSpec) -> str | None:
    return None if all(layer.sparse for layer in spec.layers) else "has layers without experts"


def _normalized_experts(spec: DecoderSpec) -> str | None:
    return None if spec.normalized_experts else "does not make the chosen experts' shares sum to one"


_LLAMA = Architecture(MODEL_ARCH.LLAMA, neighbours=True, all_biases=True, rope_factors=True, limits=(_usual_scale,))
_GEMMA = ("gelu_pytorch_tanh", "gelu_new", "gelu")
_GPT = ("gelu_new", "gelu", "gelu_pytorch_tanh", "gelu_fast")

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Architecture(MODEL_ARCH.QWEN2, limits=(_usual_scale,)),
    "qwen3": Architecture(MODEL_ARCH.QWEN3, limits=(_usual_scale,)),
    "qwen3_moe": Architecture(MODEL_ARCH.QWEN3MOE, limits=(_usual_scale, _all_sparse, _normalized_experts)),
    "gemma2": Architecture(MODEL_ARCH.GEMMA2, activations=_GEMMA, windows=2, head="tied", limits=(_gemma_scale,)),
    "gemma3_text": Architecture(MODEL_ARCH.GEMMA3, activations=_GEMMA, windows=6, limits=(_gemma_scale,)),
    "phi3": Architecture(MODEL_ARCH.PHI3, limits=(_usual_scale, _heads_fill_hidden)),
    "olmo2": Architecture(MODEL_ARCH.OLMO2, head="always", limits=(_usual_scale, _heads_fill_hidden)),
    "smollm3": Architecture(MODEL_ARCH.SMOLLM3, neighbours=True, limits=(_usual_scale, _every_fourth_unrotated)),
    "gpt2": Architecture(MODEL_ARCH.GPT2, activations=_GPT, all_biases=True, limits=(_usual_scale, _heads_fill_hidden)),
    "gpt_neox": Architecture(
        MODEL_ARCH.GPTNEOX,
        activations=_GPT,
        head="always",
        all_biases=True,
        writes_parallel=True,
        limits=(_usual_scale, _heads_fill_hidden),
    ),
}


def shortcomings(architecture: Architecture, spec: DecoderSpec, model_type: str) -> list[str]:
    """Why llama.cpp would compute something else than the checkpoint, one sentence each."""
    name = architecture.arch.name
    found = [
        f"this {model_type} {limit}, which llama.cpp's {name} cannot do"
        for check in architecture.limits
        if (limit := check(spec)) is not None
    ]
    if spec.activation not in architecture.activations:
        found.append(
            f"its activation is {spec.activation!r}; llama.cpp's {name} computes {architecture.activations[0]}"
        )
    if architecture.head == "tied" and not spec.tied:
        found.append(f"its head is not tied to the embedding, which llama.cpp's {name} takes for granted")
    return found


def differences(architecture: Architecture, spec: DecoderSpec) -> list[str]:
    """What llama.cpp computes in another way, which a user may live with."""
    windows = sorted({layer.window for layer in spec.layers if layer.window is not None})
    if windows and not architecture.windows:
        return [
            f"llama.cpp does not keep to this architecture's sliding window: beyond {windows[0]} tokens it also sees what is earlier"
        ]
    return []
