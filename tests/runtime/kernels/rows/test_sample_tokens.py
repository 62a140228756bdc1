"""Tokens chosen by the GPU's kernels, in Triton's interpreter: against the CPU's sampling, and against its distributions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from smelt.runtime import SamplingParams
from smelt.runtime.kernels.rows.draw_narrowly import lowest_that_stays
from smelt.runtime.kernels.rows.sample_tokens import launches, outputs, sample_tokens
from smelt.runtime.kernels.rows.sampling_state import SamplingState, choices
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.sampling.draw import draw_tokens, narrowed
from smelt.runtime.sampling.sampling import changed_logits, draw_for
from torch import Tensor

from ..interpreter import interpreted

CPU = torch.device("cpu")
ENDS = frozenset({7})
ALWAYS = 2**31 - 1

pytestmark = interpreted


def sequence_of(prompt: list[int], generated: list[int], **params: Any) -> Sequence:
    request = Request("r", prompt, SamplingParams(**params), 1000)
    return Sequence(request, 0, prompt + generated)


def fill(asked: SamplingState, slot: int, sequence: Sequence) -> None:
    """What a sequence's request asks for."""
    params, prompt = sequence.request.params, len(sequence.request.prompt)
    asked.history[slot, : len(sequence.tokens)] = torch.tensor(sequence.tokens, dtype=torch.int32)
    asked.prompt_lengths[slot] = prompt
    asked.temperature[slot] = params.temperature
    asked.top_k[slot] = params.top_k
    asked.top_p[slot] = params.top_p
    asked.min_p[slot] = params.min_p
    asked.repetition[slot] = params.repetition_penalty
    asked.presence[slot] = params.presence_penalty
    asked.frequency[slot] = params.frequency_penalty
    asked.seeds[slot] = params.seed or 0
    edits = [(token, bias, ALWAYS) for token, bias in params.logit_bias.items()]
    edits += [(token, float("-inf"), prompt + params.min_tokens) for token in (*params.stop_token_ids, *ENDS)]
    asked.edit_counts[slot] = len(edits)
    for place, (token, value, until) in enumerate(edits):
        asked.edit_tokens[slot, place] = token
        asked.edit_values[slot, place] = value
        asked.edit_until[slot, place] = until


