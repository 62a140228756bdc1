"""The predicted time of a decode step: its arithmetic by hand, its reading of machine code, and its launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime.engine.executors.gpu_executor import GpuExecutor
from smelt.runtime.engine.setup import loading
from smelt.runtime.engine.setup.config import EngineConfig
from smelt.runtime.engine.setup.parts import EngineParts
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.gpu.step_kinds import StepKind
from smelt.runtime.kernels.base.launch import Launch, noted
from smelt.runtime.kernels.base.workspace import set_apart

from benchmarks.gpu import random_checkpoints
from benchmarks.gpu.meta_model import FORMATS, changes_of
from benchmarks.gpu.random_checkpoints import LLAMA, QWEN, TINY
from benchmarks.prediction.device import H100
from benchmarks.prediction.machine_code import Code, CodeCosts, Loop, costs_of_code
from benchmarks.prediction.step import Asked, LaunchGroup, Prediction, step_of
from benchmarks.prediction.table import beside, measured_rows
from benchmarks.prediction.timing_model import Ideas, terms_of, with_norm
from benchmarks.prediction.work import Lengths, Work, name_of, work_of

US = 1e-6
LOOP = Loop(0, 99, 100, 4, 4)
# 100 instructions before, 100 in the loop, 50 after; 4 warps; 8 programs fit a unit.
COSTS = CodeCosts(64, 16384, 4, 8, 100, 50, 80, LOOP, None, 0, 20, False, -1, False)
WORK = Work("copy", 1056, 10**9, 10**9, 32768, trips=16)
CYCLE = 1 / 1.755e9


def test_a_copy_takes_its_bytes_at_the_stated_share() -> None:
    terms = terms_of(WORK, COSTS, H100, Ideas())
    assert terms.memory == pytest.approx(10**9 / (0.92 * 3.35e12))
    assert terms.bound == "memory"
    # 32 warps of a unit share 4 schedulers, 8 each, which fill 90% of the slots.
    alone = 8 / 0.9 * CYCLE
    assert terms.start == pytest.approx(100 * alone + 0.6 * US)
    assert terms.total == pytest.approx(1.3 * US + terms.start + terms.memory + 50 * alone)


def test_few_bytes_on_their_way_are_few_bytes_a_second() -> None:
    """Little's law: 66 programs with 4096 bytes each, renewed every 0.8 µs."""
    work = replace(WORK, programs=66, in_flight=4096)
    assert terms_of(work, COSTS, H100, Ideas()).memory == pytest.approx(10**9 / (66 * 4096 / (0.8 * US)))


def test_the_last_wave_has_fewer_bytes_on_their_way() -> None:
    slots = 8 * 132
    work = replace(WORK, programs=slots + 33, in_flight=2048)
    each = 10**9 / (slots + 33)
    expected = slots * each / min(0.92 * 3.35e12, slots * 2048 / (0.8 * US)) + 33 * each / (33 * 2048 / (0.8 * US))
    assert terms_of(work, COSTS, H100, Ideas()).memory == pytest.approx(expected)


def test_instructions_take_issue_slots() -> None:
    """Twice as many programs on a unit as fill a scheduler take twice as long; one warp alone waits for itself."""
    full = terms_of(replace(WORK, programs=132 * 8), COSTS, H100, Ideas())
    assert full.issue == pytest.approx(16 * 100 * 8 / 0.9 * CYCLE)
    alone = terms_of(replace(WORK, programs=132), COSTS, H100, Ideas())
    assert alone.issue == pytest.approx(16 * 100 * 2.5 * CYCLE)
    assert alone.chain == pytest.approx(max(16 * 100 * 2.5, 16 * 4 * 33) * CYCLE)
    one_warp = terms_of(replace(WORK, programs=132 * 2), replace(COSTS, warps=1), H100, Ideas())
    assert one_warp.issue == pytest.approx(16 * 100 * 2.5 * CYCLE)


def test_tensor_cores_and_the_second_level_cache_bind_where_they_must() -> None:
    many = terms_of(replace(WORK, memory=10**6, operations=1e12), replace(COSTS, new_matrix=True), H100, Ideas())
    assert (many.bound, many.tensor) == ("tensor", pytest.approx(1e12 / 989e12))
    read = terms_of(replace(WORK, memory=10**6, l2=10**10), COSTS, H100, Ideas())
    assert (read.bound, read.l2) == ("l2", pytest.approx(10**10 / 5.5e12))
    one_unit = terms_of(replace(WORK, programs=1, memory=0, l2=10**6), COSTS, H100, Ideas())
    assert one_unit.l2 == pytest.approx(10**6 / (64 * 1.755e9))


def test_sums_of_parts_are_a_tail() -> None:
    shared = replace(WORK, programs=132, shares=4, reduces=1, sums=5_500_000, last_sums=1000)
    alone = 2.5 * CYCLE
    expected = 80 * alone + 3 * 0.2 * US + (0.2 * US + 20 * alone) + 1 * US
    assert terms_of(shared, COSTS, H100, Ideas()).tail == pytest.approx(expected)


