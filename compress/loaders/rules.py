"""What transformers, vLLM and llama.cpp support, as tables, and what to change if one refuses.

The vLLM rules were tested with 0.32.0 on a CPU with AVX-512, without AMX (tests/compress/loaders/test_loaders.py repeats
that); on GPUs it has further kernels, which were not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...models.directory.layer_sizes import LAYER_SIZES
from ...quant.scheme import Scheme
from ...quant.stored.config import needs
from ..results.result import Loader
from .facts import Facts, QuantizedLinear

TRANSFORMERS, VLLM, LLAMA_CPP = "transformers", "vLLM 0.32 on a CPU", "llama.cpp"

# Of the architectures that Smelt names, those for which vLLM matches transformers.
_VLLM_ARCHITECTURES = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "smollm3",
    "opt",
    "gpt_neox",
    "gpt2",
    "mixtral",
    "qwen3_moe",
}
_VLLM_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_FP8_CACHE = 32
# Linears that vLLM fuses into one matrix, whose rows then count together.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MULTIPLE = 32  # of rows and columns, in its kernel for packed weights

_W4A16 = "use W4A16 or W8A8"


class Refusal(NamedTuple):
    """Why a program refuses a checkpoint, and what to change."""

    why: str
    advice: str


Rule = Callable[[Facts], Iterable[Refusal]]


def loaders(facts: Facts) -> list[Loader]:
    """Which programs load a checkpoint, and what to change so that they do; from its facts alone."""
    return [_transformers(facts), _vllm(facts), _llama_cpp(facts)]


def _transformers(facts: Facts) -> Loader:
    if getattr(facts.config, LAYER_SIZES, None) is not None:
        return _refused(TRANSFORMERS, [Refusal("its blocks differ in size", f"{_PLUG_IN}, or prune evenly")])
    schemes = [linear.scheme for linear in facts.linears]
    wanted = needs(schemes, experts=[each.scheme for each in facts.linears if each.is_expert], cached=_is_cached(facts))
    if wanted == "plug-in":
        zeros = not all(scheme.args.symmetric for scheme in schemes)
        what = "does not support packed zero-points" if zeros else "does not restore experts that are stored like this"
        return _refused(TRANSFORMERS, [Refusal(f"it {what}", f"{_PLUG_IN}, or use W4A16")])
    if wanted == "dequantizing":
        argument = "quantization_config=CompressedTensorsConfig(dequantize=True)"
        return Loader(name=TRANSFORMERS, loads=True, why=f"with {argument}, dequantized")
    if facts.keys_values is not None and facts.keys_values.dynamic is True:
        return Loader(
            name=TRANSFORMERS, loads=True, why=f"its keys and values are not quantized there; {_PLUG_IN} for that"
        )
    return Loader(name=TRANSFORMERS, loads=True)


_PLUG_IN = "pass config=smelt.compress.config_for(path)"


def _llama_cpp(facts: Facts) -> Loader:
    if facts.not_in_gguf:
        advice = "prune evenly" if getattr(facts.config, LAYER_SIZES, None) is not None else ""
        return _refused(LLAMA_CPP, [Refusal(why, advice) for why in facts.not_in_gguf])
    dropped = []
    if any(linear.scheme.activations is not None for linear in facts.linears):
        dropped.append("inputs")
    if _is_cached(facts):
        dropped.append("keys and values")
    without = f"; {' and '.join(dropped)} are not quantized there" if dropped else ""
    return Loader(name=LLAMA_CPP, loads=True, why=f"after smelt export --to gguf{without}")


def _vllm(facts: Facts) -> Loader:
    found = list(dict.fromkeys(refusal for rule in _VLLM_RULES for refusal in rule(facts)))
    if found:
        refused = _refused(VLLM, found)
        is_open = len({linear.name for linear in facts.linears}) < len(facts.linears)
        return (
            refused.model_copy(update={"why": f"the schemes it chooses may not load: {refused.why}"})
            if is_open
            else refused
        )
    unrounded = {s.name for s in _schemes(facts) if _is_packed(s) and s.activations is not None}
    why = f"it computes {' and '.join(sorted(unrounded))} as W4A16, activations not quantized" if unrounded else ""
    return Loader(name=VLLM, loads=True, why=why)


def _known_architecture(facts: Facts) -> Iterable[Refusal]:
    kind = facts.config.model_type
    if kind not in _VLLM_ARCHITECTURES:
        yield Refusal(f"the architecture {kind!r} was not tested", "")


def _even_blocks(facts: Facts) -> Iterable[Refusal]:
    if getattr(facts.config, LAYER_SIZES, None) is not None:
        yield Refusal("its blocks differ in size", "prune evenly")


def _head_size(facts: Facts) -> Iterable[Refusal]:
    size = _channels(facts)
    if size not in _VLLM_HEAD_SIZES:
        sizes = ", ".join(map(str, _VLLM_HEAD_SIZES))
        yield Refusal(f"its attention supports heads of {sizes} channels, but these have {size}", "")


def _kernels(facts: Facts) -> Iterable[Refusal]:
    if any(linear.is_expert for linear in facts.linears):
        yield Refusal(
            "it has no kernel for quantized experts where the processor lacks AMX",
            "serve the unquantized model, or use a processor with AMX or a GPU, which were not tested",
        )
        return
    for scheme in _schemes(facts):
        if (reason := _why_no_kernel(scheme)) is not None:
            yield reason


def _why_no_kernel(scheme: Scheme) -> Refusal | None:
    args, inputs = scheme.args, scheme.activations
    if args.type == "int" and _is_packed(scheme):
        if args.num_bits != 4:
            return Refusal(f"it has no kernel for packed weights of {args.num_bits} bits, only of 4", _W4A16)
        if inputs is not None and (inputs.type != "int" or not inputs.dynamic):
            what = "static" if inputs.type == "int" else "fp8"
            return Refusal(f"it has no kernel for packed weights with {what} inputs", "use W4A16, W8A8 or W4A8")
        return None
    if args.type == "int":
        return None if inputs is not None else Refusal("it has no kernel for plain int8 weights alone", _W4A16)
    if args.num_bits == 4:
        return Refusal("it has no kernel for weights of 4-bit floats", _W4A16)
    if args.strategy == "block":
        return Refusal("it has no kernel for fp8 in blocks where the processor lacks AMX", "use FP8_DYNAMIC")
    dynamic = inputs is not None and inputs.dynamic
    return None if dynamic else Refusal("it has no kernel for fp8 with static inputs", "use FP8_DYNAMIC")


def _multiples(facts: Facts) -> Iterable[Refusal]:
    packed = {linear.name: linear for linear in facts.linears if _is_packed(linear.scheme)}
    odd = sorted(n for n, each in packed.items() if each.columns % _MULTIPLE or _rows(each, packed) % _MULTIPLE)
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        yield Refusal(
            f"packed weights' rows and columns must be multiples of {_MULTIPLE}, and those of {odd[0]}{more} are not",
            "use W8A8, add them to ignore, or prune by a multiple",
        )


def _rows(linear: QuantizedLinear, packed: dict[str, QuantizedLinear]) -> int:
    parent, _, leaf = linear.name.rpartition(".")
    together = next((parts for parts in FUSED if leaf in parts), (leaf,))
    if leaf == "lm_head":
        return 0  # it is padded
    return sum(packed[f"{parent}.{part}"].rows for part in together if f"{parent}.{part}" in packed)


def _fused_alike(facts: Facts) -> Iterable[Refusal]:
    if (found := unlike_parts(facts)) is not None:
        yield found


def unlike_parts(facts: Facts) -> Refusal | None:
    """Parts of one fused matrix must be stored alike: vLLM takes the first one's scheme for all, unseen."""
    known: dict[str, set[str]] = {}  # several while a plan leaves the choice open
    for linear in facts.linears:
        known.setdefault(linear.name, set()).add(linear.scheme.label)
    for name in sorted(known):
        parent, _, leaf = name.rpartition(".")
        parts = next((parts for parts in FUSED if leaf in parts), ())
        joined = ", ".join(parts)
        left = [part for part in parts if f"{parent}.{part}" not in known]
        if left:
            return Refusal(f"it fuses {joined}, and {parent}.{left[0]} is not quantized", "ignore all or none")
        labels = [known[f"{parent}.{part}"] for part in parts]
        if any(each != labels[0] for each in labels):
            stored = " and ".join(sorted(set().union(*labels)))
            return Refusal(f"it fuses {joined}, and those of {parent} are stored as {stored}", "give them one scheme")
    return None


