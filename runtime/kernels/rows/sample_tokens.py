"""Sampling each row's next token on the GPU, as :mod:`smelt.runtime.sampling.sampling` does on the CPU, without a sort.

One launch reads chunks of the logits, applies biases and penalties and, for rows without filtering, samples already. A
second one, with a program per row, combines the chunks. For rows with top-k, top-p or min-p it first searches for the
lowest remaining logit, in what is left of the row after increasing lower bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.kernel import Build, Case, Kernel, PreparedCase, poisoned
from ..base.launch import Launch
from ..base.overlap import wait_and_launch
from ..base.targets import Target
from .draw_narrowly import drawn_narrowly, inverse_of, random_bits, with_noise
from .sampling_state import SamplingState, choices

# Of a row, for a program of the first launch. A top-k no larger than the number of chunks has a good lower bound at once.
_CHUNK = 2048
_TILE = 512  # logits compared with sixteen pivots at once
_NOTHING = float("-inf")


@triton.jit
def _narrows(temperature, top_k, top_p, min_p, V):
    return (temperature > 0.0) & (((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _edited(values, scratch, inner, first, length, tokens, added, until, count):
    """A chunk of logits, with what is added to single ones."""
    CHUNK: tl.constexpr = inner.shape[0]
    tl.store(scratch + inner, values)
    tl.debug_barrier()
    for start in range(0, count, 128):
        edit = start + tl.arange(0, 128)
        inside = edit < count
        place = tl.load(tokens + edit, mask=inside, other=0) - first
        here = inside & (place >= 0) & (place < CHUNK) & (length < tl.load(until + edit, mask=inside, other=0))
        value = tl.load(added + edit, mask=inside, other=0.0)
        # A token may be both made likelier and forbidden.
        tl.atomic_add(scratch + place, value, mask=here, sem="relaxed")
    tl.debug_barrier()
    found = tl.load(scratch + inner, cache_modifier=".cg")
    tl.debug_barrier()
    return found


@triton.jit
def _penalized(values, counts, inner, first, history, prompt_length, length, repetition, presence, frequency):
    """A chunk of logits after the penalties."""
    CHUNK: tl.constexpr = inner.shape[0]
    IN_PROMPT: tl.constexpr = 1 << 30  # pyright: ignore[reportAssignmentType]
    tl.store(counts + inner, tl.zeros([CHUNK], tl.int32))
    tl.debug_barrier()
    for start in range(tl.where(repetition != 1.0, 0, prompt_length), length, 1024):
        position = start + tl.arange(0, 1024)
        place = tl.load(history + position, mask=position < length, other=-1) - first
        here = (place >= 0) & (place < CHUNK)
        generated = position >= prompt_length
        tl.atomic_or(counts + place, IN_PROMPT, mask=here & ~generated, sem="relaxed")
        tl.atomic_add(counts + place, 1, mask=here & generated, sem="relaxed")
    tl.debug_barrier()
    count = tl.load(counts + inner, cache_modifier=".cg")
    tl.debug_barrier()
    divisor = repetition + tl.zeros_like(values)
    repeated = tl.where(values > 0.0, tl.div_rn(values, divisor), values * repetition)
    values = tl.where((count > 0) & (divisor != 1.0), repeated, values)
    times = count & (IN_PROMPT - 1)
    return tl.where(times > 0, values - (presence + frequency * times.to(tl.float32)), values)


@triton.jit
def _logit_statistics(
    logits,
    slots,
    lengths,
    history,
    prompt_lengths,
    temperature,
    top_k,
    top_p,
    min_p,
    repetition,
    presence,
    frequency,
    seeds,
    edit_counts,
    edit_tokens,
    edit_values,
    edit_until,
    partials,
    winners,
    scores,
    counts,
    V,
    logits_stride,
    most,
    edits,
    chunks,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    first = chunk * CHUNK
    inner = tl.arange(0, CHUNK)
    at = (row * chunks + chunk) * CHUNK
    token = first + inner
    # On their way while it is found out what to do with them.
    values = tl.load(logits + row * logits_stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    # What is no number is lost in a maximum, but not in this sum.
    highest = tl.max(values, 0)
    total = tl.sum(tl.exp(values - tl.where(highest == float("-inf"), 0.0, highest)), 0)

    length = tl.load(lengths + row)
    count = tl.load(edit_counts + slot)
    if count > 0:
        of = slot * edits
        values = _edited(
            values, scores + at, inner, first, length, edit_tokens + of, edit_values + of, edit_until + of, count
        )
    repeated, present, frequent = tl.load(repetition + slot), tl.load(presence + slot), tl.load(frequency + slot)
    if (repeated != 1.0) | (present != 0.0) | (frequent != 0.0):
        prompt_length = tl.load(prompt_lengths + slot)
        values = _penalized(
            values,
            counts + at,
            inner,
            first,
            history + slot * most,
            prompt_length,
            length,
            repeated,
            present,
            frequent,
        )
    heat = tl.load(temperature + slot)
    weight = 0.0
    if _narrows(heat, tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot), V):
        tl.store(scores + at + inner, values)
        best = tl.max(values, 0)
        weight = tl.sum(tl.exp((values - tl.where(best == float("-inf"), 0.0, best)) * inverse_of(heat)), 0)
    else:
        if heat > 0.0:
            a, b, c, d = random_bits(tl.load(seeds + slot), length, first // 4 + tl.arange(0, CHUNK // 4))
            values = with_noise(values, heat, tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))
    best, place = tl.max(values, 0, return_indices=True)
    part = partials + row * 4 * chunks + chunk
    tl.store(part, highest)
    tl.store(part + chunks, total)
    tl.store(part + 2 * chunks, best)
    tl.store(part + 3 * chunks, weight)
    tl.store(winners + row * chunks + chunk, first + place)


@triton.jit
def _choose_tokens(
    logits,
    slots,
    lengths,
    history,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    partials,
    winners,
    scores,
    kept_tokens,
    tokens,
    logprobs,
    sound,
    V,
    logits_stride,
    most,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        tl.store(tokens + row, -1)
        return
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    part = partials + row * 4 * chunks + chunk
    highs = tl.load(part, mask=inside, other=float("-inf"))
    highest = tl.max(highs, 0)
    total = tl.sum(tl.load(part + chunks, mask=inside, other=0.0) * tl.exp(highs - highest), 0)
    is_sound = (tl.abs(highest) < float("inf")) & (total == total)
    bests = tl.load(part + 2 * chunks, mask=inside, other=float("-inf"))
    top, place = tl.max(bests, 0, return_indices=True)
    token = tl.load(winners + row * chunks + tl.minimum(place, chunks - 1))

    length = tl.load(lengths + row)
    heat, k = tl.load(temperature + slot), tl.load(top_k + slot)
    p, least = tl.load(top_p + slot), tl.load(min_p + slot)
    if is_sound & (tl.abs(top) < float("inf")) & _narrows(heat, k, p, least, V):
        weights = tl.load(part + 3 * chunks, mask=inside, other=0.0)
        mass = tl.sum(weights * tl.exp((bests - top) * inverse_of(heat)), 0)
        at = row * chunks * CHUNK
        token = drawn_narrowly(
            scores + at,
            kept_tokens + at,
            bests,
            top,
            mass,
            heat,
            k,
            p,
            least,
            tl.load(seeds + slot),
            length,
            V,
            chunks * CHUNK,
            TILE,
        )
    token = tl.where(is_sound, token, 0)
    logit = tl.load(logits + row * logits_stride + token).to(tl.float32)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, logit - highest - tl.log(total))
    tl.store(sound + row, is_sound.to(tl.int32))
    if length < most:
        tl.store(history + slot * most + length, token)


def outputs(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what :func:`sample_tokens` returns."""
    tokens, sound = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    return tokens, torch.empty(rows, dtype=torch.float32, device=device), sound


