"""What engines on GPUs cannot load, from their sources: vLLM 0.33, the vLLM 0.29 of Ray 2.60, and SGLang 0.5.23.

None of this was run on a GPU. What vLLM's CPU build loads was tried, and is in :mod:`..loaders.rules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.directory import ModelDirectory
from ...models.directory.layer_sizes import LAYER_SIZES
from ...quant.scheme import Scheme
from ..loaders.facts import Facts, QuantizedLinear
from ..loaders.rules import FUSED, Refusal, unlike_parts

_MARLIN_GROUPS = (32, 64, 128)
_LARGEST_HEAD = 512
_HEAD_MULTIPLE = 8
_SGLANG_ROWS, _SGLANG_COLUMNS = 64, 128
_EXPERT_HIDDEN = 128
_W4A16 = "use W4A16 or W8A8"


@dataclass(frozen=True)
class EngineLimits:
    """What an engine's kernels take.

    Attributes:
        name: of the engine, with its version.
        bits: of packed weights.
        asymmetric: those of them that may have zero-points.
        dense_mxfp4: whether MXFP4 works outside of experts.
        int8_experts: whether W8A8 works in experts.
        activation_order: whether weights may be stored in activation order (``g_idx``).
        rows, columns: what shapes of packed weights must be multiples of; 1 for any.
        names_all: whether every linear that is not quantized must be in ``ignore``.
        newest: whether kernels for other groups, and for packed weights with int8 inputs, may take what the usual ones do not.
        caches: the strategies of fp8 caches that it follows.
        needs_cache: whether it refuses a cache in another format, instead of leaving it unquantized.
    """

    name: str
    bits: tuple[int, ...]
    asymmetric: tuple[int, ...]
    dense_mxfp4: bool = True
    int8_experts: bool = True
    activation_order: bool = False
    rows: int = 1
    columns: int = 1
    names_all: bool = False
    newest: bool = True
    caches: tuple[str, ...] = ("tensor", "attn_head")
    needs_cache: bool = True


VLLM_GPU = EngineLimits("vLLM 0.33", (2, 3, 4, 5, 6, 7, 8), (2, 3, 4, 5, 6, 7, 8))
RAY_LLM = EngineLimits("Ray 2.60's vLLM 0.29", (2, 3, 4, 5, 6, 7, 8), (4, 8), activation_order=True)
SGLANG = EngineLimits(
    "SGLang 0.5.23", (4, 8), (4,), dense_mxfp4=False, int8_experts=False, activation_order=True,
    rows=_SGLANG_ROWS, columns=_SGLANG_COLUMNS, names_all=True, newest=False, caches=("tensor",), needs_cache=False,
)  # fmt: skip


def refusals(facts: Facts, limits: EngineLimits, tensor_parallel: int) -> list[Refusal]:
    """Why an engine cannot load a compressed-tensors checkpoint.

    Args:
        facts: of the checkpoint.
        limits: what the engine takes.
        tensor_parallel: GPUs that share each layer.
    """
    found = [
        *shape_refusals(facts.config, tensor_parallel),
        *(reason for scheme in _schemes(facts) for reason in _scheme(scheme, facts, limits)),
        *filter(None, [unlike_parts(facts)]),
        *_multiples(facts, limits, tensor_parallel),
        *_experts(facts, limits),
        *_tables(facts),
        *_cache(facts, limits),
    ]
    return list(dict.fromkeys(found))


def notes(facts: Facts, limits: EngineLimits) -> list[str]:
    """What works, but otherwise than it may be thought."""
    found = []
    for scheme in _schemes(facts):
        args = scheme.args
        if scheme.format == "pack-quantized" and not _is_marlin(scheme):
            found.append(
                f"{scheme.label}: only {limits.name}'s newest kernels (Humming) take it, which nobody here has tried"
            )
        if args.type == "float" and args.num_bits == 8 and scheme.activations is not None:
            found.append(
                f"{scheme.label}: inputs are rounded on GPUs from compute capability 8.9 on, not on older ones"
            )
        if args.type == "float" and args.num_bits == 4:
            found.append(f"{scheme.label}: GPUs before Blackwell compute it with 16-bit inputs")
    if not limits.needs_cache and facts.keys_values is not None and not _follows_cache(facts, limits):
        found.append("keys and values are not quantized there")
    return found


def shape_refusals(config: Any, tensor_parallel: int) -> Iterator[Refusal]:
    """Why a model of this configuration cannot be loaded, however it is quantized.

    Args:
        config: its Hugging Face configuration.
        tensor_parallel: GPUs that share each layer.
    """
    if getattr(config, LAYER_SIZES, None) is not None:
        yield Refusal("its blocks differ in size", "prune evenly")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size % _HEAD_MULTIPLE or size > _LARGEST_HEAD:
        yield Refusal(
            f"heads of {size} channels; they must be a multiple of {_HEAD_MULTIPLE}, up to {_LARGEST_HEAD}", ""
        )
    heads = config.num_attention_heads
    if heads % tensor_parallel:
        yield Refusal(f"{heads} attention heads cannot be shared by {tensor_parallel} GPUs", "change --tensor-parallel")
    shared = getattr(config, "num_key_value_heads", None) or heads
    if shared % tensor_parallel and tensor_parallel % shared:
        yield Refusal(
            f"{shared} heads of keys and values cannot be shared by {tensor_parallel} GPUs", "change --tensor-parallel"
        )


def too_long(config: dict[str, Any], length: int | None) -> Iterator[Refusal]:
    """Whether sequences are to be longer than the model's positions reach, which engines refuse when they start."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    longest = config.get("max_position_embeddings")
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    if length is None or not isinstance(longest, int):
        return
    # Some configurations count the scaled positions, others those before.
    reach = longest * (factor if isinstance(factor, int | float) and factor > 1 else 1)
    if length > reach:
        yield Refusal(f"--max-model-len is {length}, and the model has {longest} positions", "lower it")


