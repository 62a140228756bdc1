"""Running a model's own forward code around its blocks, with stand-ins where the blocks are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...system.errors import SmeltError, first_line
from .skeleton import Skeleton


@dataclass(frozen=True)
class BlockCall:
    """How a model calls one of its blocks, apart from the hidden states.

    Attributes:
        args: positional arguments after the hidden states.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Call ``block`` as the model would. Older architectures return a tuple; the first is the hidden states."""
        output = block(hidden, *self.args, **self.kwargs)
        return output[0] if isinstance(output, tuple) else output

    def map(self, change: Callable[[Tensor], Tensor]) -> BlockCall:
        """The same call with every tensor argument changed."""

        def walk(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, (tuple, list)):
                return type(value)(walk(item) for item in value)
            if isinstance(value, dict):
                return {key: walk(item) for key, item in value.items()}
            return value

        return BlockCall(walk(self.args), walk(self.kwargs))


class _Stub(nn.Module):
    """Stands in for a block: records how it was called and returns hidden states chosen by the caller."""

    def __init__(self, block: nn.Module, answer: Callable[[Tensor], Tensor], in_tuple: bool) -> None:
        super().__init__()
        self._tuple = in_tuple
        self.__dict__["_block"] = block
        self._answer = answer
        self.call: BlockCall | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Models read fields of their blocks, such as attention_type, to choose a mask.
            return getattr(self.__dict__["_block"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.call = BlockCall(args, kwargs)
        answer = self._answer(hidden_states)
        return (answer, None) if self._tuple else answer


@contextmanager
def stubbed(skeleton: Skeleton, answer: Callable[[Tensor], Tensor]) -> Iterator[list[_Stub]]:
    """Put stand-ins in place of all blocks."""
    blocks = skeleton.blocks
    originals = list(blocks)
    stubs = [_Stub(block, answer, skeleton.blocks_return_tuples) for block in originals]
    try:
        for i, stub in enumerate(stubs):
            blocks[i] = stub
        yield stubs
    finally:
        for i, block in enumerate(originals):
            blocks[i] = block


def outer_parameters(skeleton: Skeleton) -> dict[str, Tensor]:
    """Parameters outside the blocks, without the embedding and the head: norms, position tables, projections."""
    inside = skeleton.blocks_name + "."
    apart = (skeleton.embedding_name + ".", skeleton.head_name + ".")
    return {n: p for n, p in skeleton.parameters().items() if not n.startswith(inside) and not n.startswith(apart)}


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put ``tensor`` where the parameter or buffer ``name`` is."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


@contextmanager
def holding(model: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Hold ``tensors`` in the model (the dict is emptied); afterwards the places are on the meta device again."""
    places: dict[str, Tensor] = {}
    try:
        for name, tensor in tensors.items():
            set_tensor(model, name, tensor)
        places = {name: tensor.to("meta") for name, tensor in tensors.items()}
        tensors.clear()  # the model holds the only reference now, so replacing a weight frees the old one
        yield
    finally:
        for name, place in places.items():
            set_tensor(model, name, place)


class NoHead(nn.Identity):
    """Stands in for the output head: logits are the hidden states. Some models look at their head's weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)


@contextmanager
def head_replaced(skeleton: Skeleton, module: nn.Module) -> Iterator[None]:
    """Put ``module`` in place of the output head."""
    original = skeleton.model.get_submodule(skeleton.head_name)
    try:
        skeleton.model.set_submodule(skeleton.head_name, module)
        yield
    finally:
        skeleton.model.set_submodule(skeleton.head_name, original)


@contextmanager
def buffers_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move a model's computed buffers, such as rotary frequencies, to a device temporarily."""
    moved: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device not in (device, torch.device("meta")):
                    moved.append((module, name, buffer))
                    module._buffers[name] = buffer.to(device)
        yield
    finally:
        for module, name, buffer in moved:
            module._buffers[name] = buffer


def block_calls(
    skeleton: Skeleton, batch: int, length: int, dtype: torch.dtype, device: torch.device | None = None
) -> list[BlockCall]:
    """How the model calls each of its blocks for inputs of this shape. No weights are needed."""
    device = device or torch.device("cpu")
    outer = {n: torch.zeros(p.shape, dtype=dtype, device=device) for n, p in outer_parameters(skeleton).items()}
    embedded = torch.zeros(batch, length, skeleton.embedding_width, dtype=dtype, device=device)
    with (
        torch.no_grad(),
        buffers_on(skeleton.model, device),
        holding(skeleton.model, outer),
        head_replaced(skeleton, NoHead(dtype)),
        stubbed(skeleton, lambda h: h) as stubs,
    ):
        try:
            skeleton.model(inputs_embeds=embedded, use_cache=False)
        except Exception as error:  # models raise various errors when a block returns something unexpected
            if not skeleton.blocks_return_tuples:
                skeleton.blocks_return_tuples = True
                return block_calls(skeleton, batch, length, dtype, device)
            raise SmeltError(
                f"{type(skeleton.model).__name__}: Smelt cannot run it without its blocks ({first_line(error)}); this architecture is"
                " not supported"
            ) from None
    calls = [stub.call for stub in stubs if stub.call is not None]
    if len(calls) != len(stubs):
        raise SmeltError(
            f"{type(skeleton.model).__name__}: does not call all of its blocks; this architecture is not supported"
        )
    return calls