def launches(
    logits: Tensor,
    slots: Tensor,
    lengths: Tensor,
    choices: SamplingState,
    found: tuple[Tensor, Tensor, Tensor],
    *,
    chunk: int = _CHUNK,
    tile: int = _TILE,
) -> list[Launch]:
    """The two launches of one choice, ready to run after each other.

    Args:
        logits, slots, lengths, choices: as :func:`sample_tokens` has them.
        found: what it returns.
        chunk: how much of a row a program of the first looks over.
        tile: how much of a row the second compares at once.
    """
    rows, vocabulary = logits.shape
    chunks = -(-vocabulary // chunk)
    device = logits.device
    scores = torch.empty(rows, chunks * chunk, dtype=torch.float32, device=device)
    own = {field.name: getattr(choices, field.name) for field in fields(choices)}
    shared: dict[str, Tensor | int | None] = {
        "logits": logits,
        "slots": slots,
        "lengths": lengths,
        "partials": torch.empty(rows, 4, chunks, dtype=torch.float32, device=device),
        "winners": torch.empty(rows, chunks, dtype=torch.int32, device=device),
        "scores": scores,
        "V": vocabulary,
        "logits_stride": logits.stride(0),
        "most": choices.history.shape[1],
        "chunks": chunks,
    }
    first = {**shared, **own, "counts": scores.view(torch.int32), "edits": choices.edit_tokens.shape[1]}
    second = {
        **shared,
        **{name: own[name] for name in ("history", "temperature", "top_k", "top_p", "min_p", "seeds")},
        "kept_tokens": torch.empty_like(scores, dtype=torch.int32),
        **dict(zip(("tokens", "logprobs", "sound"), found, strict=True)),
    }
    constants = {"CHUNK": chunk, "CHUNKS": triton.next_power_of_2(chunks), "TILE": tile}
    return [
        Launch(_logit_statistics, first, {"CHUNK": chunk}, (rows, chunks), 4, 2),
        # With more warps there are too few registers for each.
        Launch(_choose_tokens, second, constants, (rows,), 8, 2),
    ]


def sample_tokens(
    logits: Tensor, slots: Tensor, lengths: Tensor, choices: SamplingState
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the next token of each row, and append it to its sequence.

    Args:
        logits: ``[rows, vocabulary]`` of float32, float16 or bfloat16, with contiguous rows.
        slots: int32 ``[rows]``; whose sequence a row is of, negative for none.
        lengths: int32 ``[rows]``; how many tokens the sequence has.
        choices: how to choose; tokens are written to its history where there is room.

    Returns:
        int32 tokens, -1 for rows of no sequence; for all others float32 logarithms of their probabilities before
        any change, and int32 that are 0, with token 0, where logits are no numbers or have no finite maximum.
    """
    found = outputs(logits.shape[0], logits.device)
    if logits.shape[0]:
        for launch in launches(logits, slots, lengths, choices, found):
            launch.run()
    return found


# What must leave one token only, or takes the most likely one.
_CERTAIN: tuple[dict[str, float], ...] = (
    {},
    {"repetition": 1.37},
    {"presence": 0.31, "frequency": 0.83},
    {"temperature": 0.7, "top_k": 1, "edits": 5},
    {"temperature": 1.3, "top_p": 1e-4, "repetition": 1.37, "frequency": -0.29},
    {"temperature": 2.0, "min_p": 1.0, "edits": 3, "presence": 0.31},
    {"temperature": 0.9, "top_k": 90, "top_p": 1e-3, "min_p": 0.5, "edits": 6, "repetition": 0.61, "frequency": 0.83},
)
_LIKELY = 16


@dataclass(frozen=True)
class SampleCase:
    """Rows of one call with different sampling parameters, each with a certain outcome.

    Attributes:
        rows: how many.
        vocabulary: how many logits each has.
        dtype: of the logits.
    """

    rows: int
    vocabulary: int
    dtype: torch.dtype

    def prepare(self, device: torch.device, draw: torch.Generator) -> PreparedCase:
        """A few likely tokens in each row, which are also those that came before."""
        logits = torch.randn(self.rows, self.vocabulary, generator=draw, device=draw.device)
        asked = choices(self.rows + 3, 8, 40, draw.device)
        slots = torch.randperm(self.rows + 3, generator=draw, device=draw.device)[: self.rows].to(torch.int32)
        lengths = torch.randint(20, 40, (self.rows,), generator=draw, device=draw.device, dtype=torch.int32)
        expected = torch.empty(4, self.rows, dtype=torch.float64, device=draw.device)
        for row, slot in enumerate(slots.tolist()):
            likely = torch.randperm(self.vocabulary, generator=draw, device=draw.device)[:_LIKELY]
            logits[row, likely] = 8 + 0.5 * torch.arange(_LIKELY, device=draw.device)
            seen = torch.randint(_LIKELY, (40,), generator=draw, device=draw.device)
            asked.history[slot] = likely[seen].to(torch.int32)
            asked.prompt_lengths[slot] = 12
            wishes = dict(_CERTAIN[row % len(_CERTAIN)])
            edits = int(wishes.pop("edits", 0))
            for name, value in wishes.items():
                getattr(asked, name)[slot] = value
            asked.edit_counts[slot] = edits
            asked.edit_tokens[slot] = likely[-8:].flip(0).to(torch.int32)
            # The most likely token is forbidden; the second one was so until now.
            values = torch.tensor([_NOTHING, _NOTHING, 1.23, -2.34, 3.45, 4.56, 0.0, 0.0], device=draw.device)
            asked.edit_values[slot] = values
            asked.edit_until[slot, 1] = lengths[row]
        original = logits.to(self.dtype)
        for row, slot in enumerate(slots.tolist()):
            token = reference(original[row], asked, slot, int(lengths[row])).argmax()
            logprob = original[row].double().log_softmax(-1)[token]
            share = token.double() / self.vocabulary
            expected[:, row] = torch.stack([share, logprob, torch.ones_like(share), share])
        on_device = SamplingState(*(getattr(asked, field.name).to(device) for field in fields(asked)))
        original, slots, lengths = original.to(device), slots.to(device), lengths.to(device)

        def compute() -> Tensor:
            logprobs = poisoned(1, self.rows, torch.float32, device)[0]
            tokens, sound = (torch.full((self.rows,), -9, dtype=torch.int32, device=device) for _ in range(2))
            on_device.history[slots.long(), lengths.long()] = -9
            for launch in launches(original, slots, lengths, on_device, (tokens, logprobs, sound)):
                launch.run()
            stored = on_device.history[slots.long(), lengths.long()]
            return torch.stack([tokens / self.vocabulary, logprobs, sound.float(), stored / self.vocabulary])

        return PreparedCase(compute, expected.to(device), original.nbytes)

    def case(self) -> Case:
        """For :data:`KERNEL`."""
        name = f"{self.rows}x{self.vocabulary} {self.dtype}".replace("torch.", "")
        return Case(name, self.prepare, 1e-5, self.rows * self.vocabulary > 1 << 20)


def reference(row: Tensor, asked: SamplingState, slot: int, length: int) -> Tensor:
    """A row of logits after all edits and penalties, in float64."""
    row = row.double()
    for edit in range(int(asked.edit_counts[slot])):
        if length < asked.edit_until[slot, edit]:
            row[asked.edit_tokens[slot, edit]] += asked.edit_values[slot, edit]
    before = asked.history[slot, :length].long()
    penalty = asked.repetition[slot].double()
    repeated = torch.where(row > 0, row / penalty, row * penalty)
    row = torch.where(torch.bincount(before, minlength=len(row)) > 0, repeated, row)
    times = torch.bincount(before[int(asked.prompt_lengths[slot]) :], minlength=len(row))
    return row - (times > 0) * asked.presence[slot].double() - times * asked.frequency[slot].double()


def _build(number: int, dtype: torch.dtype) -> Build:
    def launch_on_meta(target: Target) -> Launch:
        logits = torch.empty(64, 128256, dtype=dtype, device="meta")
        slots, lengths = (torch.empty(64, dtype=torch.int32, device="meta") for _ in range(2))
        asked = choices(64, 320, 8192, logits.device)
        return launches(logits, slots, lengths, asked, outputs(64, logits.device))[number]

    name = f"{('logit statistics', 'choose')[number]} {dtype}".replace("torch.", "")
    return Build(name, launch_on_meta, matrix=False, streamed=("scores",) if number else ("logits",))


KERNEL = Kernel(
    "sample_tokens",
    [
        SampleCase(*sizes).case()
        for sizes in (
            (7, 1300, torch.float32),
            (1, 50, torch.float16),
            (5, 2500, torch.bfloat16),
            (64, 128256, torch.bfloat16),
            (70, 50257, torch.float32),
        )
    ],
    [_build(0, torch.bfloat16), _build(0, torch.float32), _build(1, torch.bfloat16)],
)
