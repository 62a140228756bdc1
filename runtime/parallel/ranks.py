"""The processes that compute a model together: how they divide it, and what they tell each other."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...system.errors import RuntimeProblem
from .shared_memory import Others, SharedMemory

# Those that wait for the next step may wait for days.
_PATIENCE = timedelta(days=30)
_CONNECTING = 300.0
_LOOPBACK = "127.0.0.1"


class RankLost(RuntimeProblem):
    """Another process has ended."""


class Ranks:
    """This process and those beside it; by itself, one that computes the whole model alone.

    Attributes:
        rank: its number.
        count: how many there are.
    """

    rank = 0
    count = 1

    def bounds(self, total: int, unit: int = 1) -> list[int]:
        """Where each rank's part of some outputs begins, and where the last one's ends; parts differ by at most a unit.

        Raises:
            RuntimeProblem: there are fewer units than ranks.
        """
        units = -(-total // unit)
        if units < self.count:
            raise RuntimeProblem(
                f"{total} outputs that are stored in units of {unit} cannot be divided between {self.count} ranks; use fewer ranks"
            )
        return [*(unit * (units * rank // self.count) for rank in range(self.count)), total]

    def part(self, total: int, unit: int = 1) -> range:
        """This rank's part of some outputs."""
        begins = self.bounds(total, unit)
        return range(begins[self.rank], begins[self.rank + 1])

    def heads(self, queries: int, shared: int, rank: int | None = None) -> tuple[range, range]:
        """A rank's query heads, and its key-value heads; more ranks than these have copies of them.

        Args:
            queries: query heads.
            shared: key-value heads.
            rank: whose; this one's if None.

        Raises:
            RuntimeProblem: they cannot be divided.
        """
        rank = self.rank if rank is None else rank
        each = queries // shared
        if self.count <= shared:
            begins = self.bounds(shared)
            mine = range(begins[rank], begins[rank + 1])
            return range(mine.start * each, mine.stop * each), mine
        copies, left = divmod(self.count, shared)
        if left or each % copies:
            raise RuntimeProblem(
                f"{queries} query heads and {shared} key-value heads cannot be divided between {self.count} ranks; use fewer ranks"
            )
        own = each // copies
        return range(rank * own, (rank + 1) * own), range(rank // copies, rank // copies + 1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return tensor

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
        """All ranks' tensors, one after another.

        Args:
            tensor: this rank's.
            sizes: of the dimension in which they differ, by rank.
            dim: this dimension, the last or the first.
        """
        return tensor

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows for each rank, exchanged for those from each.

        Args:
            tensor: rows for the first rank, then for the second, and so on.
            sent: how many are for each rank.
            received: how many come from each.
        """
        return tensor

    def pass_on(self, tensor: Tensor, rows: int) -> Callable[[], Tensor]:
        """Send a tensor to the next rank of the ring, and get one of as many rows from the rank before, meanwhile.

        Args:
            tensor: it must not change until the other is there.
            rows: of the other.

        Returns:
            What waits for it.
        """
        return lambda: tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor; the others pass one of the same shape, which is overwritten."""
        return tensor

    def broadcast_data(self, data: Any) -> Any:
        """What the first rank says, as JSON can hold it."""
        return data

    def gather_data(self, data: Any) -> list[Any]:
        """What each rank says."""
        return [data]

    def agree(self, what: str, value: str) -> None:
        """See to it that all ranks have the same value.

        Raises:
            RuntimeProblem: one has another; ``what`` says of what.
        """
        values = self.gather_data(hashlib.sha256(value.encode()).hexdigest())
        for rank, theirs in enumerate(values):
            if theirs != values[0]:
                raise RuntimeProblem(
                    f"rank {rank} has {what} other than rank 0's; start all with the same command and libraries and access to"
                    " the same files"
                )

    def share_memory(self, kernels: Any) -> bool:
        """Sum through memory that the ranks share, where Smelt has started all of them on one machine. All ranks call it.

        Args:
            kernels: Smelt's compiled CPU kernels; None if there are none here.

        Returns:
            Whether they do, now.
        """
        return False

    def limit(self, seconds: float) -> None:
        """Wait for others no longer than so; without a limit until they have ended."""

    @property
    def is_closed(self) -> bool:
        """Whether the connections were ended."""
        return False

    def close(self) -> None:
        """End the connections, whoever waits for something."""

    def end(self) -> None:
        """Let go of the connections, when all has been said, and wait for the threads of gloo.

        They drop tensors some time after these have come, for which they need Python: if that is about to end, it ends the thread, and C++ the process.
        """


class ConnectedRanks(Ranks):
    """One of several ranks.

    Args:
        store: where they meet.
        rank: its number.
        count: how many there are.
        device: where tensors are that are summed: ``cpu`` (gloo) or ``cuda`` (NCCL).
        here_only: whether all run on this machine, so that none need listen to others.
        others: says which of the others has ended, if this process has started them.

    Raises:
        RuntimeProblem: one of the others has ended before all were connected, or has not connected in time.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        count: int,
        device: str,
        *,
        here_only: bool = False,
        others: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.rank, self.count = rank, count
        self._store, self._device, self._here_only, self._others = store, device, here_only, others
        self._parts: list[ConnectedRanks] = []
        self._patience = _PATIENCE
        self._memory: SharedMemory | None = None
        self._processes: Others | None = None
        self._closing, self._closed = threading.Lock(), False
        self._messages: Any = _gloo(
            PrefixStore("smelt messages", store), rank, count, here_only=here_only, others=others
        )
        self._tensors: Any = self._messages
        if device == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _PATIENCE
            self._tensors = distributed.ProcessGroupNCCL(PrefixStore("smelt tensors", store), rank, count, options)

    @property
    def tensors(self) -> Any:
        """torch's group for what is on the device."""
        return self._open(self._tensors)

    @staticmethod
    def _open(group: Any) -> Any:
        if group is None:
            raise RankLost("the other ranks were stopped")
        return group

    def limit(self, seconds: float) -> None:
        self._patience = timedelta(seconds=min(seconds, _PATIENCE.total_seconds()))
        for part in self._parts:
            part.limit(seconds)

    def wait(self, work: Any) -> None:
        """Wait for what torch's group does; on a GPU its stream waits, and this process goes on."""
        if self._tensors is self._messages:
            work.wait(self._patience)
        else:
            work.wait()

    def part_of(self, name: str, rank: int, count: int) -> ConnectedRanks:
        """Some of the ranks, as this one of them sees them.

        Args:
            name: of their own.
            rank: its number among them.
            count: how many they are.
        """
        store = PrefixStore(name, self._store)
        found = ConnectedRanks(store, rank, count, self._device, here_only=self._here_only, others=self._others)
        self._parts.append(found)
        return found

    def share_memory(self, kernels: Any) -> bool:
        if self._here_only and self._device == "cpu":
            self._processes = Others(self.gather_data(os.getpid()))
            self._memory = SharedMemory.of(self, kernels)
        return self._memory is not None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        if self._memory is not None and self._memory.takes(tensor):
            self._memory.all_reduce(tensor, self._look_for(time.monotonic()))
            return tensor
        with lost():
            self.wait(self.tensors.allreduce([tensor]))
        return tensor

    def _look_for(self, begun: float) -> Callable[[], None]:
        """What ends waiting in shared memory: an end of the connections or of another rank, or too long a time."""

        def look() -> None:
            if self._closed:
                raise RankLost("another rank has ended")
            ended = None if self._processes is None else self._processes.ended()
            if ended is not None:
                raise RankLost(f"rank {ended} has ended, so this one cannot go on")
            if time.monotonic() - begun > self._patience.total_seconds():
                raise RankLost(f"another rank has not answered within {self._patience.total_seconds():g} seconds")

        return look

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
        missing = max(sizes) - tensor.shape[dim]
        # Backends gather parts of one shape.
        added = (0, missing) if dim == -1 else (0, 0) * (tensor.dim() - 1) + (0, missing)
        mine = torch.nn.functional.pad(tensor, added) if missing else tensor.contiguous()
        found = [torch.empty_like(mine) for _ in sizes]
        with lost():
            self.wait(self.tensors.allgather([found], [mine]))
        return torch.cat([each.narrow(dim, 0, size) for each, size in zip(found, sizes, strict=True)], dim=dim)

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        found = tensor.new_empty(sum(received), *tensor.shape[1:])
        with lost():
            self.wait(self.tensors.alltoall_base(found, tensor.contiguous(), list(received), list(sent)))
        return found

    def pass_on(self, tensor: Tensor, rows: int) -> Callable[[], Tensor]:
        found, group = tensor.new_empty(rows, *tensor.shape[1:]), self.tensors
        after, before = (self.rank + 1) % self.count, (self.rank - 1) % self.count
        with lost():
            if self._device == "cuda":  # NCCL needs to know of both at once
                group._start_coalescing()
            works = [] if not len(tensor) else [group.send([tensor], after, 0)]
            works += [group.recv([found], before, 0)] if rows else []
            if self._device == "cuda":
                works = [group._end_coalescing()]

        def arrived() -> Tensor:
            with lost():
                for work in works:
                    if work is not None:
                        self.wait(work)
            return found

        return arrived

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self._broadcast(tensor, 0)

    def broadcast_data(self, data: Any) -> Any:
        return self._data_of(0, data)

    def gather_data(self, data: Any) -> list[Any]:
        return [self._data_of(rank, data) for rank in range(self.count)]

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            for part in self._parts:
                part.close()
            for group in {id(each): each for each in (self._tensors, self._messages)}.values():
                group.abort()

    def end(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            for part in self._parts:
                part.end()
            if self._tensors is self._messages:
                self._tensors = None
            self._messages = None

    def _data_of(self, rank: int, data: Any) -> Any:
        raw = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
        size = self._broadcast(torch.tensor([len(raw)]), rank)
        raw = raw if rank == self.rank else torch.empty(int(size), dtype=torch.uint8)
        return json.loads(self._broadcast(raw, rank).numpy().tobytes())

    def _broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        options = distributed.BroadcastOptions()
        options.rootRank = rank
        with lost():
            self._open(self._messages).broadcast([tensor], options).wait(self._patience)
        return tensor


def _gloo(store: Store, rank: int, count: int, *, here_only: bool, others: Callable[[], str | None]) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _PATIENCE  # also of what is sent from one to another
    options._devices = [gloo.create_device(hostname=_LOOPBACK) if here_only else gloo.create_default_device()]
    made: list[Any] = []

    def connect() -> None:
        try:
            made.append(gloo(store, rank, count, options))
        except RuntimeError as error:
            made.append(error)

    # In a thread: while torch connects it hears neither signals nor that another one has ended. Those that a launcher has started may
    # come much later.
    until = time.monotonic() + _CONNECTING if here_only else math.inf
    thread = threading.Thread(target=connect, name="smelt-connect", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        ended = others() if thread.is_alive() else None
        if ended is not None:
            raise RuntimeProblem(f"{ended} while the ranks connected; what it printed says why")
        if time.monotonic() > until:
            raise RuntimeProblem(f"the ranks have not connected within {_CONNECTING:g} seconds; start again")
    if isinstance(made[0], RuntimeError):
        said = next(iter(str(made[0]).splitlines()), "")
        raise RuntimeProblem(f"the ranks could not connect (torch says: {said[:200]})")
    return made[0]


@contextmanager
def lost() -> Iterator[None]:
    """Turn torch's error about a process that is gone into a sentence."""
    try:
        yield
    except RuntimeError as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise RankLost(f"another rank has ended, so this one cannot go on (torch says: {said[:200]})") from None
