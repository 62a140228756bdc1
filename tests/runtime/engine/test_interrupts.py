"""An interrupt while a step is computed leaves an engine that goes on as if there had been none."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from smelt.runtime import Engine, SamplingParams
from smelt.system.interrupts import waiting_interrupts

LONG = list(range(5, 105))  # in pieces, of which the first ones are in the prefix cache before the last is computed
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def usual_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _finished(engine: Engine) -> dict[str, list[int]]:
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            if output.finished:
                found[output.request_id] = output.outputs[0].token_ids
    return found


@pytest.mark.parametrize("interrupted", [0, 1, 2, 3, 4, 10])  # 10 is the last step
def test_requests_and_the_prefix_cache_stay_right(tiny: Callable[..., Path], interrupted: int) -> None:
    options: dict[str, Any] = {"quiet": True, "kv_cache_memory_bytes": 1 << 24, "max_num_batched_tokens": 32}
    path = tiny("llama")
    expected = Engine(path, **options).generate([LONG], GREEDY)[0].outputs[0].token_ids
    engine = Engine(path, **options)
    execute, step = engine.executor.execute, 0

    def with_a_signal(plan: Any) -> Any:
        nonlocal step
        step += 1
        if step == interrupted + 1:
            signal.raise_signal(signal.SIGINT)
        return execute(plan)

    engine.executor.execute = with_a_signal  # type: ignore[method-assign]
    name = engine.add_request(LONG, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        _finished(engine)
    assert step == interrupted + 1
    assert engine.has_work
    assert _finished(engine)[name] == expected
    assert engine.generate([LONG], GREEDY)[0].outputs[0].token_ids == expected


def test_a_second_interrupt_does_not_wait() -> None:
    reached = []

    def twice_interrupted() -> None:
        with waiting_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached.append("after the first")
            signal.raise_signal(signal.SIGINT)
            reached.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        twice_interrupted()
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_interrupts_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with waiting_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