def _embedding(facts: Facts) -> Iterable[Refusal]:
    if facts.embedding:
        yield Refusal("it does not support an 8-bit embedding", "remove embeddings")


def _cache(facts: Facts) -> Iterable[Refusal]:
    args = facts.keys_values
    if args is None:
        return
    if args.type != "float" or args.strategy not in ("tensor", "attn_head"):
        yield Refusal("it supports only an fp8 KV cache with static scales", "use kv_cache: fp8")
    elif _channels(facts) % _FP8_CACHE:
        yield Refusal(f"its fp8 KV cache needs a head size that is a multiple of {_FP8_CACHE}", "remove kv_cache")


_VLLM_RULES: tuple[Rule, ...] = (
    _known_architecture,
    _even_blocks,
    _head_size,
    _kernels,
    _multiples,
    _fused_alike,
    _embedding,
    _cache,
)


def _channels(facts: Facts) -> int:
    """Of a head."""
    config = facts.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _schemes(facts: Facts) -> list[Scheme]:
    """All that are in use, each once."""
    return list({each.scheme.label: each.scheme for each in facts.linears}.values())


def _is_packed(scheme: Scheme) -> bool:
    return scheme.args.type == "int" and scheme.format == "pack-quantized"


def _is_cached(facts: Facts) -> bool:
    return facts.keys_values is not None


def _refused(name: str, found: list[Refusal]) -> Loader:
    advice = "; ".join(dict.fromkeys(each.advice for each in found if each.advice))
    return Loader(name=name, loads=False, why="; ".join(each.why for each in found), advice=advice)
