"""llama.cpp's support of each architecture, as data: its name there, and which config settings it does not compute."""

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
        neighbours: whether RoPE pairs neighbouring channels of a head, for which rows of queries and keys are permuted;
            transformers pairs the first half with the second.
        activations: those that llama.cpp accepts; it computes the first.
        windows: period of full-attention layers by default, the others having a sliding window; 0 for no windows.
        head: of lm_head: ``optional``: tied to the embedding if missing; ``always``: required; ``tied``: not accepted.
        all_biases: whether linears other than queries, keys and values may have biases.
        rope_factors: whether it reads per-frequency RoPE factors.
        writes_parallel: whether a field states that attention and feed-forward read the same input.
        limits: unsupported settings, each returning the end of a sentence if a checkpoint uses it.
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
    return "scales attention scores by a factor other than the root of the head size"


def _gemma_scale(spec: DecoderSpec) -> str | None:
    # llama.cpp recognizes the 27B models by their number of layers.
    large = len(spec.layers) in (46, 62)
    usual = (spec.hidden / spec.heads) ** -0.5 if large else spec.head_size**-0.5
    if all(abs(layer.scale / usual - 1) < 1e-6 for layer in spec.layers):
        return None
    return "scales attention scores by a factor other than that of its published models"


def _heads_fill_hidden(spec: DecoderSpec) -> str | None:
    fill = spec.heads * spec.head_size == spec.hidden
    return None if fill else "has heads whose total width differs from the hidden size"


def _every_fourth_unrotated(spec: DecoderSpec) -> str | None:
    usual = all((layer.rope is None) == ((i + 1) % 4 == 0) for i, layer in enumerate(spec.layers))
    return None if usual else "applies RoPE in a pattern other than three of four layers"


def window_period(spec: DecoderSpec, usual: int) -> int | None:
    """Every how many layers one has no sliding window, as llama.cpp counts: 0 if all have one, 1 if none; None for another pattern."""
    sliding = [layer.window is not None for layer in spec.layers]
    periods = (usual, *range(2, len(sliding) + 1), 1)
    fitting = (p for p in periods if sliding == [bool((i + 1) % p) for i in range(len(sliding))])
    return 0 if all(sliding) and len(sliding) >= usual else next(fitting, None)


def _periodic_windows(usual: int) -> Limit:
    def limit(spec: DecoderSpec) -> str | None:
        # It reads one number, and takes the usual period where a list stands.
        return (
            None
            if window_period(spec, usual) is not None
            else "has sliding windows in layers that do not alternate evenly"
        )

    return limit


def _soft_caps(spec: DecoderSpec) -> str | None:
    # It computes them always, with the published models' values where the file has none.
    return None if spec.score_cap and spec.logit_cap else "has no soft caps"


def _no_logit_cap(spec: DecoderSpec) -> str | None:
    return "caps its logits" if spec.logit_cap else None


def _all_sparse(spec: DecoderSpec) -> str | None:
    return None if all(layer.sparse for layer in spec.layers) else "has layers without experts"


def _normalized_experts(spec: DecoderSpec) -> str | None:
    return None if spec.normalized_experts else "does not normalize the weights of the chosen experts"


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
    "gemma2": Architecture(
        MODEL_ARCH.GEMMA2,
        activations=_GEMMA,
        windows=2,
        head="tied",
        limits=(_gemma_scale, _periodic_windows(2), _soft_caps),
    ),
    "gemma3_text": Architecture(
        MODEL_ARCH.GEMMA3, activations=_GEMMA, windows=6, limits=(_gemma_scale, _periodic_windows(6), _no_logit_cap)
    ),
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
    """Why llama.cpp would compute something other than the checkpoint, one sentence each."""
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
        found.append(f"its lm_head is not tied to the embedding, which llama.cpp's {name} assumes")
    return found


def differences(architecture: Architecture, spec: DecoderSpec) -> list[str]:
    """What llama.cpp computes differently, but acceptably."""
    windows = sorted({layer.window for layer in spec.layers if layer.window is not None})
    if windows and not architecture.windows:
        return [
            f"llama.cpp ignores this architecture's sliding window: beyond {windows[0]} tokens it also attends to earlier ones"
        ]
    return []
