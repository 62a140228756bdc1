"""Tuning of attention tiles: long contexts and long prompts, by the kind of cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...cache_types import CACHE_TYPES
from ...heads import Heads
from ..attention import attend_prompts, attend_tokens
from ..attention.attend_prompts import work_of
from ..attention.flash import Runs
from ..base.launch import Launch
from ..base.targets import Target
from ..base.workspace import Workspace
from ..rows.cached import LayerCache, layer_cache, targets_of
from ..tiles.attention_tiles import PromptTile, TokenTile
from ..tiles.tile import AttentionShape, Tiles

# Of Llama-3-8B and Qwen3-0.6B; a tile depends on a head's size, and on how many share a key.
HEADS = (Heads(32, 8, 128, 128**-0.5, None, None), Heads(16, 8, 128, 128**-0.5, None, None))
_BLOCK = 16
_SEQUENCES, _CONTEXT, _PROMPT = 8, 8192, 4096
_COPIES = 2  # caches to take turns with: the larger part of neither stays in the device's cache
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class AttentionTuning:
    """One kind of cache, read by single tokens or by a prompt."""

    heads: Heads
    kind: str
    prompts: bool

    @property
    def name(self) -> str:
        what = f"prompt of {_PROMPT}" if self.prompts else f"{_SEQUENCES} tokens after {_CONTEXT}"
        return f"attention of a {what}, {self.heads.queries}/{self.heads.shared}x{self.heads.size}, {self.kind} cache"

    @property
    def stage(self) -> str:
        return "attention of prompts" if self.prompts else "attention of single tokens"

    @property
    def rows(self) -> int:
        return _PROMPT if self.prompts else _SEQUENCES

    @property
    def listed(self) -> str:
        return f"{'attend_prompts' if self.prompts else 'attend_tokens'}/{self.kind}"

    @property
    def shape(self) -> AttentionShape:
        """The shape that its tile is looked up by."""
        return AttentionShape(self.kind, self.heads.size, self.heads.group)

    def shipped(self, tiles: Tiles) -> TokenTile | PromptTile:
        """Its current tile."""
        return (tiles.of_prompts if self.prompts else tiles.of_tokens)(self.heads, _DTYPE, self.kind)

    @property
    def rounds(self) -> int:
        """All candidates at once."""
        return 1

    def around(self, best: TokenTile | PromptTile, done: int, target: Target) -> list[TokenTile | PromptTile]:
        """All candidates."""
        return self.candidates(target)

    def candidates(self, target: Target) -> list[TokenTile | PromptTile]:
        """Tiles that may be faster; those that do not compile, or need too much memory, are skipped when tried."""
        stages = (1, 2) if target.backend == "hip" else (2, 4, 6)
        if not self.prompts:
            return [
                TokenTile(positions, least, warps, deep, waves)
                for positions in (32, 64, 128)
                for warps in (4, 8)
                for deep in stages
                for waves in (1, 2, 4)
                for least in (1, 2, 4, 8)
            ]
        return [
            PromptTile(queries, positions, warps, deep)
            for queries in (64, 128)
            for positions in (32, 64, 128)
            for warps in (4, 8)
            for deep in stages
        ]

    def launches(self, tile: TokenTile | PromptTile, target: Target) -> list[Launch]:
        """A call's launches, on ``meta``."""
        meta = torch.device("meta")
        cache, runs, x, out, work = self._inputs(meta, tile)
        if isinstance(tile, PromptTile):
            return [attend_prompts.launch(x, self.heads, cache, runs, work, out, tile, Workspace(meta))]
        return attend_tokens.launches(x, self.heads, cache, runs, out, tile, target, Workspace(meta))

    def calls(self, device: torch.device) -> list[Callable[[TokenTile | PromptTile], Tensor]]:
        """Attention to several caches."""
        return [self._call(device) for _ in range(_COPIES)]

    def kept(self, tiles: Tiles, tile: TokenTile | PromptTile) -> Tiles:
        """A copy of the tiles with this one for it."""
        if isinstance(tile, PromptTile):
            return replace(tiles, prompts={**tiles.prompts, self.shape: tile})
        return replace(tiles, tokens={**tiles.tokens, self.shape: tile})

    def _call(self, device: torch.device) -> Callable[[TokenTile | PromptTile], Tensor]:
        cache, runs, x, out, _ = self._inputs(device, None)
        work: dict[int, Tensor] = {}

        def call(tile: TokenTile | PromptTile) -> Tensor:
            if isinstance(tile, TokenTile):
                return attend_tokens.attend_tokens(x, self.heads, cache, runs, out, tile=tile)
            tokens = tile.tokens(self.heads.group)
            if tokens not in work:
                work[tokens] = _work(tokens, device)
            return attend_prompts.attend_prompts(x, self.heads, cache, runs, work[tokens], out, tile)

        return call

    def _inputs(
        self, device: torch.device, tile: TokenTile | PromptTile | None
    ) -> tuple[LayerCache, Runs, Tensor, Tensor, Tensor]:
        sequences, length = (1, _PROMPT) if self.prompts else (_SEQUENCES, _CONTEXT)
        each = length // _BLOCK
        cache = layer_cache(sequences * each, self.heads.shared, _BLOCK, self.heads.size, self.kind, _DTYPE, device)
        for codes, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
            if device.type == "meta":
                continue
            if scales is None:
                codes.normal_()
            else:
                codes.view(torch.uint8).random_(0, 120)
                scales.uniform_(0.01, 0.02)
        tables = torch.empty(sequences, each, dtype=torch.int32, device=device)
        counts = torch.full((sequences,), _PROMPT if self.prompts else 1, dtype=torch.int32, device=device)
        rows = torch.arange(sequences, dtype=torch.int32, device=device)
        if device.type != "meta":
            tables.copy_(torch.randperm(sequences * each, device=device).view(sequences, each))
        runs = Runs(rows, counts, torch.full_like(counts, length), tables)
        tokens = _PROMPT if self.prompts else sequences
        x = torch.empty(tokens, self.heads.queries * self.heads.size, dtype=_DTYPE, device=device).normal_()
        work = torch.empty(0, 2, dtype=torch.int32, device=device)
        if isinstance(tile, PromptTile):
            work = _work(tile.tokens(self.heads.group), device)
        return cache, runs, x, torch.empty_like(x), work


def attention(target: Target, *, prompts: bool) -> list[AttentionTuning]:
    """The shapes to tune: prompts, or single tokens, for each kind of cache that the device supports."""
    kinds = [each.kind for each in CACHE_TYPES if not targets_of(each.kind) or target.name in targets_of(each.kind)]
    return [AttentionTuning(heads, kind, prompts) for heads in HEADS for kind in kinds]


def _work(tokens: int, device: torch.device) -> Tensor:
    return torch.tensor(work_of([_PROMPT], [_PROMPT], tokens), dtype=torch.int32).to(device)
