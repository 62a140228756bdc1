"""Context parallelism: sequences are divided between ranks, and attention goes around the ring of them.

A block of the cache is as many blocks as there are ranks: each has its part of the positions, of which it computes all
layers and keeps keys and values. The queries of a step visit all ranks, as there are few of them beside the keys of a
long context (a prompt comes in pieces); each rank attends to what it keeps, and the results are merged by the
logarithms of their sums. (Yang et al. 2024, Context Parallelism for Scalable Million-Token Inference: "pass-Q".)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...heads import Heads
from ...parallel.ranks import Ranks
from ..parts.batch import Batch, Run
from ..parts.kv_cache import KeysValues
from ..parts.operators import Rotation, stored_by_torch

# Cache positions that are gathered, and whose scores are in memory, at once.
_KEYS = 2048
# Positions of single tokens' sequences that are padded to the longest of them.
_TOGETHER = 16384
# Which keys are seen is known there, without waiting for a GPU.
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class _Queries:
    """Tokens that attend together.

    Attributes:
        rows: theirs among a rank's tokens, ``[sequences, tokens]``.
        positions: the same of their positions.
        tables: cache blocks of the sequences, ``[sequences, blocks]``, filled up with block 0.
        stops: the position after each sequence's last token of the step.
    """

    rows: Tensor
    positions: Tensor
    tables: Tensor
    stops: Tensor


class ContextBatch(Batch):
    """A rank's tokens of a step: those whose keys and values it keeps.

    Args:
        runs: of all ranks.
        block_size: positions of a block that one rank has.
        ranks: the ring.
    """

    def __init__(self, runs: list[Run], block_size: int, ranks: Ranks) -> None:
        self.runs, self.block_size, self._ranks = runs, block_size, ranks
        self._span = block_size * ranks.count
        # By rank and run.
        self._positions = [[self._of(run, rank) for run in runs] for rank in range(ranks.count)]
        mine = self._positions[ranks.rank]
        own = [position for positions in mine for position in positions]
        self.positions = torch.tensor(own, dtype=torch.int64)
        each = [(run, position) for run, positions in zip(runs, mine, strict=True) for position in positions]
        self.tokens = torch.tensor([run.tokens[position - run.start] for run, position in each], dtype=torch.int64)
        self.slots = torch.tensor(
            [run.blocks[p // self._span] * block_size + p % block_size for run, p in each], dtype=torch.int64
        )
        self.lengths = [(len(positions), run.grows_to) for run, positions in zip(runs, mine, strict=True)]
        wanted = [run.stop - run.wants <= position for run, position in each]
        self.wanted = torch.tensor([row for row, wants in enumerate(wanted) if wants], dtype=torch.int64)

    def _of(self, run: Run, rank: int) -> list[int]:
        """The positions of a run that a rank has."""
        first = rank * self.block_size
        return [p for p in range(run.start, run.stop) if first <= p % self._span < first + self.block_size]

    @property
    def also(self) -> None:  # type: ignore[override]
        """None: nothing branches off where sequences are divided."""
        return None

    @property
    def adapted(self) -> dict[str, Tensor]:  # type: ignore[override]
        """None: adapters are not applied on several ranks."""
        return {}

    @cached_property
    def undivided(self) -> Batch:
        """The tokens of all ranks, in blocks as if one had them."""
        return Batch(self.runs, self._span)

    @cached_property
    def counts(self) -> list[int]:
        """How many tokens each rank has."""
        return [sum(map(len, by_run)) for by_run in self._positions]

    @cached_property
    def queries(self) -> list[list[_Queries]]:
        """What attends together of each rank's tokens."""
        return [list(self._together(by_run)) for by_run in self._positions]

    def _together(self, by_run: list[list[int]]) -> Iterator[_Queries]:
        begin, alone = 0, list[tuple[int, int, Run]]()
        for run, positions in zip(self.runs, by_run, strict=True):
            if len(positions) == 1:
                alone.append((begin, positions[0], run))
            elif positions:
                rows = torch.arange(begin, begin + len(positions), device=_HOST)
                yield _Queries(rows[None], _numbers([positions]), _numbers([self._blocks(run)]), _numbers([run.stop]))
            begin += len(positions)
        alone.sort(key=lambda each: each[2].stop)
        while alone:
            # Shorter sequences first; each group is padded to its longest.
            count = 1
            while count < len(alone) and (count + 1) * alone[count][2].stop <= _TOGETHER * self._ranks.count:
                count += 1
            group, alone = alone[:count], alone[count:]
            tables = [self._blocks(run) for _, _, run in group]
            longest = max(map(len, tables))
            yield _Queries(
                _numbers([[row] for row, _, _ in group]),
                _numbers([[position] for _, position, _ in group]),
                _numbers([table + [0] * (longest - len(table)) for table in tables]),
                _numbers([run.stop for _, _, run in group]),
            )

    def _blocks(self, run: Run) -> list[int]:
        return run.blocks[: -(-run.stop // self._span)]

    def key_positions(self, begin: int, end: int) -> Tensor:
        """The positions of the keys that this rank keeps in some of a sequence's blocks."""
        first = torch.arange(begin, end, device=_HOST).unsqueeze(1) * self._span + self._ranks.rank * self.block_size
        return (first + torch.arange(self.block_size, device=_HOST)).flatten()

    def all_wanted(self, rows: Tensor) -> Tensor:
        """Of each rank's rows, one for each wanted token, those of all, in the order of the runs."""
        return self._joined(rows, [run.stop - run.wants for run in self.runs])

    def all_tokens(self, rows: Tensor) -> Tensor:
        """Of each rank's rows, one for each of its tokens, those of all, in the order of the runs."""
        return self._joined(rows, [0] * len(self.runs))

    def _joined(self, rows: Tensor, begins: list[int]) -> Tensor:
        places = [
            [(i, p) for i, positions in enumerate(by_run) for p in positions if p >= begins[i]]
            for by_run in self._positions
        ]
        if not any(places):
            return rows
        found = self._ranks.all_gather(rows, [len(each) for each in places], dim=0)
        together = [place for each in places for place in each]
        order = sorted(range(len(together)), key=together.__getitem__)
        return found[torch.tensor(order, device=found.device)]


def _numbers(values: Any) -> Tensor:
    return torch.tensor(values, device=_HOST)


class ContextAttention:
    """Attention of one layer to keys and values that are divided between ranks.

    Args:
        heads: the layer's.
        ranks: the ring.
    """

    def __init__(self, heads: Heads, ranks: Ranks) -> None:
        self._heads, self._ranks = heads, ranks

    def __call__(
        self, projected: Tensor, rotation: Rotation | None, store: KeysValues, layer: int, batch: Batch
    ) -> Tensor:
        assert isinstance(batch, ContextBatch)
        ranks, counts = self._ranks, batch.counts
        queries = stored_by_torch(projected, rotation, store, layer, batch, self._heads).contiguous()
        visiting, found = queries, list[Tensor]()
        sources = [(ranks.rank - hop) % ranks.count for hop in range(ranks.count)]
        for source, following in zip(sources, [*sources[1:], None], strict=True):
            # They go on to the next rank while this one attends with them.
            arrival = None if following is None else ranks.pass_on(visiting, counts[following])
            found.append(self._partial(visiting, store, layer, batch, source))
            visiting = visiting if arrival is None else arrival()
        by_rank = [found[sources.index(rank)] for rank in range(ranks.count)]
        own = counts[ranks.rank]
        returned = ranks.all_to_all(torch.cat(by_rank), counts, [own] * ranks.count)
        parts = returned.view(ranks.count, own, *returned.shape[1:])
        return merged(parts[..., :-1], parts[..., -1])[0].to(projected.dtype).flatten(1)

    def _partial(self, queries: Tensor, store: KeysValues, layer: int, batch: ContextBatch, source: int) -> Tensor:
        """A rank's queries to the keys kept here: ``[tokens, heads, size + 1]``, of which the last are the logarithms."""
        heads = self._heads
        out = queries.new_empty(*queries.shape[:2], heads.size + 1, dtype=torch.float32)
        for each in batch.queries[source]:
            rows = each.rows.to(queries.device)
            blocks = max(1, _KEYS // (len(each.tables) * batch.block_size))
            found: tuple[Tensor, Tensor] | None = None
            for begin in range(0, each.tables.shape[1], blocks):
                end = min(begin + blocks, each.tables.shape[1])
                places = batch.key_positions(begin, end)
                seen = places <= each.positions.unsqueeze(-1)
                if heads.window is not None:
                    seen &= places > each.positions.unsqueeze(-1) - heads.window
                if not seen.any():
                    continue
                keys, values = store.read(layer, each.tables[:, begin:end].to(queries.device), queries.dtype)
                # Memory of other sequences may hold anything, and a mask does not hide NaN.
                foreign = (places >= each.stops.unsqueeze(1)).to(queries.device)[:, None, :, None]
                part = partial_attention(
                    queries[rows],
                    keys.masked_fill_(foreign, 0),
                    values.masked_fill_(foreign, 0),
                    seen.to(queries.device),
                    heads.scale,
                    heads.cap,
                )
                found = part if found is None else merged(*(torch.stack(two) for two in zip(found, part, strict=True)))
            if found is None:  # all keys that they see are elsewhere
                out[rows] = out.new_zeros(())
                out[..., -1][rows] = float("-inf")
            else:
                out[..., :-1][rows], out[..., -1][rows] = found
        return out


def ring_bytes(tokens: int, heads: int, shared: int, size: int) -> int:
    """Memory that attention of one layer takes at most besides its inputs and outputs.

    Args:
        tokens: of a step.
        heads, shared: query and key-value heads that a rank has.
        size: of a head.
    """
    scores = 3 * tokens * heads * _KEYS
    gathered = 4 * _KEYS * shared * size
    visiting = 6 * tokens * heads * (size + 1)
    return torch.float32.itemsize * (scores + gathered + visiting)


def partial_attention(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention to some of the keys, so that it can be merged with attention to others.

    Args:
        queries: ``[sequences, tokens, heads, size]``.
        keys, values: ``[sequences, shared heads, keys, size]``.
        seen: ``[sequences, tokens, keys]``.
        scale: the factor of scores.
        cap: soft cap on scores.

    Returns:
        ``[sequences, tokens, heads, size]``, and ``[sequences, tokens, heads]``: the logarithm of the sum of the scores'
        exponentials, minus infinity where no key is seen; both in float32.
    """
    sequences, tokens, heads, size = queries.shape
    shared = keys.shape[1]
    grouped = queries.float().view(sequences, tokens, shared, heads // shared, size).permute(0, 2, 3, 1, 4) * scale
    scores = grouped @ keys.float().transpose(2, 3).unsqueeze(2)
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    scores = scores.masked_fill_(~seen[:, None, None], float("-inf"))
    logarithms = scores.logsumexp(-1)
    shares = scores.sub_(_finite(logarithms).unsqueeze(-1)).exp_()
    out = shares @ values.float().unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), logarithms.permute(0, 3, 1, 2).flatten(2)


def merged(parts: Tensor, logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to all keys, from that to some each.

    Args:
        parts: ``[parts, ..., size]``.
        logarithms: of the sums of the scores' exponentials, ``[parts, ...]``.
    """
    whole = logarithms.logsumexp(0)
    weights = (logarithms - _finite(whole)).exp()
    return (parts * weights.unsqueeze(-1)).sum(0), whole


def _finite(logarithms: Tensor) -> Tensor:
    return torch.where(logarithms.isinf(), 0, logarithms)