def run(
    logits: Tensor, slots: list[int], lengths: list[int], asked: SamplingState, chunk: int = 128, tile: int = 32
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log probabilities and soundness, of what was not there before."""
    rows = len(slots)
    tokens, sound = (torch.full((rows,), -9, dtype=torch.int32) for _ in range(2))
    found = tokens, torch.full((rows,), float("nan")), sound
    of = torch.tensor(slots, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    for launch in launches(logits, *of, asked, found, chunk=chunk, tile=tile):
        launch.run()
    return found


def seeds_of(count: int) -> Tensor:
    return torch.arange(count) * 2**40 + 5


def drawn(row: Tensor, count: int, chunk: int = 256, **params: Any) -> Tensor:
    """What comes up with so many seeds."""
    asked = choices(count, 1, 4, CPU)
    fill(asked, 0, sequence_of([1, 2], [], **params))
    for name in ("temperature", "top_k", "top_p", "min_p"):
        getattr(asked, name)[:] = getattr(asked, name)[0].clone()
    asked.seeds[:] = seeds_of(count)
    rows = row.expand(count, -1)
    return run(rows, list(range(count)), [2] * count, asked, chunk, 256)[0].long()


def logits_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


GREEDY = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 2.5},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -0.7, "presence_penalty": -0.2},
    {"logit_bias": {3: 4.0, 299: 7.5, 150: -3.0}},
    {"min_tokens": 30, "stop_token_ids": (9, 11), "logit_bias": {7: 30.0, 9: 30.0, 140: 6.0}},
    {"min_tokens": 12, "stop_token_ids": (9, 11), "logit_bias": {7: 5.0, 9: 6.0}, "repetition_penalty": 1.3},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {n: n / 40 for n in range(0, 300, 2)},
    },
]


def changed_rows(dtype: torch.dtype, **more: Any) -> tuple[Tensor, SamplingState, list[int], list[Sequence]]:
    """Logits, what is asked for, slots and sequences: each of the wishes above twice."""
    logits = logits_of(2 * len(GREEDY), 300, seed=1)
    if dtype == torch.bfloat16:
        # Few numbers are bfloat16's: each only once, so that there is one answer.
        logits = logits.argsort(-1) / 16 - 8
    # The second time all are negative, and the history is of more than one tile.
    logits[len(GREEDY) :] -= 20
    logits = logits.to(dtype)
    asked = choices(30, 160, 1200, CPU)
    slots = [29 - row for row in range(len(logits))]
    sequences = []
    for row, params in enumerate(GREEDY * 2):
        likely = logits[row].topk(12).indices.tolist()
        generated = (likely[:3] * 2 + likely[5:9] + [0, 299]) * (1 if row < len(GREEDY) else 80)
        sequences.append(sequence_of([*likely[2:10], 128, 128], generated, **params, **more))
        fill(asked, slots[row], sequences[-1])
    return logits, asked, slots, sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_most_likely_token_is_that_of_the_changed_logits(dtype: torch.dtype) -> None:
    logits, asked, slots, sequences = changed_rows(dtype, temperature=0)
    lengths = [len(one.tokens) for one in sequences]
    tokens, logprobs, sound = run(logits, slots, lengths, asked)
    expected = [changed_logits(row.float(), one, ENDS).argmax() for row, one in zip(logits, sequences, strict=True)]
    assert tokens.tolist() == expected
    assert asked.history[slots, lengths].tolist() == expected
    of_tokens = logits.double().log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), of_tokens, atol=1e-5, rtol=0)
    assert sound.tolist() == [1] * len(sequences)
    assert len(set(expected)) > 5


def test_all_logits_change_as_on_the_cpu() -> None:
    logits, asked, slots, sequences = changed_rows(torch.float32, temperature=1.0, top_k=5)
    lengths = torch.tensor([len(one.tokens) for one in sequences], dtype=torch.int32)
    found = outputs(len(slots), CPU)
    statistics = launches(logits, torch.tensor(slots, dtype=torch.int32), lengths, asked, found, chunk=128)[0]
    statistics.run()
    scores = statistics.arguments["scores"]
    assert isinstance(scores, Tensor)
    for row, (original, sequence) in enumerate(zip(logits, sequences, strict=True)):
        torch.testing.assert_close(scores[row, :300], changed_logits(original, sequence, ENDS))


def test_of_equal_logits_the_first_is_taken() -> None:
    logits = torch.zeros(3, 400)
    logits[1, [130, 131, 390]] = 2
    logits[2, [5, 390]] = 2
    tokens, _, _ = run(logits, [0, 1, 2], [1, 1, 1], choices(3, 0, 4, CPU))
    assert tokens.tolist() == [0, 130, 5]


def noise(seeds: Tensor, length: int, tokens: int) -> Tensor:
    """Philox's words for seeds, a length and tokens, made noise of Gumbel's distribution; a row for each seed."""
    low = 0xFFFFFFFF
    words = [
        torch.arange(-(-tokens // 4)).expand(len(seeds), -1),
        torch.tensor(length),
        torch.tensor(0),
        torch.tensor(0),
    ]
    keys = [seeds[:, None] & low, seeds[:, None] >> 32 & low]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (second >> 32 & low) ^ words[1] ^ keys[0],
            second & low,
            (first >> 32 & low) ^ words[3] ^ keys[1],
            first & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    bits = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, :tokens]
    # The upper half counts down from the largest.
    uniform = torch.minimum(bits, low - bits).double() * 4.6566127342e-10 + 2.3283064e-10
    return -(-torch.log1p(-uniform)).log()


def chi_square(tokens: Tensor, shares: Tensor) -> tuple[float, int]:
    """How far tokens are from their shares, and the degrees of freedom."""
    times = torch.bincount(tokens, minlength=len(shares)).double()
    expected = shares * len(tokens)
    # Tokens that are rarely expected count as one.
    often = expected >= 5
    observed = torch.cat([times[often], times[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    there = wanted >= 1
    return float(((observed - wanted)[there] ** 2 / wanted[there]).sum()), int(there.sum()) - 1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 6},
        {"top_p": 0.6},
        {"min_p": 0.2},
        # Together, with top-p's or min-p's limit the highest.
        {"top_k": 12, "top_p": 0.85, "min_p": 0.01},
        {"top_k": 40, "top_p": 0.99, "min_p": 0.15},
    ],
    ids=str,
)
def test_draws_follow_the_narrowed_distribution(params: dict[str, Any]) -> None:
    row = logits_of(250, seed=2)
    logits = narrowed(row, SamplingParams(temperature=0.8, **params)).double()
    # What is drawn is the largest sum of logit and noise ...
    found = drawn(row, 14, chunk=128 if not params else 256, temperature=0.8, **params)
    expected = (logits + noise(seeds_of(4000), 2, 250)).argmax(-1)
    assert torch.equal(found, expected[:14])
    assert len(found.unique()) > 2
    # ... and that is a sample.
    shares = logits.softmax(-1)
    assert (shares[expected] > 0).all()
    apart, freedom = chi_square(expected, shares)
    assert freedom >= 3
    assert apart < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("params", [{}, {"top_k": 12, "top_p": 0.9}, {"repetition_penalty": 1.3}], ids=str)
def test_the_host_draws_what_the_kernels_draw(params: dict[str, Any]) -> None:
    """Where a step's tokens are chosen there, such as those after a draft that is a tree."""
    logits = logits_of(250, seed=2).expand(12, -1)
    asked = choices(12, 160, 40, CPU)
    sequences = [
        sequence_of([3, 4], [5, 6, 7][: 1 + slot % 3], temperature=1.7, seed=slot << 33 | 5, **params)
        for slot in range(12)
    ]
    for slot, sequence in enumerate(sequences):
        fill(asked, slot, sequence)
    found, _, _ = run(logits, list(range(12)), [len(each.tokens) for each in sequences], asked, 256)
    ranked = draw_tokens([draw_for(logits[0], each, ENDS, 0) for each in sequences])
    assert found.tolist() == [tokens[0].token for tokens in ranked]
    assert len(found.unique()) > 5


@triton.jit
def _threshold(scores, tokens, found, count, low, high, top, target, by_mass: tl.constexpr, tile: tl.constexpr):
    start = tl.load(found)
    key, left = lowest_that_stays(scores, tokens, count, start + low, start + high, target, top, 1.0, by_mass, tile)
    tl.store(found, key)
    tl.store(found + 1, left.to(tl.int64))


def keys_of(values: Tensor) -> Tensor:
    bits = values.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def kept(row: Tensor, target: float, by_mass: bool) -> Tensor:
    """Which logits of a row are not below what the kernels find."""
    scores, tokens = row.clone(), torch.arange(len(row), dtype=torch.int32)
    found = torch.zeros(2, dtype=torch.int64)
    low, high = int(keys_of(torch.tensor([float("-inf")]))), int(keys_of(row.max()[None])) + 1
    launch: Any = _threshold[(1,)]
    launch(scores, tokens, found, len(row), low, high, float(row.max()), target, by_mass, 64)
    # What was dropped on the way is below, and what is left is in its order.
    left = tokens[: int(found[1])].long()
    assert torch.equal(left, left.sort().values)
    assert torch.equal(scores[: len(left)], row[left])
    stays = keys_of(row) >= found[0]
    assert stays[left].sum() == stays.sum()
    return stays


def adversarial_rows() -> dict[str, Tensor]:
    nothing = float("-inf")
    rows = {
        "all equal": torch.full((400,), 3.25),
        "two values": torch.tensor([1.0, -1.0]).repeat(150),
        "huge range": torch.cat([logits_of(300), torch.tensor([3e38, -3e38, 1e30, -1e-40, 1e-40, 2e-45])]),
        "mostly impossible": torch.full((600,), nothing),
        "neighbours": (torch.full((400,), 10.0).view(torch.int32) + torch.arange(400, dtype=torch.int32)).view(
            torch.float32
        ),
        "coarse": logits_of(650, seed=4).bfloat16().float(),
        "negative": -logits_of(500, seed=5).abs() - 50,
        "few": torch.tensor([2.0, 1.0]),
    }
    rows["mostly impossible"][[3, 77, 599]] = torch.tensor([1.0, -20.0, 0.5])
    return rows


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in adversarial_rows().items()])
def test_exactly_what_top_k_and_top_p_ask_for_stays(row: Tensor) -> None:
    for k in {1, 3, 50, len(row) - 1} & set(range(1, len(row))):
        assert torch.equal(kept(row, k, False), row >= row.topk(k).values[-1]), k
    shares = row.double().softmax(-1)
    mass = (row.double() - row.max()).exp().sum()
    for p in (1e-6, 0.3, 0.95):
        stays = kept(row, float(p * mass), True)
        least = row[stays].min()
        # With all of the last value it is enough, without it is not.
        assert torch.equal(stays, row >= least)
        assert shares[stays].sum() >= p - 1e-5, p
        assert shares[row > least].sum() < p + 1e-5, p


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_narrowed_to_one_token_that_one_is_drawn() -> None:
    wishes = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.1, "min_p": 0.9}]
    asked = choices(len(wishes), 1, 4, CPU)
    for slot, params in enumerate(wishes):
        fill(asked, slot, sequence_of([1, 2], [], temperature=1.0, **params))
    for name, row in adversarial_rows().items():
        tokens, _, _ = run(row.expand(4, -1), [0, 1, 2, 3], [2] * 4, asked, 256, 256)
        # Equal logits may all stay.
        assert (row[tokens.long()] == row.max()).all(), name