def test_dependent_launch_hides_what_comes_before_the_wait() -> None:
    without, launched = (terms_of(WORK, COSTS, H100, Ideas(dependent)) for dependent in (False, True))
    assert launched.gap == pytest.approx(0.4 * US)
    assert launched.start == pytest.approx(0.6 * US)
    assert launched.memory == without.memory
    early = terms_of(WORK, COSTS, H100, Ideas(True, prefetch=True), idle=1 * US)
    assert early.start == pytest.approx(0.2 * US)
    # While the kernel before ends, and for the gap, memory is free.
    assert without.memory - early.memory == pytest.approx(1.4 * US)
    in_code = terms_of(WORK, replace(COSTS, waits=60), H100, Ideas())
    assert in_code.gap == pytest.approx(0.4 * US)
    assert in_code.start == pytest.approx(40 * 8 / 0.9 * CYCLE + 0.6 * US)
    assert terms_of(WORK, replace(COSTS, waits=60), H100, Ideas(False)) == without


def test_torch_operators_wait_whatever_is_assumed() -> None:
    assert terms_of(replace(WORK, memory=0), None, H100, Ideas(True, prefetch=True)).gap == pytest.approx(1.3 * US)


def test_a_norm_inside_is_computed_by_every_program() -> None:
    normed = with_norm(WORK, 4096, 2, warps=4)
    assert (normed.l2_reads, normed.extra) == (1, 60 + 5 * 64)


SASS = """
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   ACQBULK ;
        /*0030*/               @P1 BRA 0x00b0 ;
        /*0040*/                   HMMA.16816.F32.BF16 R16, R4, R8, R16 ;
        /*0050*/               @P2 BRA 0x0080 ;
        /*0060*/                   MOV R1, R2 ;
        /*0070*/                   MOV R1, R2 ;
        /*0080*/                   HMMA.16816.F32.BF16 R20, R4, R8, R16 ;
        /*0090*/                   HMMA.16816.F32.BF16 R24, R4, R8, RZ ;
        /*00a0*/              @!P0 BRA 0x0040 ;
        /*00b0*/               @P3 EXIT ;
        /*00c0*/                   FADD R1, R2, R3 ;
        /*00d0*/                   FADD R1, R2, R3 ;
        /*00e0*/              @!P4 BRA 0x00d0 ;
        /*00f0*/                   STG.E [R2], R16 ;
        /*0100*/                   EXIT ;
        /*0110*/                   BRA 0x0110 ;
        /*0120*/                   NOP ;
"""


def test_machine_code_is_read() -> None:
    code = Code(SASS)
    assert len(code.instructions) == 17
    # The shortest iteration leaves out two moves; of three products two add to each other.
    assert code.loops == [Loop(4, 10, 5, 3, 2), Loop(13, 14, 2, 0, 0)]
    costs = costs_of_code(code, 128, 40000, 4, H100)
    assert (costs.before, costs.after, costs.after_all) == (4, 6, 4)
    assert (costs.main, costs.masked, costs.reduce, costs.scan) == (code.loops[0], None, 2, 0)
    assert (costs.waits, costs.reads_early, costs.new_matrix) == (3, True, False)
    assert costs.residents == 4  # 128 registers of 128 threads
    plain = costs_of_code(Code(SASS.replace("HMMA", "FFMA").replace("ACQBULK", "NOP")), 16, 100000, 8, H100)
    assert (plain.main, plain.waits, plain.reads_early, plain.residents) == (None, -1, False, 2)
    # Past both loops, which it skips or runs once.
    assert plain.before == 4 + 6


@pytest.mark.parametrize("stored", random_checkpoints.FORMATS)
def test_the_launches_are_those_of_a_checkpoint(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without memory against the same one written, read and packed, on the kernels' own operators."""
    size = replace(TINY, tied=False)
    path = random_checkpoints.write(tmp_path, size, stored, torch.device("cpu"))
    cpu = torch.device("cpu")
    monkeypatch.setattr(loading, "_operators", lambda dtype, *_, **__: GpuOperators(dtype, cpu))
    _, model = loading.load_model(path, log=print)
    launched: list[Launch] = []
    with torch.inference_mode(), set_apart():
        store: Any = model.keys_values(8, 16, torch.bfloat16)
        config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=2)
        executor = GpuExecutor(EngineParts(model, store, 8, frozenset(), config, 64))
        with noted(launched.append):
            executor._steps.body(StepKind(2, 2, False, True))
    predicted = [one for one in step_of(Asked(size, stored, 2, 64)).launches if isinstance(one, Launch)]

    def facts(launch: Launch) -> tuple[Any, ...]:
        kept = ("FORMAT", "KIND", "G", "GATE", "SCALE_TYPE", "NORM", "STORES", "GROUP", "D")
        known = {name: str(value) for name, value in launch.constants.items() if name in kept}
        given = {name: launch.arguments.get(name) for name in "MNK"}
        weight = work_of(launch, Lengths(2, 64)).memory if name_of(launch).startswith("linear") else 0
        return name_of(launch), known, given, weight

    assert [facts(one) for one in predicted] == [facts(one) for one in launched]


