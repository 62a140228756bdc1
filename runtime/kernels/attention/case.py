"""Test cases of all attention kernels, and their float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...cache_types import BY_KIND, QUANTIZED_KINDS
from ...heads import Heads
from ..base.kernel import Case, PreparedCase, poisoned
from ..rows.cached import LayerCache, layer_cache, restored, targets_of
from .flash import Runs

Compute = Callable[[Tensor, LayerCache, Runs, Tensor], None]


@dataclass(frozen=True)
class AttentionCase:
    """Runs of tokens over a random cache.

    Attributes:
        heads: of the layer.
        kind: of the cache.
        dtype: of queries.
        block: positions of a cache block.
        runs: each one's tokens and how many positions its sequence has with them.
        note: other special features, for the name.
        compute: the kernel.
    """

    heads: Heads
    kind: str
    dtype: torch.dtype
    block: int
    runs: tuple[tuple[int, int], ...]
    note: str = ""
    compute: Compute | None = None
    large: bool = False

    @property
    def name(self) -> str:
        """The case's name."""
        h = self.heads
        rest = f"{f', window {h.window}' if h.window else ''}{f', cap {h.cap}' if h.cap else ''}{self.note}"
        lengths = " ".join(f"{count}/{stop}" for count, stop in self.runs)
        return (
            f"{h.queries}/{h.shared}x{h.size} {self.kind} {self.dtype} blocks of {self.block}: {lengths}{rest}".replace(
                "torch.", ""
            )
        )

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that support the cache's dtype."""
        return targets_of(self.kind)

    def computed_by(self, compute: Compute) -> AttentionCase:
        """The same for one kernel."""
        return replace(self, compute=compute)

    def random_cache(self, device: torch.device, draw: torch.Generator) -> tuple[LayerCache, Tensor]:
        """A cache of random values, and each run's blocks in random order."""
        needed = [-(-stop // self.block) for _, stop in self.runs]
        blocks, h, kept = sum(needed) + 2, self.heads, BY_KIND[self.kind]
        cache = layer_cache(blocks, h.shared, self.block, h.size, self.kind, self.dtype, device)
        for codes, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
            if scales is None:
                codes.copy_(torch.randn(codes.shape, generator=draw, device=draw.device))
                continue
            typical = 100.0
            if kept.type == "float":
                codes.copy_((torch.randn(codes.shape, generator=draw, device=draw.device) * typical).to(codes.dtype))
            else:
                least, most = (0, 255) if kept.packed else kept.code_range
                codes.copy_(torch.randint(least, most + 1, codes.shape, generator=draw, device=draw.device))
                typical = 2**kept.bits / 12**0.5  # the standard deviation of codes that are all as likely
            spread = torch.rand(scales.shape, generator=draw, device=draw.device)
            scales.copy_((0.2 + 1.5 * spread) / typical)
        order = torch.randperm(blocks, generator=draw, device=draw.device).int()
        tables = torch.full((len(self.runs), max(needed) + 1), 1 << 29, dtype=torch.int32)
        for i, count in enumerate(needed):
            tables[i, :count] = order[sum(needed[:i]) : sum(needed[:i]) + count]
        # Blocks of no run are not finite, and must not affect any output.
        if self.kind == "plain":
            cache.keys[order[-2:].long()] = cache.values[order[-2:].long()] = float("nan")
        return cache, tables.to(device)

    def trial(self, device: torch.device, draw: torch.Generator) -> PreparedCase:
        """Random queries over a random cache."""
        h = self.heads
        cache, tables = self.random_cache(device, draw)
        counts, stops = [c for c, _ in self.runs], [s for _, s in self.runs]
        rows = [sum(counts[:i]) for i in range(len(counts))]
        queries = torch.randn(sum(counts), h.queries * h.size, generator=draw, device=draw.device).to(
            device, self.dtype
        )
        first, count, stop = (torch.tensor(part, dtype=torch.int32, device=device) for part in (rows, counts, stops))
        runs = Runs(first, count, stop, tables)
        expected = reference(queries, h, cache, runs)

        def compute() -> Tensor:
            out = poisoned(queries.shape[0], queries.shape[1], self.dtype, device)
            assert self.compute is not None
            self.compute(queries, cache, runs, out)
            return out

        return PreparedCase(compute, expected, cache.keys.nbytes + cache.values.nbytes)

    def on_meta(self) -> tuple[Tensor, LayerCache, Runs, Tensor]:
        """Queries, cache, runs and outputs on ``meta``."""
        h, meta, n = self.heads, "meta", len(self.runs)
        cache = layer_cache(8, h.shared, self.block, h.size, self.kind, self.dtype, meta)
        queries = torch.empty(sum(c for c, _ in self.runs), h.queries * h.size, dtype=self.dtype, device=meta)
        rows, counts, stops = (torch.empty(n, dtype=torch.int32, device=meta) for _ in range(3))
        runs = Runs(rows, counts, stops, torch.empty(n, 7, dtype=torch.int32, device=meta))
        return queries, cache, runs, torch.empty_like(queries)

    def case(self) -> Case:
        """For the checks."""
        tolerance = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[self.dtype]
        tolerance = max(tolerance, 2e-3 if self.kind != "plain" else 0.0)
        return Case(self.name, self.trial, tolerance, self.large, self.targets)


def reference(queries: Tensor, heads: Heads, cache: LayerCache, runs: Runs) -> Tensor:
    """Each token's attention on its own, in float64; where keys are rotated, so are queries."""
    out = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    keys = restored(cache.keys, cache.key_scales, cache.kind)
    values = restored(cache.values, cache.value_scales, cache.kind)
    for i in range(len(runs.counts)):
        first, count, stop = (int(part[i]) for part in (runs.rows, runs.counts, runs.stops))
        if not count:
            continue
        table = runs.tables[i, : -(-stop // cache.block)].long()
        # [heads, positions, size], each key-value head once for every query head of its group.
        mine = [
            part[table].transpose(0, 1).flatten(1, 2)[:, :stop].repeat_interleave(heads.group, 0)
            for part in (keys, values)
        ]
        asked = queries[first : first + count].double().unflatten(1, (heads.queries, -1)).transpose(0, 1)
        scores = asked @ mine[0].transpose(1, 2) * heads.scale
        if heads.cap:
            scores = heads.cap * torch.tanh(scores / heads.cap)
        position = torch.arange(stop - count, stop, device=queries.device).unsqueeze(1)
        seen = torch.arange(stop, device=queries.device).unsqueeze(0)
        mask = seen <= position
        if heads.window:
            mask &= seen > position - heads.window
        shares = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        out[first : first + count] = (shares @ mine[1]).transpose(0, 1).flatten(1)
    return out


def attention_cases(*, singles: bool) -> list[AttentionCase]:
    """All options, on lengths around the edges of tiles and blocks; runs of one token each, or of several."""
    runs = ((1, 1), (1, 16), (1, 33), (1, 70)) if singles else ((5, 5), (2, 40), (21, 50), (16, 16))

    def heads(queries: int, shared: int, size: int, window: int | None = None, cap: float | None = None) -> Heads:
        return Heads(queries, shared, size, size**-0.5, window, cap)

    half, wide = torch.float16, torch.float32
    base = AttentionCase(heads(4, 2, 64), "plain", half, 16, runs)
    found = [
        base,
        replace(base, heads=heads(4, 2, 64, 13)),
        replace(base, heads=heads(4, 2, 64, 32, 5.0), dtype=wide),
        replace(base, heads=heads(2, 2, 80), block=24),
        replace(base, heads=heads(3, 1, 96), block=48),
        replace(base, heads=heads(7, 1, 128), block=32),
        replace(base, heads=heads(2, 1, 256), block=64),
        replace(base, heads=heads(8, 8, 8), dtype=wide),
        replace(base, dtype=torch.bfloat16, block=32),
    ]
    for kind in QUANTIZED_KINDS:
        found.append(replace(base, kind=kind, heads=heads(4, 2, 64, 20 if BY_KIND[kind].packed else None)))
        found.append(replace(base, kind=kind, heads=heads(4, 1, 96), dtype=torch.bfloat16, block=48))
    return found
