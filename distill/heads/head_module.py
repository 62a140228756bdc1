"""A draft head in training: EAGLE-3.1's layer, with the names that its tensors have in a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ...runtime.speculation.eagle.head_checkpoint import STATES

_ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head for one model.

    Attributes:
        config: of its layer; its vocabulary is the model's.
        after: after how many of the model's layers its states are taken.
        vocabulary: of its lm_head.
    """

    config: LlamaConfig
    after: tuple[int, int, int]
    vocabulary: int

    @classmethod
    def of(cls, config: Any, layers: int, vocabulary: int) -> HeadShape:
        """A layer as wide as the model's own, that reads states after a third, two thirds and all but one of its layers.

        vLLM takes states before a layer only, so that those of the last one cannot be read.

        Args:
            config: the model's.
            layers: how many it has.
            vocabulary: of the head.
        """
        width = int(config.hidden_size)
        size = getattr(config, "head_dim", None) or width // int(config.num_attention_heads)
        # Llama's heads divide its width, which those of a pruned model need not.
        shared = math.gcd(getattr(config, "num_key_value_heads", None) or int(config.num_attention_heads), width)
        heads = max(
            n for n in range(shared, max(shared, int(config.num_attention_heads)) + 1, shared) if width % n == 0
        )
        rope = getattr(config, "rope_parameters", None) or {}
        rope = rope if rope.get("rope_type", "default") in _ROPES and "rope_theta" in rope else {}
        # Llama rotates all of a head, also where the model does not.
        rope = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
        made = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=width,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * width,
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=shared,
            head_dim=size,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
            rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=getattr(config, "bos_token_id", None),
            eos_token_id=getattr(config, "eos_token_id", None),
            pad_token_id=None,
            tie_word_embeddings=False,
        )
        return cls(made, (layers // 3, 2 * layers // 3, layers - 1), vocabulary)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, size, shared = config.hidden_size, config.head_dim, config.num_key_value_heads
        assert size is not None
        assert shared is not None
        self.size = size
        self.q_proj = nn.Linear(2 * hidden, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, shared * size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, shared * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, hidden, bias=False)


class _FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _FeedForward(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )


class HeadModule(nn.Module):
    """A draft head.

    Args:
        shape: its sizes.

    Attributes:
        shape: the same.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        config, hidden = shape.config, shape.config.hidden_size
        self.shape = shape
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(hidden, config.rms_norm_eps) for _ in range(STATES))
        self.fc = nn.Linear(STATES * hidden, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, shape.vocabulary, bias=False)
        self._rotary = [LlamaRotaryEmbedding(config)]  # in a list: nothing of it is stored

    @classmethod
    def without_weights(cls, shape: HeadShape) -> Self:
        """One whose weights have shapes alone."""
        with torch.device("meta"):
            return cls(shape)

    @torch.no_grad()
    def begin(self, norm: Tensor | None, lm_head: Tensor, seed: int) -> None:
        """At first it says what the model's last layers but one have made of the text.

        Args:
            norm: the weight of the model's final norm, if it is a plain RMS norm.
            lm_head: the rows of the model's lm_head that it has.
            seed: of its other weights.
        """
        generator = torch.Generator().manual_seed(seed)
        hidden = self.shape.config.hidden_size
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                small = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                parameter.normal_(std=small * parameter.shape[1] ** -0.5, generator=generator)
        self.fc.weight.mul_(0.1)[:, (STATES - 1) * hidden :] += torch.eye(hidden)
        self.lm_head.weight.copy_(lm_head)
        if norm is not None:
            self.norm.weight.copy_(norm)

    def unrolled(self, embedded: Tensor, states: Tensor, ahead: int) -> list[Tensor]:
        """What drafts that begin at each token read and leave: normed states, for lm_head, of each of their places.

        The first place reads the model's states, the others what the one before left, and the true tokens.

        Args:
            embedded: of tokens ``[windows, length, hidden]``.
            states: that the model left of them ``[windows, length, states x hidden]``.
            ahead: how many places.

        Returns:
            For each place ``[windows, length - ahead, hidden]``; that of token ``i`` at place ``j`` says the token after ``i + 1 + j``.
        """
        count = embedded.shape[1] - ahead
        attention = self.midlayer.self_attn
        each = [norm(part) for norm, part in zip(self.fc_norm, states.chunk(STATES, -1), strict=True)]
        hidden = self.fc(torch.cat(each, -1))[:, :count]
        keys = values = None
        own: list[tuple[Tensor, Tensor]] = []
        found = []
        for place in range(ahead):
            x = torch.cat(
                [
                    self.midlayer.input_layernorm(embedded[:, 1 + place : 1 + place + count]),
                    self.midlayer.hidden_norm(hidden),
                ],
                -1,
            )
            queries, new_keys, new_values = self._projected(x, place)
            if keys is None or values is None:
                keys, values = new_keys, new_values
            else:
                own.append((new_keys, new_values))
            attended = _attended(queries, keys, values, own, attention.size**-0.5)
            hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(-2))
            hidden = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
            hidden = self.norm(hidden)
            found.append(hidden)
        return found

    def _projected(self, x: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[windows, heads, length, size]``, and as many keys and values, at positions from ``first`` on."""
        attention = self.midlayer.self_attn
        parts = [
            linear(x).unflatten(-1, (-1, attention.size)).transpose(1, 2)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        positions = torch.arange(first, first + x.shape[1], device=x.device)[None]
        queries, keys = apply_rotary_pos_emb(*parts[:2], *self._rotary[0].to(x.device)(x, positions))
        group = queries.shape[1] // keys.shape[1]
        return queries, keys.repeat_interleave(group, 1), parts[2].repeat_interleave(group, 1)


def _attended(queries: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """Each query's sum over what was before its draft and over its draft's own keys."""
    if not own:
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
    count = keys.shape[2]
    causal = torch.ones(count, count, dtype=torch.bool, device=keys.device).tril()
    scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(~causal, -math.inf)
    more = [(queries * key).sum(-1, keepdim=True) * scale for key, _ in own]
    shares = torch.cat([scores, *more], -1).softmax(-1)
    attended = shares[..., :count] @ values
    for i, (_, value) in enumerate(own):
        attended = attended + shares[..., count + i, None] * value
    return attended
