"""The block cache: counting, sharing, copying on write."""

from __future__ import annotations

import random

import pytest
import torch
from smelt.runtime import RuntimeProblem
from smelt.runtime.blocks.block_cache import BlockCache
from smelt.runtime.decoder.parts.kv_cache import PagedKeysValues


def test_a_beginning_is_found_again_but_never_its_last_token() -> None:
    cache = BlockCache(8, 4)
    blocks: list[int] = []
    keys: list[bytes] = []
    tokens = list(range(12))
    assert cache.grow(blocks, 0, 12) == []
    cache.publish(blocks, keys, tokens, 12, b"")
    found, _ = cache.find(tokens, b"")
    assert found == blocks[:2]  # the third would leave no token to compute logits from
    longer, _ = cache.find([*tokens, 99], b"")
    assert longer == blocks
    assert cache.find(tokens, b"other")[0] == []
    assert cache.find([7, *tokens[1:]], b"")[0] == []


def test_what_is_published_survives_its_holder_until_memory_is_needed() -> None:
    cache = BlockCache(4, 2)
    blocks: list[int] = []
    cache.grow(blocks, 0, 4)
    cache.publish(blocks, [], [1, 2, 3, 4], 4, b"")
    cache.release(blocks)
    assert cache.free == 4
    found, _ = cache.find([1, 2, 3, 4, 5], b"")
    assert len(found) == 2
    cache.release(found)
    everything: list[int] = []
    cache.grow(everything, 0, 8)
    assert cache.find([1, 2, 3, 4, 5], b"")[0] == []
    cache.check([everything])


def test_a_writer_gets_a_copy_of_what_others_hold() -> None:
    cache = BlockCache(4, 4)
    parent: list[int] = []
    cache.grow(parent, 0, 6)
    child = cache.fork(parent)
    before = list(child)
    copies = cache.grow(child, 6, 7)
    assert copies == [(before[1], child[1])]
    assert child[0] == parent[0]
    assert child[1] != parent[1]
    assert cache.grow(parent, 6, 7) == []  # it is alone with its own block now
    cache.check([parent, child])


def test_growing_too_far_changes_nothing() -> None:
    cache = BlockCache(3, 4)
    mine: list[int] = []
    cache.grow(mine, 0, 8)
    other = cache.fork(mine)
    assert cache.grow(other, 7, 9) is None  # one copy and one new block, and one is free
    assert other == mine
    cache.check([mine, other])


@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_conserved_under_anything(seed: int) -> None:
    chance = random.Random(seed)
    cache = BlockCache(24, 4)
    held: list[tuple[list[int], list[bytes], list[int]]] = []
    for _ in range(3000):
        what = chance.random()
        if what < 0.35:
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 30))]
            blocks, keys = cache.find(tokens, b"")
            if cache.grow(blocks, len(blocks) * 4, len(tokens)) is None:
                cache.release(blocks)
            else:
                held.append((blocks, keys, tokens))
        elif held and what < 0.6:
            blocks, keys, tokens = chance.choice(held)
            cache.publish(blocks, keys, tokens, chance.randrange(len(tokens) + 1), b"")
        elif held and what < 0.7:
            blocks, keys, tokens = chance.choice(held)
            held.append((cache.fork(blocks), list(keys), list(tokens)))
        elif held and what < 0.8:
            blocks, _, tokens = chance.choice(held)
            if cache.grow(blocks, len(tokens), len(tokens) + 1) is not None:
                tokens.append(chance.randrange(2))
        elif held:
            cache.release(held.pop(chance.randrange(len(held)))[0])
        cache.check([blocks for blocks, _, _ in held])
    for blocks, _, _ in held:
        cache.release(blocks)
    assert cache.free == 24


def test_heads_of_odd_size_are_refused() -> None:
    with pytest.raises(RuntimeProblem, match="so it must be even"):
        PagedKeysValues([1], 5, 4, 16, torch.float32)