def test_temperatures_may_be_tiny_or_huge() -> None:
    row = logits_of(200, seed=6)
    wishes: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}]
    for params in wishes:
        assert drawn(row, 1, temperature=1e-38, **params) == row.argmax()
    assert len(set(drawn(row, 20, temperature=1e6, top_k=3).tolist())) == 3


def test_a_choice_depends_on_nothing_but_its_own_row() -> None:
    logits = logits_of(6, 300, seed=7)
    asked = choices(9, 160, 40, CPU)
    wishes: list[dict[str, Any]] = [
        {"temperature": 1.1, "seed": 5},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.95, "seed": 2**62 + 3, "frequency_penalty": 1.0},
        {"temperature": 0},
        {"temperature": 1.4, "min_p": 0.01, "seed": 6, "repetition_penalty": 1.3},
        {"temperature": 2.0, "top_p": 0.9, "seed": 7, "logit_bias": {4: 3.0}},
        {"temperature": 1.1, "seed": 5},
    ]
    for slot, params in enumerate(wishes):
        fill(asked, slot, sequence_of([3, 4], [5, 5, slot], **params))
    logits[5] = logits[0]
    together, _, _ = run(logits, list(range(6)), [5] * 6, asked)
    assert together[0] == together[5]
    for slot, params in enumerate(wishes):
        elsewhere = choices(9, 160, 40, CPU)
        fill(elsewhere, 8 - slot, sequence_of([3, 4], [5, 5, slot], **params))
        alone, _, _ = run(logits[slot : slot + 1], [8 - slot], [5], elsewhere)
        assert alone[0] == together[slot]
    # Other seeds and other lengths give other noise.
    row = logits[:1].expand(12, -1)
    asked = choices(12, 0, 64, CPU)
    asked.temperature[:] = 2
    by_length, _, _ = run(row, list(range(12)), list(range(12)), asked, 512)
    assert len(set(by_length.tolist())) > 6
    assert len(set(drawn(logits[0], 12, chunk=512, temperature=2.0).tolist())) > 6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_without_a_finite_maximum_are_reported_and_harm_no_others() -> None:
    logits = logits_of(9, 300, seed=8)
    logits[1, 200] = float("nan")
    logits[2, 299] = float("inf")
    logits[4] = float("nan")
    logits[5] = float("-inf")
    logits[6, 0] = float("nan")
    logits[7, :290] = float("-inf")
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9, "top_p": 0.9}):
        asked, unharmed = (choices(9, 0, 8, CPU) for _ in range(2))
        for slot in range(9):
            for name, value in params.items():
                getattr(asked, name)[slot] = getattr(unharmed, name)[slot] = value
        tokens, logprobs, sound = run(logits, list(range(9)), [3] * 9, asked)
        good = [0, 3, 7, 8]
        assert sound.tolist() == [int(row in good) for row in range(9)]
        assert tokens[sound == 0].tolist() == [0] * 5
        expected, expected_logprobs, _ = run(logits[good], good, [3] * 4, unharmed)
        assert tokens[good].tolist() == expected.tolist()
        assert torch.equal(logprobs[good], expected_logprobs)
        assert (logits[good, expected.long()] > float("-inf")).all()