def _scheme(scheme: Scheme, facts: Facts, limits: EngineLimits) -> Iterator[Refusal]:
    args, inputs = scheme.args, scheme.activations
    label = scheme.label
    match args.type, args.num_bits, scheme.format:
        case "int", bits, "pack-quantized":
            if bits not in limits.bits:
                yield Refusal(f"{label}: no kernel for packed weights of {bits} bits", _W4A16)
            elif not args.symmetric and bits not in limits.asymmetric:
                yield Refusal(f"{label}: no kernel for {bits} bits with zero-points", "use symmetric weights")
            if inputs is not None and (inputs.type != "int" or not inputs.dynamic or not limits.newest):
                yield Refusal(f"{label}: no kernel for packed weights with these inputs", _W4A16)
            if not limits.newest and not _is_marlin(scheme):
                yield Refusal(f"{label}: groups must be of 32, 64 or 128 columns, or whole rows", "change group_size")
        case "int", 8, _ if inputs is not None:
            if args.strategy not in ("tensor", "channel") or not args.symmetric:
                yield Refusal(f"{label}: int8 weights must be symmetric, with a scale for each row", "use W8A8")
            if inputs.strategy not in ("tensor", "token"):
                yield Refusal(f"{label}: int8 inputs must have a scale for each token, or one", "use W8A8")
        case "float", 8, _:
            if args.strategy not in ("tensor", "channel", "block"):
                yield Refusal(f"{label}: no kernel for fp8 weights in groups", "use FP8_DYNAMIC or FP8_BLOCK")
            if args.strategy == "block" and (inputs is None or not inputs.dynamic):
                yield Refusal(f"{label}: fp8 in blocks needs dynamic inputs", "use FP8_BLOCK")
        case "float", 4, _:
            is_nv = args.strategy == "tensor_group"
            if is_nv and inputs is not None and inputs.num_bits != 4:
                yield Refusal(f"{label}: NVFP4 weights with inputs that are not NVFP4", "use NVFP4 or NVFP4A16")
            if not is_nv and not limits.dense_mxfp4 and any(not each.is_expert for each in facts.linears):
                yield Refusal(f"{label}: MXFP4 works only in experts", "use NVFP4A16 or W4A16")
        case _:
            yield Refusal(f"{label}: no kernel for weights stored as {scheme.format}", _W4A16)


def _multiples(facts: Facts, limits: EngineLimits, tensor_parallel: int) -> Iterator[Refusal]:
    for linear in facts.linears:
        leaf = linear.name.rpartition(".")[2]
        is_row = leaf in ("o_proj", "down_proj", "out_proj", "fc2")
        columns = linear.columns // tensor_parallel if is_row else linear.columns
        rows = linear.rows if is_row else linear.rows // tensor_parallel
        group = linear.scheme.args.group_size or 0
        if is_row and group > 0 and tensor_parallel > 1 and columns % group:
            yield Refusal(
                f"{linear.name}: {linear.columns} columns are no whole groups of {group} on each of {tensor_parallel} GPUs",
                "change --tensor-parallel",
            )
            return
        if linear.scheme.format == "pack-quantized" and (
            columns % limits.columns or _rows(facts, linear, rows) % limits.rows
        ):
            yield Refusal(
                f"{linear.name}: packed weights must have multiples of {limits.rows} rows and {limits.columns} columns on each GPU,"
                f" and these are {rows} x {columns}",
                "use W8A8, add them to ignore, or prune by a multiple",
            )
            return


def _rows(facts: Facts, linear: QuantizedLinear, rows: int) -> int:
    """Rows of the fused matrix that a linear is part of."""
    parent, _, leaf = linear.name.rpartition(".")
    parts = next((parts for parts in FUSED if leaf in parts), (leaf,))
    if len(parts) == 1:
        return rows
    together = {f"{parent}.{part}" for part in parts}
    return sum(each.rows for each in facts.linears if each.name in together) * rows // linear.rows


