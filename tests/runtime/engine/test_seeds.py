"""Random numbers of requests without a seed."""

from __future__ import annotations

from contextlib import closing

import pytest
from smelt.runtime import Engine, SamplingParams
from smelt.system.errors import RuntimeProblem

from ...tiny import SMELT_6M

WARM = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)


def answers(seed: int, *params: SamplingParams) -> list[list[int]]:
    """Of one prompt, request after request."""
    with closing(Engine(SMELT_6M, dtype="float32", quiet=True, max_num_seqs=4, seed=seed)) as engine:
        return [engine.generate(["The house"], each)[0].outputs[0].token_ids for each in params]


def test_the_same_request_has_another_answer_each_time() -> None:
    found = answers(0, WARM, WARM, WARM)
    assert len({tuple(each) for each in found}) == 3
    with closing(Engine(SMELT_6M, dtype="float32", quiet=True, max_num_seqs=4)) as engine:
        together = engine.generate(["The house"] * 3, WARM)
    assert len({tuple(each.outputs[0].token_ids) for each in together}) == 3


def test_an_engines_seed_repeats_them() -> None:
    assert answers(7, WARM, WARM) == answers(7, WARM, WARM)
    assert answers(7, WARM) != answers(8, WARM)


def test_a_requests_seed_is_its_own_whatever_came_before() -> None:
    own = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    assert answers(0, own)[0] == answers(1, WARM, own)[1]


def test_the_coldest_temperature_is_greedy() -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    coldest = SamplingParams(max_tokens=12, temperature=1e-40, ignore_eos=True)
    assert answers(0, greedy) == answers(0, coldest)
    with pytest.raises(RuntimeProblem, match=r"repetition_penalty is 1e-320; it must be from 0\.001 to 1000"):
        SamplingParams(repetition_penalty=1e-320)


def test_numbers_that_no_device_holds_are_as_good_as_the_largest() -> None:
    engine = Engine(SMELT_6M, dtype="float32", quiet=True, max_num_seqs=4, max_model_len=64)
    wide = SamplingParams(max_tokens=None, min_tokens=2**40, top_k=2**40)
    with closing(engine):
        made = engine._new.of_prompt([1, 2], wide, None, {}, salt=b"")
    assert made.params.top_k == engine.model.spec.vocabulary
    assert made.params.min_tokens == 64