def test_rows_of_no_sequence_write_nothing() -> None:
    logits = logits_of(4, 300, seed=9)
    asked = choices(2, 1, 6, CPU)
    asked.temperature[:] = 1.0
    asked.top_k[:] = 4
    tokens, logprobs, sound = run(logits, [-1, 1, -5, 0], [2, 2, 2, 6], asked)
    assert tokens[[0, 2]].tolist() == [-1, -1]
    assert logprobs.isnan().tolist() == [True, False, True, False]
    assert sound.tolist() == [-9, 1, -9, 1]
    # The last one's history is full.
    assert asked.history.nonzero().tolist() == [[1, 2]]
    assert asked.history[1, 2] == tokens[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logprobs_are_those_before_any_change(dtype: torch.dtype) -> None:
    logits = (logits_of(3, 3000, seed=10) * 4).to(dtype)
    asked = choices(3, 2, 8, CPU)
    for slot in range(3):
        fill(asked, slot, sequence_of([1], [2, 2], temperature=1.5, top_p=0.99, logit_bias={9 * slot: 50.0}))
    of = torch.arange(3, dtype=torch.int32), torch.full((3,), 3, dtype=torch.int32)
    tokens, logprobs, _ = sample_tokens(logits, *of, asked)
    assert tokens.tolist() == [0, 9, 18]
    expected = logits.double().log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-5, rtol=1e-6)