def _experts(facts: Facts, limits: EngineLimits) -> Iterator[Refusal]:
    experts = [linear for linear in facts.linears if linear.is_expert]
    if not experts:
        return
    if len({linear.scheme.label for linear in experts}) > 1:
        yield Refusal("experts are stored in several schemes, and it takes one for all", "give experts one scheme")
    scheme = experts[0].scheme
    if scheme.format == "pack-quantized" and (facts.config.hidden_size % _EXPERT_HIDDEN or not _is_marlin(scheme)):
        yield Refusal(
            f"{scheme.label}: packed experts need a hidden size that is a multiple of {_EXPERT_HIDDEN}, and groups of 32, 64 or 128",
            "change group_size, or ignore experts",
        )
    if scheme.format == "pack-quantized" and scheme.activations is not None:
        yield Refusal(
            f"{scheme.label}: no kernel for packed experts whose inputs are rounded", "use W4A16, W8A8 or FP8_DYNAMIC"
        )
    if scheme.args.type == "int" and scheme.activations is not None and not limits.int8_experts:
        yield Refusal(f"{scheme.label}: no kernel for int8 experts", "use FP8_DYNAMIC or W4A16")
    if scheme.args.type == "float" and scheme.args.num_bits == 8 and scheme.activations is None:
        yield Refusal(f"{scheme.label}: no kernel for fp8 experts with unquantized inputs", "use FP8_DYNAMIC")


def _tables(facts: Facts) -> Iterator[Refusal]:
    if facts.embedding:
        yield Refusal("a quantized input embedding", "remove embeddings")
    tied = bool(getattr(facts.config, "tie_word_embeddings", False))
    if tied and any(linear.name.rpartition(".")[2] == "lm_head" for linear in facts.linears):
        yield Refusal("a quantized lm_head that is tied to the input embedding", "ignore lm_head")


def _cache(facts: Facts, limits: EngineLimits) -> Iterator[Refusal]:
    if limits.needs_cache and facts.keys_values is not None and not _follows_cache(facts, limits):
        yield Refusal("a KV cache in another format than fp8 with static scales", "use kv_cache: fp8")


def _follows_cache(facts: Facts, limits: EngineLimits) -> bool:
    args = facts.keys_values
    return args is not None and args.type == "float" and args.num_bits == 8 and args.strategy in limits.caches


def _is_marlin(scheme: Scheme) -> bool:
    """Whether the kernels that all engines have take packed weights."""
    args = scheme.args
    usual = args.num_bits == 4 or (args.num_bits == 8 and args.symmetric)
    return bool(usual) and (args.strategy == "channel" or args.group_size in _MARLIN_GROUPS)


def _schemes(facts: Facts) -> Iterable[Scheme]:
    return {each.scheme.label: each.scheme for each in facts.linears}.values()


def refusals_of_config(directory: ModelDirectory, limits: EngineLimits) -> list[Refusal]:
    """Why an engine cannot load a checkpoint, from its ``quantization_config`` itself, in any format."""
    config: dict[str, Any] = directory.config_data().get("quantization_config") or {}
    found: list[Refusal] = []
    match config.get("quant_method"):
        case None:
            pass
        case "compressed-tensors":
            if (config.get("sparsity_config") or {}).get("targets"):
                found.append(Refusal("compressed 2:4 sparsity, which was removed there", "store the weights dense"))
            if limits.names_all:
                found += _unnamed(directory.path, config)
            # A group may also be a preset's name with its targets, which has no order.
            groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group, dict)]
            orders = {str((group.get("weights") or {}).get("actorder")) for group in groups}
            if orders & {"group", "dynamic"} and not limits.activation_order:
                found.append(Refusal("weights in activation order (g_idx)", "use actorder: weight"))
        case "gptq":
            kind = config.get("bits"), bool(config.get("sym", True))
            if kind not in ((4, True), (8, True)):
                found.append(
                    Refusal(f"GPTQ of {kind[0]} bits, {'symmetric' if kind[1] else 'with zero-points'}", _W4A16)
                )
            if config.get("desc_act") and config.get("group_size", -1) != -1 and not limits.activation_order:
                found.append(
                    Refusal("GPTQ in activation order (desc_act) with groups", "quantize with desc_act: false")
                )
        case "awq":
            if config.get("bits", config.get("w_bit")) != 4:
                found.append(Refusal("AWQ of other than 4 bits", _W4A16))
        case other:
            found.append(Refusal(f"the quantization method {other!r} was not looked at", ""))
    return found


def _unnamed(path: Path, config: dict[str, Any]) -> list[Refusal]:
    """Linears that are neither quantized nor ignored, where the config names its linears one by one."""
    patterns = [str(each) for each in config.get("ignore") or ()]
    weights = CheckpointWeights(path)
    for name in weights.names():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or len(weights.info(name).shape) != 2 or "embed" in module:
            continue
        if weights.has(f"{module}.weight_scale") or any(_matches(pattern, module) for pattern in patterns):
            continue
        return [Refusal(f"{module} is neither quantized nor in ignore", "add it to ignore in config.json")]
    return []


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module
