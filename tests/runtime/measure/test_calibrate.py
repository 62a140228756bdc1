"""Calibration on real engines: what is recorded is what was computed, and a calibration can be read and used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from smelt.models.directory.directory import ModelDirectory
from smelt.quant.scheme import resolve
from smelt.runtime import SamplingParams
from smelt.runtime.costs.calibration import Calibration
from smelt.runtime.costs.model_size import model_size
from smelt.runtime.costs.work import StepWork
from smelt.runtime.measure.calibrate import Shape, StepRecorder, calibrate, table
from smelt.runtime.measure.random_checkpoint import write_random_checkpoint

from ..drive import engine

TINY = (Shape(64, 128, 2, 2, 1, 512), Shape(128, 256, 3, 4, 2, 512))


def test_recorded_steps_are_all_that_was_computed(tiny: Callable[..., Path]) -> None:
    path = tiny()
    running = engine(path, max_model_len=96, enable_prefix_caching=False)
    recorder = StepRecorder(running)
    sizes = [(40, 5), (7, 12), (60, 1)]
    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in sizes]
    running.generate([[1 + i] * prompt for i, (prompt, _) in enumerate(sizes)], params)
    works = [each[1] for each in recorder.times if each is not None]
    assert sum(work.tokens for work in works) == sum(prompt + output - 1 for prompt, output in sizes)
    assert sum(work.sequences for work in works) == sum(output for _, output in sizes)
    # Each token reads all before it and itself: pairs, over all steps, are those of whole sequences.
    lengths = [prompt + output - 1 for prompt, output in sizes]
    assert sum(work.pairs for work in works) == sum(length * (length + 1) // 2 for length in lengths)
    steps = recorder.steps(model_size(ModelDirectory("tiny", path)))
    assert len(steps) == len(works) - 1
    assert all(step.seconds > 0 for step in steps)


@pytest.mark.parametrize("scheme", [None, "W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16"])
def test_random_checkpoints_are_served(scheme: str | None, tmp_path: Path) -> None:
    chosen = None if scheme is None else resolve(scheme, 64 if scheme == "W4A16" else None)
    write_random_checkpoint(tmp_path / "model", TINY[0].config(), chosen)
    size = model_size(ModelDirectory("random", tmp_path / "model"))
    assert size.hidden == 64
    assert size.linears[0].weight_bits == (16 if chosen is None else chosen.args.num_bits)
    running = engine(tmp_path / "model", dtype="auto", max_model_len=64)
    found = running.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert len(found.outputs[0].token_ids) == 4


def test_a_calibration_of_this_machine(tmp_path: Path) -> None:
    said: list[str] = []
    found = calibrate(
        shapes=TINY, formats=("bfloat16", "W4A16 g64"), passes=1, seconds=0.4, command="test", log=said.append
    )
    assert len(said) == 4
    assert set(found.kernels) == {"w16a16", "w4a16"}
    assert set(found.left_out) == {f"{shape.name} {form}" for shape in TINY for form in ("bfloat16", "W4A16 g64")}
    assert found.ranges["layers"] == (2, 3)
    assert found.spread == pytest.approx(max(max(ratio, 1 / ratio) - 1 for ratio in found.left_out.values()))
    assert all(name in table(found) for name in found.left_out)
    found.write(tmp_path / "here.json")
    write_random_checkpoint(tmp_path / "model", TINY[1].config())
    cost = Calibration.read(tmp_path / "here.json").cost(model_size(ModelDirectory("random", tmp_path / "model")))
    one, many = (StepWork(n, n, 20 * n, 20 * n, chunks=n) for n in (1, 32))
    assert 0 < cost.seconds(one) < cost.seconds(many)
