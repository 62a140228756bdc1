"""Deadlines of requests, without an engine."""

from __future__ import annotations

from smelt.runtime import SamplingParams
from smelt.runtime.requests.deadlines import Deadlines
from smelt.runtime.requests.sequence import Request


def request(name: str, arrived: float, deadline: float | None) -> Request:
    return Request(name, [1], SamplingParams(), 10, arrived=arrived, deadline=deadline)


def test_late_requests_are_named_once_and_in_order() -> None:
    running = {each.id: each for each in (request("b", 0, 2), request("a", 0, 1), request("none", 0, None))}
    deadlines = Deadlines(running)
    for each in running.values():
        deadlines.add(each)
    assert deadlines.passed(0.5) == []
    assert [each.id for each in deadlines.passed(5)] == ["a", "b"]
    assert deadlines.passed(9) == []


def test_a_new_request_of_an_old_name_has_its_own_deadline() -> None:
    running = {"a": request("a", 0, 1)}
    deadlines = Deadlines(running)
    deadlines.add(running["a"])
    running["a"] = request("a", 0.5, 10)
    deadlines.add(running["a"])
    assert deadlines.passed(2) == []
    assert deadlines.passed(11) == [running["a"]]


def test_what_ended_in_time_is_forgotten() -> None:
    running: dict[str, Request] = {}
    deadlines = Deadlines(running)
    for number in range(1000):
        name = str(number)
        running[name] = request(name, 0, 1e9)
        deadlines.add(running[name])
        del running[name]
    assert len(deadlines._heap) < 100
