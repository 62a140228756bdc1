"""A draft head of EAGLE-3 in plain torch and transformers' parts: what the engine's is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn: Any = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * hidden, outputs, bias=False))
        self.mlp = LlamaMLP(config)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(hidden, config.rms_norm_eps) for _ in range(3)
        )


class ReferenceHead(nn.Module):
    """A head with random weights.

    Args:
        model: that it drafts for.
        vocabulary: of its lm_head; the model's tokens from the last one down, if it has fewer.
        after: after how many of the model's layers its states are taken.
        norms_first: whether the layer's outputs are added to the normed states.
        norms_all: whether all states together are normed before they are fused.
        norms_each: whether each is; with the next, EAGLE-3.1.
        norms_outputs: whether drafts go on with normed states.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: int | None = None,
        after: tuple[int, ...] = (1, 2, 3),
        *,
        norms_first: bool = False,
        norms_all: bool = False,
        norms_each: bool = False,
        norms_outputs: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        of: Any = model.config
        whole = of.vocab_size
        self.after, self.norms_first, self.model = after, norms_first, [model.float()]  # in a list: no part of it
        self.config = LlamaConfig(
            hidden_size=of.hidden_size,
            intermediate_size=96,
            num_hidden_layers=1,
            vocab_size=whole,
            max_position_embeddings=64,  # which is no limit
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=False,
            **HEADS,
        )
        self.config._attn_implementation = "eager"
        size = vocabulary or whole
        self.norms_outputs = norms_outputs
        self.midlayer = _Layer(self.config)
        eps = self.config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(3 * of.hidden_size, eps) if norms_all else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(of.hidden_size, eps) for _ in range(3)) if norms_each else None
        self.fc = nn.Linear(3 * of.hidden_size, of.hidden_size, bias=False)
        self.norm = LlamaRMSNorm(of.hidden_size, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(of.hidden_size, size, bias=False)
        targets = torch.arange(whole - size, whole)
        self.register_buffer("d2t", targets - torch.arange(size))
        self.register_buffer("t2d", torch.arange(whole) >= whole - size)
        self._rotary = LlamaRotaryEmbedding(self.config)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)

    def save(self, directory: Path, dtype: torch.dtype = torch.float32, *, speculators: bool = False) -> Path:
        """Write it as the authors of EAGLE-3 do, or as the library speculators does."""
        directory.mkdir(parents=True)
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.state_dict().items()
            if not name.startswith("_rotary")
        }
        layer = self.config.to_diff_dict() | {"rope_theta": 5000.0}
        size = self.lm_head.out_features
        norms = {
            "norm_before_residual": self.norms_first,
            "norm_before_fc": self.input_norm is not None,
            "fc_norm": self.fc_norm is not None,
            "norm_output": self.norms_outputs,
        }
        if speculators:
            tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
            tensors["embed_tokens.weight"] = self._table.to(dtype)
            data = {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
                "draft_vocab_size": size,
                **norms,
                "eagle_aux_hidden_state_layer_ids": list(self.after),
                "transformer_layer_config": layer,
            }
        else:
            # As published heads have it: the layers that leave the states, not how many come before.
            leaving = [count - 1 for count in self.after]
            data = layer | {
                "architectures": ["LlamaForCausalLMEagle3"],
                "draft_vocab_size": size,
                **norms,
                "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": leaving},
            }
        (directory / "config.json").write_text(json.dumps(data))
        save_file(tensors, directory / "model.safetensors")
        return directory

    @property
    def _table(self) -> Tensor:
        return self.model[0].get_input_embeddings().weight.detach()

    @torch.no_grad()
    def logits(self, tokens: list[int], known: int) -> Tensor:
        """Logits over the model's vocabulary of what comes after tokens, of which the model has computed only the first ones.

        Args:
            tokens: of which those from ``known`` on are draft tokens.
            known: how many are not; the model has computed all of these but the last.
        """
        found = self._states_between(tokens[: known - 1])
        if self.fc_norm is not None:
            found = [norm(each) for norm, each in zip(self.fc_norm, found, strict=True)]
        joined = torch.cat(found, -1)
        states = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        while True:
            outputs = self._through(torch.tensor(tokens[1 : len(states) + 1]), states)
            if len(states) == len(tokens) - 1:
                break
            states = torch.cat([states, self.norm(outputs[-1:]) if self.norms_outputs else outputs[-1:]])
        whole = torch.full((self.config.vocab_size,), float("-inf"))
        whole[self.t2d] = self.lm_head(self.norm(outputs[-1]))
        return whole

    def _states_between(self, tokens: list[int]) -> list[Tensor]:
        kept: dict[int, Tensor] = {}
        model: Any = self.model[0]
        layers = model.model.layers
        hooks = [
            each.register_forward_hook(
                lambda _, __, out, i=i: kept.__setitem__(i + 1, out[0] if isinstance(out, tuple) else out)
            )
            for i, each in enumerate(layers)
        ]
        hooks.append(layers[0].register_forward_pre_hook(lambda _, given: kept.__setitem__(0, given[0])))
        model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return [kept[count].view(len(tokens), -1) for count in self.after]

    def _through(self, tokens: Tensor, states: Tensor) -> Tensor:
        """The layer's outputs, each of which sees those before it."""
        layer, count = self.midlayer, len(tokens)
        normed = layer.hidden_norm(states)
        x = torch.cat([layer.input_layernorm(self._table[tokens]), normed], -1)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        rotary = self._rotary(x, torch.arange(count)[None])
        x = layer.self_attn(x, position_embeddings=rotary, attention_mask=mask)[0]
        x = (normed if self.norms_first else states) + x[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))
