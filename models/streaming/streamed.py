"""Running a model of any size block by block, with one block's weights in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from ...system.progress import Progress
from ...system.storage.activation_store import ActivationStore
from ..checkpoint.weights import Weights
from ..structure.block_calls import (
    BlockCall,
    NoHead,
    block_calls,
    buffers_on,
    head_replaced,
    holding,
    outer_parameters,
    stubbed,
)
from ..structure.skeleton import Skeleton

_HEAD_SLICE = 8192
# Positions whose logits are computed at once.
LOGIT_TOKENS = 512


class Changes(Protocol):
    """Changes to a streamed model's computation beyond its weights, such as rounded inputs."""

    def to_block(self, prefix: str, block: nn.Module) -> AbstractContextManager[object]:
        """Change a block whose weights are loaded, until the context ends; ``prefix`` begins the names of its modules."""
        ...

    def to_call(self, index: int, call: BlockCall) -> BlockCall:
        """Change the arguments with which the model calls a block."""
        ...

    def to_head(self, name: str, head: nn.Module) -> None:
        """Change the output head, which is discarded after use."""
        ...


class StreamedModel:
    """A skeleton and the weights to fill it with, a part at a time.

    Args:
        skeleton: the model's modules.
        weights: its tensors by checkpoint name.
        dtype: what everything is computed in.
        spill: a directory for activations that are too large for memory.
        changes: changes to the computation of blocks and lm_head beyond their weights; none by default.
        device: where it computes; the CPU by default.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        weights: Weights,
        dtype: torch.dtype,
        spill: Path,
        changes: Changes | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.skeleton = skeleton
        self._changes = changes
        self.weights = weights
        self.dtype = dtype
        self.names = skeleton.checkpoint_names(weights)
        self._spill = spill
        self._calls: dict[tuple[int, int], list[BlockCall]] = {}

    def __len__(self) -> int:
        return len(self.skeleton.blocks)

    @contextmanager
    def block(
        self, index: int, dtype: torch.dtype | None = None, lent: Mapping[str, Tensor] | None = None
    ) -> Iterator[nn.Module]:
        """A block with its weights loaded. They are dropped when the context ends.

        Args:
            index: which.
            dtype: the dtype to load its weights in; the model's compute dtype by default.
            lent: weights that are already loaded, by full name of their modules.
        """
        prefix, at_hand = f"{self.skeleton.blocks_name}.{index}.", lent or {}
        tensors: dict[str, Tensor] = {}
        for name in self.names:
            if name.startswith(prefix):
                found = at_hand.get(name.removesuffix(".weight"))
                tensors[name] = self._load(name, dtype) if found is None else found.detach().to(dtype or self.dtype)
        block = self.skeleton.blocks[index]
        with torch.no_grad(), ExitStack() as held:
            held.enter_context(buffers_on(self.skeleton.model, self.device))
            held.enter_context(holding(self.skeleton.model, tensors))
            if self._changes is not None:
                held.enter_context(self._changes.to_block(prefix, block))
            yield block

    def call(self, index: int, hidden: Tensor) -> BlockCall:
        """How the model calls block ``index`` for hidden states of this shape."""
        shape = (hidden.shape[0], hidden.shape[1])
        if shape not in self._calls:
            self._calls[shape] = block_calls(self.skeleton, *shape, self.dtype, self.device)
        call = self._calls[shape][index]
        return call if self._changes is None else self._changes.to_call(index, call)

    def embed(self, tokens: Tensor, table: Tensor | None = None) -> ActivationStore:
        """The first block's inputs for token ids ``[windows, length]``, looked up in ``table`` if given."""
        name = f"{self.skeleton.embedding_name}.weight"
        # Kept in its stored dtype: it can be the largest tensor of all.
        table = self._read(self.names[name]) if table is None else table.to(self.device)
        width = self.skeleton.hidden_size
        shape = (tokens.shape[0], tokens.shape[1], width)
        store = ActivationStore(shape, self.dtype, self._spill, self.device)
        embedding = self.skeleton.model.get_submodule(self.skeleton.embedding_name)
        cast = embedding.register_forward_hook(lambda _, args, out: out.to(self.dtype))
        outer = {n: self._load(n) for n in outer_parameters(self.skeleton)}
        first: list[Tensor] = []
        try:
            with (
                torch.no_grad(),
                buffers_on(self.skeleton.model, self.device),
                holding(self.skeleton.model, {**outer, name: table}),
                head_replaced(self.skeleton, NoHead(self.dtype)),
            ):
                for batch in store.batches():
                    first.clear()
                    with stubbed(self.skeleton, lambda hidden: first.append(hidden) or hidden):  # type: ignore[func-returns-value]
                        self.skeleton.model(input_ids=tokens[batch].to(self.device), use_cache=False)
                    store.write(batch, first[0])
        finally:
            cast.remove()
        return store

    def run_block(
        self, index: int, block: nn.Module, store: ActivationStore, into: ActivationStore | None = None
    ) -> None:
        """Replace the activations in ``store`` by the outputs of ``block``, or write these into another store."""
        for batch in store.batches():
            hidden = store.read(batch)
            (into or store).write(batch, self.call(index, hidden).run(block, hidden))

    def final_hidden(self, tokens: Tensor, progress: Progress, description: str) -> ActivationStore:
        """Hidden states after the last block, for token ids ``[windows, length]``."""
        with ExitStack() as on_error:
            store = self.embed(tokens)
            on_error.callback(store.close)
            for index in progress.track(range(len(self)), description, len(self)):
                with self.block(index) as block:
                    self.run_block(index, block, store)
            on_error.pop_all()
        return store

    def head(self) -> HeadFunction:
        """The part after the blocks, as a function from hidden states ``[windows, length, width]`` to logits."""
        name = self.skeleton.head_name
        source = self.skeleton.embedding_name if self.skeleton.tied else name
        weight = self._read(self.names[f"{source}.weight"])
        bias = self._load(f"{name}.bias") if f"{name}.bias" in self.names else None
        head = SlicedHead(weight, bias, self.dtype)
        if self._changes is not None:
            self._changes.to_head(name, head)
        outer = {n: self._load(n) for n in outer_parameters(self.skeleton)}
        return HeadFunction(self.skeleton, head, outer)

    def _load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._read(self.names[name])
        return tensor.to(dtype or self.dtype) if tensor.is_floating_point() else tensor

    def _read(self, key: str) -> Tensor:
        with torch.device("cpu"):  # a rotated weight is edited as it is read
            return self.weights.load(key).to(self.device)


