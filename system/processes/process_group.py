"""Several processes that calibrate and train together, each on its share of the windows.

``accelerate launch`` or ``torchrun`` starts them. All go through the blocks in step: each passes its own windows, and
their statistics are summed. What must be decided once (rounding, above all) the first process decides and broadcasts.
It alone writes to the output and measures the result.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..errors import SmeltError
from ..hardware.device import device_named
from ..storage.activation_store import ActivationStore, windows_a_batch

# Tensors, and plain data that JSON can hold.
Message = tuple[dict[str, Tensor], Any]

_DATA = "data as JSON"
# The others wait while the first rounds and evaluates, which may take days.
_PATIENCE = timedelta(days=30)
_MEETING = timedelta(minutes=10)
# What is said when a process has gone; other errors are about something else.
_GONE = re.compile(r"/gloo/|ncclRemoteError|[Cc]onnection (closed|reset|refused)|Broken pipe|recvValue failed")
# Default groups of this process so far: all processes count alike.
_groups = itertools.count()


class Processes:
    """This process and those beside it; by itself, a process that is alone.

    Args:
        device: where it computes; the CPU by default.
        rank: its number.
        count: how many there are.
        here: how many of them run on this machine.
    """

    def __init__(self, device: torch.device | None = None, rank: int = 0, count: int = 1, here: int = 1) -> None:
        self.device = device or torch.device("cpu")
        self.rank, self.count, self.here = rank, count, here

    @classmethod
    def launched(cls, device: str) -> Processes:
        """Those that a launcher has started together, or this one alone.

        Args:
            device: ``cpu`` or ``cuda``; of several processes each takes a GPU of its own.
        """
        if _launched() == 1:
            return cls(torch.device(device))
        meeting_place()  # which says what the environment lacks
        return _Together(device_named(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device))

    @property
    def is_main(self) -> bool:
        """Whether this is the first one, which writes, evaluates and talks."""
        return self.rank == 0

    def share(self, tokens: Tensor) -> Tensor:
        """This process's windows: whole batches, so that each is computed as one process would compute it."""
        size = windows_a_batch(tokens.shape[1])
        batches = -(-len(tokens) // size)
        start, stop = (size * (batches * i // self.count) for i in (self.rank, self.rank + 1))
        return tokens[start:stop]

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum over all processes."""

    def all_gather(self, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """What all processes gave, in their order."""
        return [tensors]

    def broadcast(self, make: Callable[[], Message]) -> Message:
        """What the first process makes, in every process."""
        return make()

    def in_main(self, do: Callable[[], None]) -> None:
        """Let the first process do something while the others wait; if it fails, all do."""

        def done() -> Message:
            do()
            return {}, None

        self.broadcast(done)

    def edited(self, edit: Callable[[], None], tensors: Iterable[Tensor]) -> None:
        """Let the first process edit tensors in place; the others' become the same."""
        edit()

    @contextmanager
    def collected(self, store: ActivationStore) -> Iterator[ActivationStore]:
        """The activations of all processes' windows, for the first; the others get none."""
        yield store

    @contextmanager
    def default_group(self) -> Iterator[None]:
        """Within it, torch's default group is these processes: FSDP works in no other."""
        yield

    def wait(self) -> None:
        """Go on when the first process has come here, too."""
        self.broadcast(lambda: ({}, None))

    def agree(self, what: str, value: str) -> None:
        """See to it that all processes have the same value.

        Raises:
            SmeltError: one has another; ``what`` says of what.
        """


class _Together(Processes):
    """One of several processes that talk through groups of their own.

    torch's default group, which accelerate would set up, stays away: whatever else looks for one (compressed-tensors as
    it loads a checkpoint) would wait for all processes to do the same, and only the first evaluates.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, int(os.environ["RANK"]), _launched(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if device.type == "cuda":
            torch.cuda.set_device(device)  # where FSDP and Triton look, too
        with _peer_errors():
            for kind in dict.fromkeys(("cpu", device.type)):
                _group(kind)

    def sum_(self, tensor: Tensor) -> None:
        with _peer_errors():
            _group(self.device.type).allreduce([tensor]).wait()

    def all_gather(self, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return [self._broadcast_message(rank, (tensors, None))[0] for rank in range(self.count)]

    def broadcast(self, make: Callable[[], Message]) -> Message:
        if not self.is_main:
            return self._broadcast_message(0, ({}, None))
        try:
            message = make()
        except Exception as error:
            with suppress(SmeltError):  # no other process may be left
                self._broadcast_message(0, ({}, None), failed=str(error) or type(error).__name__)
            raise
        return self._broadcast_message(0, message)

    def edited(self, edit: Callable[[], None], tensors: Iterable[Tensor]) -> None:
        if self.is_main:
            edit()
        for tensor in tensors:
            tensor.copy_(self._broadcast(tensor.contiguous(), 0))

    @contextmanager
    def collected(self, store: ActivationStore) -> Iterator[ActivationStore]:
        counts = [int(found["windows"]) for found in self.all_gather({"windows": torch.tensor(store.shape[0])})]
        whole = store.beside(store.shape[2], sum(counts) if self.is_main else 0)
        size, start = windows_a_batch(store.shape[1]), 0
        try:
            for rank, count in enumerate(counts):
                for first in range(0, count, size):
                    batch = slice(first, min(first + size, count))
                    mine = {"hidden": store.read(batch)} if rank == self.rank else {}
                    hidden = self._broadcast_message(rank, (mine, None))[0]["hidden"]
                    if self.is_main:
                        whole.write(slice(start + batch.start, start + batch.stop), hidden)
                start += count
            yield whole
        finally:
            whole.close()

    @contextmanager
    def default_group(self) -> Iterator[None]:
        with _peer_errors():
            distributed.init_process_group(
                "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=PrefixStore(f"smelt default group {next(_groups)}", meeting_place()),
                rank=self.rank,
                world_size=self.count,
                timeout=_PATIENCE,
            )
        try:
            with _peer_errors(of_all=False):
                yield
        finally:
            distributed.destroy_process_group()

    def agree(self, what: str, value: str) -> None:
        values = self.all_gather({"value": _bytes(value.encode())})
        for rank, found in enumerate(values):
            if not torch.equal(found["value"], values[0]["value"]):
                raise SmeltError(
                    f"process {rank} has {what} other than process 0's; start all with the same command and libraries"
                    " and access to the same files"
                )

    def _broadcast_message(self, rank: int, message: Message, failed: str | None = None) -> Message:
        """One process's message, in every process; what the others pass is ignored.

        Raises:
            SmeltError: that process failed; the message is its error's.
        """
        from safetensors.torch import load, save

        packed = torch.empty(0, dtype=torch.uint8, device="cpu")
        if rank == self.rank:
            tensors, data = message
            # A copy of each: tensors that share memory would be refused.
            copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            packed = _bytes(save(copies | {_DATA: _bytes(json.dumps([data, failed]).encode())}))
        size = int(self._broadcast(torch.tensor(len(packed), device="cpu"), rank))
        if rank == self.rank:
            self._broadcast(packed, rank)
            return message
        found = load(self._broadcast(packed.new_empty(size), rank).numpy().tobytes())
        data, failed = json.loads(found.pop(_DATA).numpy().tobytes())
        if failed is not None:
            raise SmeltError(failed)
        return {name: tensor.to(self.device) for name, tensor in found.items()}, data

    def _broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        options = distributed.BroadcastOptions()
        options.rootRank = rank
        here = tensor.cpu()
        with _peer_errors():
            _group("cpu").broadcast([here], options).wait()
        return here


def is_first() -> bool:
    """Whether this is the first of the processes that a launcher has started, or alone."""
    return _launched() == 1 or int(os.environ.get("RANK", "0")) == 0


def first_to_fail() -> bool:
    """Whether this process is the first to end with an error, and so the one to say why; the others only follow."""
    if _launched() == 1 or not meeting_place.cache_info().currsize:
        return True
    try:
        return meeting_place().add("smelt: ended", 1) == 1
    except RuntimeError:  # nobody is left who could have said it
        return True


def _launched() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@cache
def meeting_place() -> Store:
    """Where the processes that a launcher has started find each other.

    Raises:
        SmeltError: the environment does not say where, or not all have come.
    """
    try:
        store = next(rendezvous("env://", timeout=_MEETING))[0]
    except (ValueError, RuntimeError) as error:  # torch names what is missing, or whom it waited for
        raise SmeltError(
            f"WORLD_SIZE is {_launched()}, so this is one of several processes, but they could not connect ({error}); start"
            " all with torchrun or accelerate launch, or unset WORLD_SIZE"
        ) from error
    store.set_timeout(_PATIENCE)
    return store


@cache
def _group(device: str) -> Any:
    """Processes meet once; those that run several recipes go on with the same group."""
    store = PrefixStore(f"smelt on {device}", meeting_place())
    if device == "cpu":
        return distributed.ProcessGroupGloo(store, int(os.environ["RANK"]), _launched(), _PATIENCE)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _PATIENCE
    return distributed.ProcessGroupNCCL(store, int(os.environ["RANK"]), _launched(), options)


# gloo's threads drop tensors some time after these have come, for which they need Python: if that is about to end, it ends the thread, and C++ the process.
atexit.register(_group.cache_clear)


@contextmanager
def _peer_errors(*, of_all: bool = True) -> Iterator[None]:
    """Turn torch's error about a process that is gone into a sentence.

    Args:
        of_all: whether only communication happens within, so that any error is of that kind.
    """
    try:
        yield
    except RuntimeError as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        if not of_all and not isinstance(error, distributed.DistError) and not _GONE.search(said):
            raise
        raise SmeltError(
            "another process of this run ended without an error, perhaps killed for lack of memory; the same command"
            f" continues where this one stopped (torch says: {said})"
        ) from error


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