def test_bytes_are_those_of_the_formats() -> None:
    step = step_of(Asked(replace(LLAMA, layers=2), "w4a16 and an int8 head", 1, 512, "fp8"))
    works = [work_of(one, step.lengths) for one in step.launches if isinstance(one, Launch)]
    memory = {one.label: one.memory for one in works}
    four = 4.125 / 8  # with a bfloat16 scale for 128
    assert memory["linear_codes 1x4096 by 6144"] == 6144 * 4096 * four
    assert memory["linear_codes 1x4096 by 28672 silu"] == 28672 * 4096 * four
    # An int8 head has a float32 scale a row, and rows are filled up to 128.
    assert memory["linear_codes 1x4096 by 128256"] == 128256 * (4096 + 4)
    assert memory["attend_tokens 1x512 float8"] == 512 * 8 * 2 * (128 + 4)
    assert len(works) == 2 * 7 + 4
    # 512 positions are cut into four parts for each of 8 heads.
    assert {one.programs for one in works if one.label.startswith("attend")} == {32}


def test_tiles_are_changed_by_hand() -> None:
    changed = changes_of(["attend_tokens:least=1", "linear_dense:outputs=32,warps=2"])
    step = step_of(Asked(replace(QWEN, layers=1), "bf16", 1, 512), changed)
    ours = {name_of(one): one for one in step.launches if isinstance(one, Launch)}
    assert work_of(ours["attend_tokens"], step.lengths).programs == 8 * 8
    assert (ours["linear_dense"].constants["BN"], ours["linear_dense"].warps) == (32, 2)
    with pytest.raises(ValueError, match="KERNEL:NAME=NUMBER"):
        changes_of(["least=1"])


def test_a_measured_profile_stands_beside(tmp_path: Path) -> None:
    terms = terms_of(WORK, COSTS, H100, Ideas())
    rows = [LaunchGroup("linear_codes 1x2 by 3", "linear_codes", 4, 1, 1, 3.3e-6, terms, COSTS)]
    one = Prediction(Asked(LLAMA, "w4a16", 1, 512), rows, 18.2e-6, 1)
    path = tmp_path / "gpu_profile.json"
    profile = [
        {"kernel": "_linear_codes", "launches": 4, "microseconds": 12.0},
        {"kernel": "void at::native::copy", "launches": 1, "microseconds": 3.2},
    ]
    other = {"format": "bf16", "rows": [{"kernel": "_linear_dense", "launches": 1, "microseconds": 1.0}]}
    path.write_text(json.dumps({"device": "x", "results": [{"format": "w4a16", "batch": 1, "rows": profile}, other]}))
    found = measured_rows(path, one)
    assert [row["kernel"] for row in found] == ["_linear_codes", "void at::native::copy"]
    lines = {line[:33].strip(): line[33:].split() for line in beside(one, found).splitlines()}
    # 3.3 µs each, of which 1.3 are gaps; what is left of 18.2 is between steps.
    assert lines["linear_codes"] == ["4", "8.0", "4", "12.0", "1.50"]
    assert lines["torch"] == ["0", "0.0", "1", "3.2", "-"]
    assert lines["all kernels"] == ["4", "8.0", "5", "15.2", "1.90"]
    assert lines["gaps, and to the next step"][:2] == ["4", "10.2"]
    assert "linear_dense" not in lines
    with pytest.raises(ValueError, match="no rows"):
        measured_rows(path, replace(one, asked=Asked(LLAMA, "fp8", 1, 512)))


@pytest.mark.slow
def test_a_step_is_predicted_from_its_machine_code(tmp_path: Path) -> None:
    """Of a tiny model, from the command to the file; Triton in the interpreter compiles nothing, so in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernel_code", "--step", "--model", "tiny", "--format", "w4a16"]
    repository = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, "--save-as", str(tmp_path / "predicted")],
        capture_output=True,
        text=True,
        env=environment,
        cwd=repository,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "not measured" in done.stdout
    steps = json.loads((tmp_path / "predicted.json").read_text())["results"]["steps"]
    (step,) = steps
    assert step["predicted_not_measured"]
    kernels = {row["kernel"]: row["launches"] for row in step["rows"] if row["code"]}
    assert kernels["attend_tokens"] == random_checkpoints.TINY.layers
    assert step["microseconds"] == pytest.approx(sum(row["microseconds"] for row in step["rows"]) + 5, abs=1)
    assert step["tokens_per_second"] == pytest.approx(1e6 / step["microseconds"], rel=1e-3)
    linear = next(row for row in step["rows"] if row["kernel"] == "linear_codes")
    assert linear["code"]["loop"] > 50
    assert linear["code"]["registers"] > 16
    terms = linear["terms"]
    together = max(terms[name] for name in ("memory", "l2", "issue", "chain", "tensor"))
    each = terms["gap"] + terms["start"] + together + terms["tail"]
    assert linear["microseconds"] / linear["launches"] == pytest.approx(each, rel=0.01)


def test_formats_are_those_that_are_measured() -> None:
    assert set(FORMATS) > set(random_checkpoints.FORMATS)