class HeadFunction:
    """Applies a model's final norm and output head, through the model's own forward code.

    Attributes:
        module: the head itself, to hang hooks on.
    """

    def __init__(self, skeleton: Skeleton, module: SlicedHead, outer: dict[str, Tensor]) -> None:
        self.module = module
        self._skeleton = skeleton
        self._outer = outer

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states that left the last block."""
        return self.traced(hidden)

    def traced(self, hidden: Tensor) -> Tensor:
        """The same, with autograd enabled."""
        model = self._skeleton.model
        embedded = hidden.new_zeros(*hidden.shape[:2], self._skeleton.embedding_width)
        # Two models may share one skeleton, so the head is there for the call only.
        with (
            buffers_on(model, hidden.device),
            holding(model, dict(self._outer)),
            head_replaced(self._skeleton, self.module),
            stubbed(self._skeleton, lambda _: hidden),
        ):
            return model(inputs_embeds=embedded, use_cache=False).logits


class SlicedHead(nn.Module):
    """An lm_head whose weight keeps its stored dtype and is widened one slice at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self._dtype = dtype

    def forward(self, hidden: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        logits = torch.empty(*hidden.shape[:-1], rows, dtype=self._dtype, device=hidden.device)
        for start in range(0, rows, _HEAD_SLICE):
            part = self.weight[start : start + _HEAD_SLICE].to(self._dtype)
            logits[..., start : start + part.shape[0]] = hidden @ part.T
        return logits if self.bias is None else logits + self.bias
