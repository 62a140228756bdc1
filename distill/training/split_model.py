"""A causal LM in two halves: one computes hidden states, the other logits for a few positions at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPast


class SplitModel:
    """Runs a transformers model's own code in two halves.

    Nothing is copied or changed: the second half is the model's forward function with its decoder and lm_head replaced
    during the call, so its changes to logits (soft caps, factors) are applied.

    Args:
        model: any causal LM of transformers.

    Raises:
        ValueError: its decoder cannot be found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._body_name = str(getattr(model, "base_model_prefix", ""))
        if not self._body_name or self._body_name not in model._modules:
            raise ValueError(f"{type(model).__name__} has no decoder separate from its lm_head")
        self.body: Any = model._modules[self._body_name]
        head = model.get_output_embeddings()  # type: ignore[operator]
        path = next(name for name, module in model.named_modules() if module is head)
        self._head_home, self._head_name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]

    @property
    def head(self) -> Any:
        """The lm_head, a linear."""
        return self._head_home._modules[self._head_name]

    def hidden(self, tokens: Tensor) -> Tensor:
        """The inputs of lm_head, ``[windows, length, width]``, for token ids ``[windows, length]``."""
        hidden = self.body(input_ids=tokens, use_cache=False).last_hidden_state
        for hook in self.head._forward_pre_hooks.values():  # such as rounding lm_head's inputs
            changed = hook(self.head, (hidden,))
            hidden = hidden if changed is None else changed[0] if isinstance(changed, tuple) else changed
        return hidden

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of ``hidden [windows, length, width]`` with this lm_head weight instead of the model's."""
        with self._exchanged(_Given(hidden, self.body), _Head(weight, bias)):
            return self.model(inputs_embeds=hidden, use_cache=False).logits

    @contextmanager
    def _exchanged(self, body: nn.Module, head: nn.Module) -> Iterator[None]:
        own = self.head
        self.model._modules[self._body_name] = body
        self._head_home._modules[self._head_name] = head
        try:
            yield
        finally:
            self.model._modules[self._body_name] = self.body
            self._head_home._modules[self._head_name] = own


class _Given(nn.Module):
    """Stands in for a decoder that has already run."""

    def __init__(self, hidden: Tensor, body: nn.Module) -> None:
        super().__init__()
        self._hidden = hidden
        self.__dict__["_body"] = body

    def __getattr__(self, name: str) -> Any:
        # OPT's forward calls its decoder's decoder.
        body = self.__dict__["_body"]
        return self if name in body._modules else getattr(body, name)

    def forward(self, *_args: Any, **_kwargs: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=self._hidden)  # type: ignore[arg-type]


class _Output(BaseModelOutputWithPast):
    """The output of a decoder, without extras of some (router logits, cross attentions)."""

    def __getattr__(self, _name: str) -> None:
        return None


class _Head(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias)
