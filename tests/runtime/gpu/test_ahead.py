"""The engine on the GPU's kernels, in Triton's interpreter or on a GPU, its steps started before the last have ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import Engine, RuntimeProblem, SamplingParams
from smelt.runtime.decoder.model import Model
from smelt.runtime.engine.executors.gpu_executor import GpuExecutor
from smelt.runtime.engine.setup import loading
from smelt.runtime.gpu import GpuOperators, step_kinds
from smelt.runtime.gpu.step_kinds import StepKind
from smelt.runtime.kernels.base.launch import Launch, may_overlap, noted, overlapping
from smelt.runtime.measure import counting
from smelt.runtime.measure.counting import count, count_decode
from smelt.runtime.weights.checkpoint import Checkpoint

from ..kernels.interpreter import DEVICE, interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DRAW = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(4, 4096, (length,), generator=DRAW).tolist() for length in (5, 40, 1, 17, 9)]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "max_model_len": 96,
}


@pytest.fixture
def both(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, Engine]]:
    """The same engine on the CPU, and on the kernels."""

    def build(architecture: str = "llama", **options: Any) -> tuple[Engine, Engine]:
        path = tiny(architecture, num_hidden_layers=1)
        given = {**OPTIONS, "quiet": True, **options}
        plain = Engine(path, **given)
        with monkeypatch.context() as patch:
            if DEVICE.type == "cpu":
                patch.setattr(loading, "_operators", lambda dtype, *_, **__: GpuOperators(dtype, DEVICE))
            ahead = Engine(path, device=DEVICE.type, **given)
        assert isinstance(ahead.executor, GpuExecutor)
        return plain, ahead

    return build


def _greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "temperature": 0, "ignore_eos": True, **more})


def test_tokens_are_the_same_and_come_at_most_a_step_later(both: Callable[..., tuple[Engine, Engine]]) -> None:
    """More prompts than may run, one longer than a step, penalties, biases, log probabilities, least lengths."""
    plain, ahead = both()
    params = [
        _greedy(logprobs=2),
        _greedy(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3),
        _greedy(logit_bias={7: 50.0}, max_tokens=3),
        _greedy(ignore_eos=False, min_tokens=4, stop_token_ids=list(range(4, 4096, 2))),
        _greedy(logprobs=0),
    ]
    expected = plain.generate(PROMPTS, params)
    found = ahead.generate(PROMPTS, params)
    for one, other in zip(found, expected, strict=True):
        mine, theirs = one.outputs[0], other.outputs[0]
        assert mine.token_ids == theirs.token_ids
        assert mine.finish_reason == theirs.finish_reason
        assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        for these, those in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
            assert these == pytest.approx(those, abs=1e-3)
    name, last = ahead.add_request(PROMPTS[0], params[0]), []
    assert ahead.step() == []  # the first step was only started
    while ahead.has_work:
        last = ahead.step()
    assert (last[0].request_id, last[0].outputs[0].token_ids) == (name, expected[0].outputs[0].token_ids)
    assert ahead.cache.free == ahead.cache.blocks


@pytest.mark.slow
def test_requests_that_the_host_must_see_run_beside_others(both: Callable[..., tuple[Engine, Engine]]) -> None:
    plain, ahead = both(max_num_batched_tokens=48)
    params = [_greedy(), _greedy(n=2), _greedy(beam_width=2), _greedy(prompt_logprobs=1), _greedy(max_tokens=2)]
    prompts = [prompt[:12] for prompt in PROMPTS]
    for one, other in zip(ahead.generate(prompts, params), plain.generate(prompts, params), strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]


@pytest.mark.slow
def test_sequences_that_give_way_go_on_where_they_were(both: Callable[..., tuple[Engine, Engine]]) -> None:
    """A cache too small for all: sequences are preempted while a token of theirs is still on its way."""
    plain, ahead = both()
    small = ahead.reservation.blocks
    ahead.cache._empty = ahead.cache._empty[small - 5 :]  # five blocks of sixteen positions
    ahead.cache.blocks = 5
    params = _greedy(max_tokens=20)
    prompts = [prompt[:14] for prompt in (PROMPTS[1], PROMPTS[3], PROMPTS[4])]
    found = ahead.generate(prompts, params)
    assert ahead.scheduler.preemptions > 0
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain.generate(prompts, params)]


def test_an_abort_in_flight_harms_nobody(both: Callable[..., tuple[Engine, Engine]]) -> None:
    plain, ahead = both()
    first = ahead.add_request(PROMPTS[0], _greedy(max_tokens=30))
    second = ahead.add_request(PROMPTS[4], _greedy())
    for _ in range(3):
        ahead.step()
    ahead.abort(first)
    third = ahead.add_request(PROMPTS[3], _greedy())
    done = {}
    while ahead.has_work:
        done |= {output.request_id: output for output in ahead.step() if output.finished}
    for name, prompt in ((second, PROMPTS[4]), (third, PROMPTS[3])):
        assert done[name].outputs[0].token_ids == plain.generate([prompt], _greedy())[0].outputs[0].token_ids
    assert ahead.cache.free == ahead.cache.blocks


@pytest.mark.slow
def test_logits_that_are_no_numbers_end_their_own_request(both: Callable[..., tuple[Engine, Engine]]) -> None:
    plain, ahead = both("gpt2")
    assert ahead.model._positions is not None
    ahead.model._positions[30] = float("nan")  # whoever gets as far as this position
    broken, sound = ahead.generate([PROMPTS[1][:28], PROMPTS[0]], _greedy())
    assert "NaN or infinite" in str(broken.error)
    assert sound.outputs[0].token_ids == plain.generate([PROMPTS[0]], _greedy())[0].outputs[0].token_ids


@pytest.mark.slow
def test_a_sequence_may_end_with_its_block_full_and_its_next_step_under_way(
    both: Callable[..., tuple[Engine, Engine]],
) -> None:
    plain, ahead = both()
    whole = plain.generate([PROMPTS[0]], _greedy(max_tokens=11))[0].outputs[0].token_ids
    last = next(i for i in range(10, 0, -1) if whole[i] not in whole[:i])
    prompt = PROMPTS[1][: 16 - last - 1]  # so that the last token is the block's
    tokens = plain.generate([prompt], _greedy(max_tokens=last + 1))[0].outputs[0].token_ids
    if tokens[-1] in tokens[:-1]:
        pytest.skip("the random model repeats itself")
    params = [_greedy(max_tokens=30, stop_token_ids=[tokens[-1]]), _greedy(max_tokens=14)]
    found = ahead.generate([prompt, PROMPTS[4]], params)
    assert [output.error for output in found] == [None, None]
    assert found[0].outputs[0].token_ids == tokens
    name = ahead.add_request(PROMPTS[0], _greedy(max_tokens=30))
    while ahead.is_running(name) and len(ahead.core.requests[name].sequences[0].tokens) < 16:
        ahead.step()
    ahead.abort(name)
    assert ahead.generate([PROMPTS[4]], _greedy())[0].error is None


@pytest.mark.slow
def test_blocks_that_came_while_the_host_looked_are_known_later(both: Callable[..., tuple[Engine, Engine]]) -> None:
    plain, ahead = both(max_model_len=128, enable_prefix_caching=False)
    params = [_greedy(max_tokens=44), _greedy(n=2, max_tokens=30)]
    prompts = [PROMPTS[4], PROMPTS[0]]
    for one, other in zip(ahead.generate(prompts, params), plain.generate(prompts, params), strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_in_any_company(both: Callable[..., tuple[Engine, Engine]]) -> None:
    _, ahead = both()
    drawn = SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, top_k=50, seed=3, ignore_eos=True, logprobs=1)
    alone = ahead.generate([PROMPTS[0]], drawn)[0].outputs[0]
    for company in (_greedy(), _greedy(n=2)):
        beside = ahead.generate(PROMPTS[:2], [drawn, company])[0].outputs[0]
        assert alone.token_ids == beside.token_ids
        assert alone.cumulative_logprob == pytest.approx(beside.cumulative_logprob, abs=1e-4)
    other = ahead.generate([PROMPTS[0]], SamplingParams(**{**drawn.__dict__, "seed": 4}))[0].outputs[0].token_ids
    assert alone.token_ids != other


@pytest.mark.parametrize("most", [4, 48, 100, 256])
def test_every_step_has_been_captured(most: int, both: Callable[..., tuple[Engine, Engine]]) -> None:
    _, ahead = both(max_num_seqs=most, max_num_batched_tokens=700, max_model_len=32)
    executor = ahead.executor
    assert isinstance(executor, GpuExecutor)
    captured = set(executor._kinds.all())
    for sequences in range(1, most + 1):
        kind = executor._kinds.of([1] * sequences)
        assert kind in captured
        assert sequences <= kind.tokens == kind.sequences <= 2 * sequences
    for tokens in (2, 17, 300, 512, 513, 613, 700):
        others = min(tokens - 2, most - 1)
        for counts in ([tokens], [tokens - others, *[1] * others]):
            kind = executor._kinds.of(counts)
            assert kind in captured
            assert kind.prompts
            assert kind.singles == (1 in counts) or tokens > 512
            # What fills a long step up costs its products.
            assert (
                tokens
                <= kind.tokens
                <= (2 * tokens if tokens < 32 else 1.5 * tokens if tokens <= 512 else 1.25 * tokens)
            )


@pytest.mark.slow
@interpreted
def test_a_long_step_is_computed_as_if_all_sequences_were_in_it(
    both: Callable[..., tuple[Engine, Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_kinds, "LONG", 8)
    plain, ahead = both()
    expected, found = (engine.generate(PROMPTS, _greedy()) for engine in (plain, ahead))
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]


@interpreted
def test_a_step_asks_the_host_for_nothing(both: Callable[..., tuple[Engine, Engine]]) -> None:
    """It could not be captured otherwise. Tensors without values fail where somebody wants to see one."""
    for architecture in ("llama", "gpt2", "gemma2"):
        _, ahead = both(architecture)
        executor = ahead.executor
        assert isinstance(executor, GpuExecutor)
        for kind in (StepKind(4, 4, False, True), StepKind(24, 4, True, True), StepKind(24, 4, True, False)):
            found = count(lambda executor=executor, kind=kind: executor._steps.body(kind))
            assert found.kinds["logit_statistics"] == found.kinds["choose_tokens"] == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"block_size": 8}, "block_size is 8; on a GPU it must be a multiple of 16")],
)
def test_options_that_the_kernels_cannot_take_are_reported(
    options: dict[str, Any], sentence: str, both: Callable[..., tuple[Engine, Engine]]
) -> None:
    with pytest.raises(RuntimeProblem, match=sentence):
        both(**options)


def test_int4_needs_the_kernels(tiny: Callable[..., Path], both: Callable[..., tuple[Engine, Engine]]) -> None:
    with pytest.raises(RuntimeProblem, match="kv_cache_dtype int4 is for GPUs"):
        Engine(tiny("llama"), kv_cache_dtype="int4", quiet=True)


def test_steps_of_many_rows_do_not_overlap(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it takes longer; and none do where that is switched off."""
    model = Model(Checkpoint(tiny("llama", num_hidden_layers=1)), GpuOperators(torch.float32, torch.device("cpu")))
    seen = list[bool]()

    def note(_: Launch) -> None:
        seen.append(may_overlap())

    monkeypatch.setattr(counting, "noted", lambda _: noted(note))
    for sequences, allowed in ((1, True), (63, True), (64, False)):
        seen.clear()
        count_decode(model, sequences, 16)
        assert set(seen) == {allowed}
    seen.clear()
    with overlapping(False):
        count_decode(model, 1, 16)
    assert set(seen) == {False}
