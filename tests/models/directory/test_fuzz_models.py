"""Model directories that chance has damaged: whatever is in one, a command works or says what is wrong.

What goes wrong here becomes an example in ``test_bad_models.py``, where each has its sentence.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smelt.compress import Recipe, run

from ...commands import invoke

# Of a case, which takes a tenth of a second and some megabytes: computing, waiting on a machine with other work, memory.
_COMPUTING, _WAITING, _BYTES = 10, 120, 2 << 30
_LINES = 13  # of a dry run: four, eight tensors that do not match, and how many more
_OPENING = ("dry-run", "inspect", "bench", "chat", "gguf")

# Values that nothing should choke on, wherever they stand.
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-4, 4),
    st.sampled_from([10**9, -(2**63), 2**64, 10**30, 0.5, -1.0, float("inf"), float("nan"), 1e308]),
    st.sampled_from(["", "x", "\x00", "\ud800", "../x", "a" * 300, "float32", "nope"]),
    st.recursive(st.integers(-2, 2), lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=2), max_leaves=4),
)  # fmt: skip
junk = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"null", b"[]", b"{}", b"[" * 5000, b'{"a":' * 3000, b'"\\ud800"', b"\xff\xfe", b"9" * 5000]),
)
# Where in nested data, as a share of all places there are; and what to do there.
edits = st.lists(st.tuples(st.floats(0, 0.999), st.sampled_from(["set", "drop", "add"]), odd), min_size=1, max_size=3)

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain model and a quantized one, each with every file that is fuzzed."""
    from ...tiny import make_model, save_model

    scratch = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    plain = save_model(make_model("llama", torch.bfloat16, **sizes), scratch / "plain")
    steps = [{"quantize": {"scheme": "W4A16", "group_size": 32, "rounding": "nearest"}}]
    data = {
        "model": str(plain),
        "output": str(scratch / "out"),
        "calibrate": {"samples": 2, "length": 16},
        "evaluate": False,
    }
    packed = run(Recipe.model_validate(data | {"steps": steps}), progress=False).checkpoint
    for path in (plain, packed):
        header = _header(path / "model.safetensors")
        weight_map = dict.fromkeys((name for name in header if name != "__metadata__"), "model.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {"plain": plain, "packed": packed}


def _profile(cases: int) -> settings:
    """The same cases every time, unless SMELT_FUZZ is set: what a change did not cause must not refuse it."""
    return settings(
        max_examples=cases, derandomize="SMELT_FUZZ" not in os.environ, deadline=None, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cases", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_damaged_directory_is_used_or_refused(cases: int, models: dict[str, Path], tmp_path: Path) -> None:
    @_profile(cases)
    @given(st.sampled_from(sorted(models)), st.sampled_from(FILES), st.one_of(junk, edits), st.sampled_from(_OPENING))
    def check(model: str, name: str, damage: bytes | list[Any], command: str) -> None:
        with _copy(models[model], tmp_path) as path:
            if isinstance(damage, bytes):
                (path / name).write_bytes(damage)
            else:
                _edit(path / name, lambda data: _apply(data, damage))
            _check(command, path, tmp_path)

    check()


def _check(command: str, path: Path, scratch: Path) -> None:
    with _bounds():
        done = invoke(command, path, scratch)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code in (0, 1), done.output
    assert "Traceback" not in done.output
    if done.exit_code:
        assert len(done.output.splitlines()) <= _LINES, done.output


@contextmanager
def _bounds() -> Iterator[None]:
    """A limit on time, and on memory beyond what this process has."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"computed for more than {_COMPUTING} seconds, or waited for {_WAITING}")

    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (int(used.split()[1]) * 1024 + _BYTES, before[1]))
    before_handlers = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.alarm(_WAITING)
    signal.setitimer(signal.ITIMER_PROF, _COMPUTING)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before_handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def _copy(model: Path, scratch: Path) -> Iterator[Path]:
    path = scratch / "model"
    shutil.copytree(model, path)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _header(file: Path) -> dict[str, Any]:
    raw = file.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def _edit(file: Path, change: Callable[[Any], object]) -> None:
    """Change a file's JSON; of safetensors its header's."""
    if file.suffix != ".safetensors":
        data = json.loads(file.read_text()) if file.exists() else {}
        change(data)
        file.write_text(json.dumps(data))
        return
    header, raw = _header(file), file.read_bytes()
    tensors = raw[8 + int.from_bytes(raw[:8], "little") :]
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + tensors)


def _apply(data: Any, changes: list[tuple[float, str, Any]]) -> None:
    for share, kind, value in changes:
        places = list(_places(data))
        if not places:
            return
        holder, key = places[int(share * len(places))]
        if kind == "set":
            holder[key] = value
        elif kind == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder["added"] = value
        else:
            holder.append(value)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested data, but not each of a list's many."""
    keys = list(data) if isinstance(data, dict) else list(range(min(len(data), 4)))
    for key in keys:
        yield data, key
        if isinstance(data[key], (dict, list)) and len(data[key]) < 500:
            yield from _places(data[key])
