"""The thread that runs an engine for asyncio tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from smelt.runtime import RuntimeProblem, SamplingParams
from smelt.runtime.engine.engine import Engine
from smelt.runtime.engine.engine_thread import EngineThread
from smelt.runtime.engine.loop import Stream
from smelt.runtime.engine.setup.loading import in_own_thread

from ...tiny import SMELT_6M
from ..drive import engine
from ..random_adapter import adapter_of

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def running() -> Engine:
    return engine(SMELT_6M)


def _idle(running: Engine) -> bool:
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        if not running.has_work and not running.loop.arriving:
            return True
        time.sleep(0.005)
    return False


def test_a_slow_reader_gets_the_latest_output(running: Engine) -> None:
    wanted = running.generate([[5, 6, 7]], GREEDY)[0].outputs[0]

    async def read() -> list[int]:
        lengths = []
        stream = running.start([5, 6, 7], GREEDY)
        async for output in stream:
            lengths.append(len(output.outputs[0].token_ids))
            await asyncio.sleep(0.5)
        assert output.outputs[0].token_ids == wanted.token_ids
        return lengths

    lengths = asyncio.run(read())
    assert lengths[-1] == 30
    assert len(lengths) < 10
    assert lengths == sorted(lengths)


def test_who_drives_the_loop_gets_all_outputs_after_a_stream(running: Engine) -> None:
    """Its thread, which began with the stream, leaves the requests of others alone."""

    async def read() -> None:
        async for _ in running.stream([5, 6, 7], GREEDY):
            pass

    asyncio.run(read())
    name, lengths = running.add_request([5, 6, 7], GREEDY), []
    while running.has_work:
        lengths += [len(each.outputs[0].token_ids) for each in running.step() if each.request_id == name]
    assert lengths == [*range(1, 31)]


def test_who_drives_the_loop_gets_what_others_computed(running: Engine) -> None:
    """Streams and `generate` compute steps, too: no output of another request is lost, but those before its latest."""
    wanted = running.generate([[9, 10, 11]], GREEDY)[0].outputs[0].token_ids

    async def both() -> None:
        stream = running.start([5, 6, 7], GREEDY)
        first = running.add_request([9, 10, 11], GREEDY)
        await stream.last()
        second = running.add_request([9, 10, 11], GREEDY)
        running.generate([[5, 6, 7]], GREEDY)
        found = {}
        while running.has_work:
            found |= {each.request_id: each for each in running.step()}
        assert [(found[name].finished, found[name].outputs[0].token_ids) for name in (first, second)] == [
            (True, wanted),
            (True, wanted),
        ]

    asyncio.run(both())


def test_closing_aborts_before_the_next_step(running: Engine) -> None:
    async def leave() -> None:
        stream = running.start([5, 6, 7], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        await anext(stream)
        stream.close()
        stream.close()

    asyncio.run(leave())
    assert _idle(running)
    running.cache.check([])


def test_a_reader_whose_loop_has_ended_holds_nothing(running: Engine) -> None:
    async def leave() -> None:
        running.start([5, 6, 7], SamplingParams(temperature=0, max_tokens=400 // 4, ignore_eos=True))

    asyncio.run(leave())
    assert _idle(running)
    running.cache.check([])


def test_several_loops_share_an_engine(running: Engine) -> None:

    wanted = running.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    found: list[list[int]] = []

    async def whole() -> list[int]:
        tokens: list[int] = []
        async for output in running.start([5, 6, 7], GREEDY):
            tokens = output.outputs[0].token_ids
        return tokens

    threads = [threading.Thread(target=lambda: found.append(asyncio.run(whole()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [wanted] * 4


def test_functions_run_between_steps_and_their_errors_come_back(running: Engine) -> None:
    async def both() -> tuple[int, str]:
        good = await running.loop.result(lambda: running.cache.blocks)
        try:
            await running.loop.result(lambda: 1 // 0)
        except ZeroDivisionError as error:
            return good, str(error)
        return good, ""

    blocks, problem = asyncio.run(both())
    assert blocks == running.cache.blocks
    assert "zero" in problem


def test_a_step_that_fails_ends_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine(SMELT_6M)
    execute = running.executor.execute
    failures = iter([True])

    def failing(plan: object) -> object:
        if next(failures, False):
            raise RuntimeError("the device is gone")
        return execute(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(running.executor, "execute", failing)

    async def twice() -> list[str | None]:
        errors = []
        for _ in range(2):
            async for output in running.start([5, 6, 7], GREEDY):
                last = output
            errors.append(last.error)
        return errors

    first, second = asyncio.run(twice())
    assert "failed while computing" in (first or "")
    assert second is None


def test_a_name_that_is_taken_is_an_error_of_its_own_request(running: Engine) -> None:
    async def both() -> list[str | None]:
        async def last(stream: Stream) -> str | None:
            async for output in stream:
                error = output.error
            return error

        first, second = (running.start([5, 6, 7], GREEDY, id="same") for _ in range(2))
        return list(await asyncio.gather(last(first), last(second)))

    first, second = asyncio.run(both())
    assert first is None
    assert "named 'same' is running already" in (second or "")
    assert _idle(running)


def test_what_cannot_be_served_is_refused_at_once(running: Engine) -> None:
    async def ask() -> None:
        running.start([5] * 5000, GREEDY)

    with pytest.raises(RuntimeProblem, match="max_model_len"):
        asyncio.run(ask())


def test_engines_may_share_a_thread_and_leave_it() -> None:
    thread = EngineThread()
    first, second = (in_own_thread(lambda: engine(SMELT_6M, thread=thread)) for _ in range(2))

    async def both() -> list[list[int]]:
        async def tokens(running: Engine) -> list[int]:
            async for output in running.stream([5, 6, 7], GREEDY):
                last = output
            return last.outputs[0].token_ids

        return list(await asyncio.gather(tokens(first), tokens(second), tokens(first)))

    found = asyncio.run(both())
    assert found == [first.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids] * 3
    for running in (first, second):
        running.loop.close()
    deadline = time.monotonic() + 5
    while thread.is_running:
        assert time.monotonic() < deadline, "the thread has not ended"
        time.sleep(0.01)
    with pytest.raises(RuntimeProblem, match="closed"):
        asyncio.run(both())


def test_a_member_that_leaves_hands_over_what_it_has() -> None:
    """Aborted and closed within one step, whose end is waited for."""
    running = engine(SMELT_6M)
    execute = running.executor.execute

    def slow(plan: object) -> object:
        time.sleep(0.2)
        return execute(plan)  # type: ignore[arg-type]

    running.executor.execute = slow  # type: ignore[assignment]

    async def leave() -> str | None:
        stream = running.start([5, 6, 7], GREEDY)
        await anext(stream)
        stream.close()
        await asyncio.to_thread(running.loop.close)
        async for output in stream:
            reason = output.outputs[0].finish_reason
        return reason

    assert asyncio.run(asyncio.wait_for(leave(), 20)) == "abort"


def test_an_adapter_that_is_unloaded_meanwhile_is_an_error(running: Engine, tmp_path: Path) -> None:
    adapter_of(SMELT_6M, tmp_path, target_modules=["q_proj"])
    running.load_adapter("mine", tmp_path)

    async def ask() -> str | None:
        busy = threading.Event()
        running.loop.call(busy.wait)  # what comes now waits behind it
        stream = running.start([5, 6, 7], GREEDY, adapter="mine")
        running.unload_adapter("mine")
        busy.set()
        return (await stream.last()).error

    assert "unloaded meanwhile" in (asyncio.run(ask()) or "")


def test_what_fails_while_loading_apart_is_raised() -> None:
    with pytest.raises(RuntimeProblem, match="max_model_len"):
        in_own_thread(lambda: engine(SMELT_6M, max_model_len=1))
