"""The supported architectures as data: one row per architecture, from its config to a decoder's spec."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...models.directory.layer_sizes import LAYER_SIZES, layer_configs
from ...system.errors import RuntimeProblem, SmeltError
from .parts.rope import Rope


@dataclass(frozen=True)
class LayerSpec:
    """The fields that differ from layer to layer.

    Attributes:
        scale: the factor of attention scores.
        window: how many positions back a token sees, itself included; None for all.
        rope: the name of its rotation among the decoder's; None if positions are not rotated.
        sparse: whether its feed-forward part is a mixture of experts.
        attends, feeds: whether it has attention, and a feed-forward part; pruning may have removed one of them.
        heads, key_value_heads: its head counts; None for the decoder's.
        joined: whether its attention reads the tokens' embeddings beside the states, as a draft head's first layer does (EAGLE-3).
    """

    scale: float
    window: int | None = None
    rope: str | None = ""
    sparse: bool = False
    attends: bool = True
    feeds: bool = True
    heads: int | None = None
    key_value_heads: int | None = None
    joined: bool = False


@dataclass(frozen=True)
class Names:
    """The checkpoint's names of a decoder's parts. ``{}`` is a layer's prefix, ``{e}`` an expert's index.

    Attributes:
        query_key_value: one fused matrix or three, in that order.
        by_head: whether a fused one has its rows by head first (GPT-NeoX).
        gate_up: the gate and up matrices, fused or two; or only the up matrix, where there is no gate.
        expert_gate_up, expert_down: the same for one expert, in all spellings in use.
        transposed: whether matrices are stored ``[in, out]`` (GPT-2).
    """

    layer: str = "model.layers.{i}."
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    project_in: str | None = None
    project_out: str | None = None
    final_norm: str | None = "model.norm"
    head: str = "lm_head"
    query_key_value: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    by_head: bool = False
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: tuple[str, ...] = ("mlp.gate", "block_sparse_moe.gate")
    expert_gate_up: tuple[tuple[str, str], ...] = (
        ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
        ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    )
    expert_down: tuple[str, ...] = ("mlp.experts.{e}.down_proj", "block_sparse_moe.experts.{e}.w2")
    transposed: bool = False

    def is_transposed(self, name: str) -> bool:
        """Whether a linear's matrix is stored ``[in, out]``: those of layers may be, an lm_head is not."""
        return self.transposed and name.startswith(self.layer.partition("{i}")[0])


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only language model, without its weights.

    Attributes:
        heads, key_value_heads: the default for layers without their own.
        norm: ``rms``, ``rms+1`` (Gemma: the weight is an offset from one) or ``layer``.
        order: ``sequential``: each part's input is normed, its output is normed where the checkpoint has such a norm, then added;
            ``parallel``: attention and feed-forward both read the layer's input; ``after``: the sum is normed (OPT-350m).
        query_key_norm: whether queries and keys are normed by ``head``, as a ``whole``, or not.
        gated: whether the feed-forward part multiplies by an activated gate.
        score_cap, logit_cap: tanh soft caps on attention scores and on logits.
        embedding_scale: what embeddings are multiplied by, if anything.
        position_offset: added to positions before their learned embedding is looked up.
        normalized_experts: whether the chosen experts' weights are normalized to sum to one.
    """

    vocabulary: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    layers: tuple[LayerSpec, ...]
    max_length: int
    eps: float
    norm: str = "rms"
    order: str = "sequential"
    query_key_norm: str | None = None
    activation: str = "silu"
    gated: bool = True
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float | None = None
    position_offset: int = 0
    experts: int = 0
    experts_per_token: int = 0
    normalized_experts: bool = True
    ropes: dict[str, Rope] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    tied: bool = False

    @property
    def cached_heads(self) -> tuple[int, ...]:
        """The number of key-value heads of each layer with a KV cache."""
        return tuple(layer.key_value_heads or self.key_value_heads for layer in self.layers if layer.attends)

    @property
    def most_heads(self) -> int:
        """The largest number of query heads of a layer."""
        return max(layer.heads or self.heads for layer in self.layers)

    @property
    def unscaled_length(self) -> int:
        """How long a sequence may get with the positions of a short one, where they depend on its length; else ``max_length``."""
        return min((rope.unscaled_length or self.max_length for rope in self.ropes.values()), default=self.max_length)


Config = Any


def spec_of(config: Config) -> DecoderSpec:
    """The decoder that a Hugging Face config describes.

    Raises:
        RuntimeProblem: the architecture, or a feature in the config, is not supported.
    """
    try:
        return _without_parts(_with_sizes(_whole(config), config), config)
    except SmeltError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise RuntimeProblem(
            f"config.json: it does not describe a valid {config.model_type} model ({error!r})"
        ) from None


def _with_sizes(spec: DecoderSpec, config: Config) -> DecoderSpec:
    """Apply per-layer head counts after uneven pruning; feed-forward widths follow from the matrices."""
    configs = layer_configs(config)
    if configs is None:
        return spec
    alone = {id(each): _whole(each) for each in configs}
    layers = tuple(
        replace(layer, heads=alone[id(each)].heads, key_value_heads=alone[id(each)].key_value_heads)
        for layer, each in zip(spec.layers, configs, strict=True)
    )
    if any(
        each.head_size != spec.head_size or each.heads * spec.key_value_heads != spec.heads * each.key_value_heads
        for each in alone.values()
    ):
        raise RuntimeProblem(
            f"config.json: {LAYER_SIZES} gives layers different head sizes, or different numbers of query heads per key-value head,"
            " which is not supported"
        )
    return replace(spec, layers=layers)


def _without_parts(spec: DecoderSpec, config: Config) -> DecoderSpec:
    """Remove the parts that pruning removed; the config lists what is left of each layer: ``all``, ``attention``, ``mlp`` or ``none``."""
    left = getattr(config, "layer_parts", None)
    if left is None:
        return spec
    if (
        not isinstance(left, list)
        or len(left) != len(spec.layers)
        or not set(left) <= {"all", "attention", "mlp", "none"}
    ):
        raise RuntimeProblem(
            f"config.json: layer_parts must have one of all, attention, mlp, none for each of {len(spec.layers)} layers"
        )
    layers = tuple(
        replace(layer, attends=part in ("all", "attention"), feeds=part in ("all", "mlp"))
        for layer, part in zip(spec.layers, left, strict=True)
    )
    if not any(layer.attends for layer in layers):
        raise RuntimeProblem("config.json: layer_parts leaves attention in no layer, which is not supported")
    return replace(spec, layers=layers)


def _whole(config: Config) -> DecoderSpec:
    build = ARCHITECTURES.get(config.model_type)
    if build is None:
        raise RuntimeProblem(
            f"the runtime does not know the architecture {config.model_type!r}; it knows {', '.join(sorted(ARCHITECTURES))}"
        )
    spec = build(config)
    return replace(spec, max_length=max(spec.max_length, *(rope.longest for rope in spec.ropes.values()), 0))


def _llama(config: Config) -> DecoderSpec:
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    layers = tuple(LayerSpec(head_size**-0.5, window=window if kind == "sliding_attention" else None) for kind in types)
    return DecoderSpec(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_size=head_size,
        layers=layers,
        max_length=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        activation=config.hidden_act,
        ropes={"": Rope.of(config)},
        tied=config.tie_word_embeddings,
    )


def _mistral(config: Config) -> DecoderSpec:
    spec = _llama(config)
    return replace(spec, layers=tuple(replace(layer, window=config.sliding_window) for layer in spec.layers))


def _qwen3(config: Config) -> DecoderSpec:
    return replace(_llama(config), query_key_norm="head")


def _gemma2(config: Config) -> DecoderSpec:
    base = _llama_like_gemma(config)
    return replace(base, layers=tuple(replace(layer, rope="") for layer in base.layers), ropes={"": Rope.of(config)})


def _gemma3(config: Config) -> DecoderSpec:
    kinds = dict.fromkeys(config.layer_types)
    return replace(
        _llama_like_gemma(config), query_key_norm="head", ropes={kind: Rope.of(config, kind) for kind in kinds}
    )


def _llama_like_gemma(config: Config) -> DecoderSpec:
    if getattr(config, "use_bidirectional_attention", False):
        raise RuntimeProblem(f"{config.model_type}: bidirectional attention is not supported")
    layers = tuple(
        LayerSpec(
            config.query_pre_attn_scalar**-0.5,
            window=config.sliding_window if kind == "sliding_attention" else None,
            rope=kind,
        )
        for kind in config.layer_types
    )
    names = Names(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )
    return DecoderSpec(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        layers=layers,
        max_length=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        norm="rms+1",
        activation=config.hidden_activation,
        # transformers ignores Gemma 3's soft cap on attention scores; that model's configs have none.
        score_cap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
        logit_cap=config.final_logit_softcapping,
        embedding_scale=config.hidden_size**0.5,
        names=names,
        tied=config.tie_word_embeddings,
    )


def _phi3(config: Config) -> DecoderSpec:
    names = Names(query_key_value=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return replace(_mistral(config), names=names)


def _olmo2(config: Config) -> DecoderSpec:
    names = Names(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    )
    return replace(_llama(config), query_key_norm="whole", names=names)


def _smollm3(config: Config) -> DecoderSpec:
    spec = _llama(config)
    layers = tuple(
        replace(layer, rope="" if rotated else None, window=layer.window if config.use_sliding_window else None)
        for layer, rotated in zip(spec.layers, config.no_rope_layers[: len(spec.layers)], strict=True)
    )
    return replace(spec, layers=layers)


def _mixtral(config: Config) -> DecoderSpec:
    spec = _mistral(config)
    return replace(
        spec,
        layers=tuple(replace(layer, sparse=True) for layer in spec.layers),
        experts=config.num_local_experts,
        experts_per_token=config.num_experts_per_tok,
    )


def _qwen3_moe(config: Config) -> DecoderSpec:
    spec = _qwen3(config)
    window = config.sliding_window if getattr(config, "use_sliding_window", False) else None
    layers = tuple(
        replace(
            layer,
            window=window,
            sparse=i not in config.mlp_only_layers
            and config.num_experts > 0
            and (i + 1) % config.decoder_sparse_step == 0,
        )
        for i, layer in enumerate(spec.layers)
    )
    return replace(
        spec,
        layers=layers,
        experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        normalized_experts=config.norm_topk_prob,
    )


def _gpt2(config: Config) -> DecoderSpec:
    head_size = config.n_embd // config.n_head
    scale = head_size**-0.5 if config.scale_attn_weights else 1.0
    layers = tuple(
        LayerSpec(scale / (i + 1) if config.scale_attn_by_inverse_layer_idx else scale, rope=None)
        for i in range(config.n_layer)
    )
    names = Names(
        layer="transformer.h.{i}.",
        embedding="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        query_key_value=("attn.c_attn",),
        out="attn.c_proj",
        before_attention="ln_1",
        before_mlp="ln_2",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        transposed=True,
    )
    return DecoderSpec(
        vocabulary=config.vocab_size,
        hidden=config.n_embd,
        heads=config.n_head,
        key_value_heads=config.n_head,
        head_size=head_size,
        layers=layers,
        max_length=config.n_positions,
        eps=config.layer_norm_epsilon,
        norm="layer",
        activation=config.activation_function,
        gated=False,
        names=names,
        tied=config.tie_word_embeddings,
    )


def _opt(config: Config) -> DecoderSpec:
    head_size = config.hidden_size // config.num_attention_heads
    projected = config.word_embed_proj_dim != config.hidden_size
    ends_normed = config.do_layer_norm_before and not getattr(config, "_remove_final_layer_norm", False)
    names = Names(
        layer="model.decoder.layers.{i}.",
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        project_in="model.decoder.project_in" if projected else None,
        project_out="model.decoder.project_out" if projected else None,
        final_norm="model.decoder.final_layer_norm" if ends_normed else None,
        out="self_attn.out_proj",
        before_attention="self_attn_layer_norm",
        before_mlp="final_layer_norm",
        gate_up=("fc1",),
        down="fc2",
    )
    return DecoderSpec(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        key_value_heads=config.num_attention_heads,
        head_size=head_size,
        layers=(LayerSpec(head_size**-0.5, rope=None),) * config.num_hidden_layers,
        max_length=config.max_position_embeddings,
        eps=1e-5,
        norm="layer",
        order="sequential" if config.do_layer_norm_before else "after",
        activation=config.activation_function,
        gated=False,
        position_offset=2,
        names=names,
        tied=config.tie_word_embeddings,
    )


def _gpt_neox(config: Config) -> DecoderSpec:
    head_size = config.hidden_size // config.num_attention_heads
    names = Names(
        layer="gpt_neox.layers.{i}.",
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        query_key_value=("attention.query_key_value",),
        by_head=True,
        out="attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )
    return DecoderSpec(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        key_value_heads=config.num_attention_heads,
        head_size=head_size,
        layers=(LayerSpec(1 / math.sqrt(head_size)),) * config.num_hidden_layers,
        max_length=config.max_position_embeddings,
        eps=config.layer_norm_eps,
        norm="layer",
        order="parallel" if config.use_parallel_residual else "sequential",
        activation=config.hidden_act,
        gated=False,
        ropes={"": Rope.of(config)},
        names=names,
        tied=config.tie_word_embeddings,
    )


ARCHITECTURES: dict[str, Callable[[Config], DecoderSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _llama,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
