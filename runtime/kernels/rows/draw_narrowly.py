"""The noise that tokens are chosen with, and the choice among those that top-k, top-p and min-p leave, without a sort."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_bits(seed, length, quads):
    """Four words for each of the fours of tokens; they depend on nothing but the seed, the length and the tokens."""
    none = quads * 0
    return tl.philox(seed, quads, length + none, none, none)


@triton.jit
def with_noise(logits, temperature, bits):
    """Logits whose largest is a sample of the softmax of ``logits / temperature``."""
    # The smaller the noise under the logarithm, the likelier it wins: there it must have many digits.
    uniform = tl.uint_to_uniform_float(bits) + 2.3283064e-10
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
    exponential = tl.where(uniform < 0.01, series, -tl.log(1.0 - uniform))
    # Times the temperature instead of over it: no logit becomes infinite.
    return logits - temperature * tl.log(exponential)


@triton.jit
def inverse_of(temperature):
    """Of a temperature, which may be zero."""
    return 1.0 / tl.maximum(temperature, 1e-30)


@triton.jit
def _reordered(bits):
    """From a float's bits to its key, an integer in the order of floats; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key_of(value):
    return _reordered(value.to(tl.int32, bitcast=True)).to(tl.int64)


@triton.jit
def _value_of(key):
    return _reordered(key.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _kept(scores, tokens, count, lowest, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Move what is not below the lowest logit to the front of the row, in its order; return how many they are.

    ``WHOLE`` rows have not been moved before: each logit is at its token's place.
    """
    # No place is written that is still to be read: loads may run ahead.
    kept = 0
    for start in tl.range(0, count, TILE, num_stages=3 if WHOLE else 1):  # pyright: ignore[reportGeneralTypeIssues]
        place = start + tl.arange(0, TILE)
        values = tl.load(scores + place, mask=place < count, other=float("-inf"))
        token = place
        if not WHOLE:
            token = tl.load(tokens + place, mask=place < count, other=0)
        keep = (values >= lowest) & (place < count)
        to = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(scores + to, values, mask=keep)
        tl.store(tokens + to, token, mask=keep)
        kept += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()
    return kept


@triton.jit
def _reached(scores, count, pivots, top, inverse, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """For each pivot how many logits are not below it, or their sum of probabilities relative to the top one's."""
    reached = tl.zeros([pivots.shape[0], TILE], tl.float32)
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        values = tl.load(scores + place, mask=place < count, other=float("-inf"))
        weights = tl.exp((values - top) * inverse) if BY_MASS else tl.where(place < count, 1.0, 0.0)
        reached += tl.where(values[None, :] >= pivots[:, None], weights[None, :], 0.0)
    return tl.sum(reached, 1)


@triton.jit
def lowest_that_stays(
    scores, tokens, count, low, high, target, top, inverse, BY_MASS: tl.constexpr, TILE: tl.constexpr
):
    """The largest key at which a target is reached, between one where it is and one where it is not; and what is left."""
    sixteen = tl.arange(0, 16)
    while high - low > 1:
        if count > 4 * TILE:
            count = _kept(scores, tokens, count, _value_of(low), False, 8 * TILE)
        step = (high - low + 15) // 16
        pivots = tl.minimum(low + step * sixteen, high)
        reached = _reached(scores, count, _value_of(pivots), top, inverse, BY_MASS, TILE)
        # Higher pivots reach less.
        enough = (reached >= target) & (pivots < high)
        last = tl.maximum(tl.sum(enough.to(tl.int64), 0) - 1, 0)
        low, high = low + step * last, tl.minimum(low + step * (last + 1), high)
        if not BY_MASS:
            # No need to know which of the keys between two logits it is.
            high = tl.where(tl.min(tl.where(enough, reached, float("inf")), 0) == target, low + 1, high)
    return low, count


@triton.jit
def drawn_narrowly(
    scores,
    tokens,
    bests,
    top,
    mass,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    length,
    V,
    filled,
    TILE: tl.constexpr,
):
    """A token of those that stay after top-k, then top-p, then min-p."""
    inverse = inverse_of(temperature)
    by_count = (top_k > 0) & (top_k < V)
    # No noise lifts a logit over another that is 30 temperatures above it.
    least = top + temperature * tl.log(tl.maximum(min_p, 1e-13))
    if by_count:
        # There are k logits not below the k-th of the chunks' largest.
        ranks = tl.sum((bests[None, :] >= bests[:, None]).to(tl.int32), 1)
        bound = tl.max(tl.where(ranks >= top_k, bests, float("-inf")), 0)
    else:
        # All together, logits below this one have no more than half of the probability that top-p drops.
        dropped = tl.maximum(0.5 * (1.0 - top_p) * mass / V, 1e-13)
        bound = tl.maximum(least, top + temperature * tl.log(dropped))
    low, high = _key_of(bound), _key_of(top) + 1
    # What fills the last chunk is minus infinity, and never drawn.
    count = _kept(scores, tokens, filled, bound, True, 8 * TILE)
    if by_count:
        low, count = lowest_that_stays(
            scores, tokens, count, low, high, top_k.to(tl.float32), top, inverse, False, TILE
        )
        if top_p < 1.0:
            pivots = _value_of(low) + tl.zeros([16], tl.float32)
            mass = tl.max(_reached(scores, count, pivots, top, inverse, True, TILE), 0)
    if top_p < 1.0:
        low, count = lowest_that_stays(scores, tokens, count, low, high, top_p * mass, top, inverse, True, TILE)
    lowest = tl.maximum(_value_of(low), least)

    best = tl.full([TILE], float("-inf"), tl.float32)
    chosen = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        values = tl.load(scores + place, mask=place < count, other=float("-inf"))
        token = tl.load(tokens + place, mask=place < count, other=0)
        a, b, c, d = random_bits(seed, length, token >> 2)
        bits = tl.where((token & 2) == 0, tl.where((token & 1) == 0, a, b), tl.where((token & 1) == 0, c, d))
        noisy = with_noise(values, temperature, bits)
        better = (place < count) & (values >= lowest) & (noisy > best)
        best = tl.where(better, noisy, best)
        chosen = tl.where(better, token, chosen)
    _, place = tl.max(best, 0, return_indices=True)
    return tl.sum(tl.where(tl.arange(0, TILE) == place, chosen, 0), 0)
