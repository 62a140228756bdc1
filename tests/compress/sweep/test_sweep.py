"""Sweeps: which trials there are, running them in order and on Ray, continuing, and what goes wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from smelt.compress import SmeltError
from smelt.compress.cli import app
from smelt.compress.reporting.report_files import load
from smelt.compress.sweep import run as sweeping
from smelt.compress.sweep.run import run_sweep
from smelt.compress.sweep.trials import Sweep
from smelt.compress.verification.claims import Claims
from typer.testing import CliRunner

BASE: dict[str, Any] = {
    "model": "builtin:smelt-6m",
    "calibrate": {"samples": 4, "length": 32},
    "steps": [{"quantize": {"scheme": "W4A16", "group_size": 64}}],
    "evaluate": {"windows": 2, "length": 64, "samples": 0, "speed": False},
}
SCHEME = "steps.0.quantize.scheme"


@pytest.fixture
def sweep_file(tmp_path: Path) -> Callable[..., Path]:
    """``sweep_file(grid=…, trials=…)`` writes one."""

    def write(top: dict[str, Any] | None = None, **sweep: Any) -> Path:
        path = tmp_path / "sweep.yaml"
        path.write_text(
            yaml.safe_dump({**BASE, "output": str(tmp_path / "out"), **(top or {}), "sweep": sweep}, sort_keys=False)
        )
        return path

    return write


def test_every_combination_is_a_trial_and_so_are_those_listed(sweep_file: Callable[..., Path]) -> None:
    sweep = Sweep.load(
        sweep_file(
            grid={
                SCHEME: ["W8A16", "W4A16"],
                "steps.0.quantize.rounding": ["nearest", {"method": "gptq", "damping": 0.1}],
            },
            exclude=[{SCHEME: "W8A16", "steps.0.quantize.rounding": "nearest"}],
            trials=[{SCHEME: "W8A8", "steps.0.quantize.group_size": None}],
        )
    )
    assert [trial.name for trial in sweep.trials] == [
        "W8A16-gptq-damping0.1",
        "W4A16-nearest",
        "W4A16-gptq-damping0.1",
        "W8A8-groupsizedefault",
    ]
    chosen = sweep.trials[2].recipe.steps[0].quantize
    assert (chosen.scheme, chosen.rounding.method, chosen.rounding.options) == ("W4A16", "gptq", {"damping": 0.1})
    assert all(trial.recipe.evaluate is False for trial in sweep.trials)
    assert len({trial.recipe.output for trial in sweep.trials}) == 4


def test_text_is_cut_to_what_the_model_can_read(
    sweep_file: Callable[..., Path], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """The default length is longer."""
    model = str(tiny(max_position_embeddings=64))
    top = {"model": model, "evaluate": {"windows": 2, "samples": 0, "speed": False}}
    result = run_sweep(Sweep.load(sweep_file(top, grid={"steps.0.quantize.group_size": [32]})))
    assert result.report is not None
    assert [each.text.length for each in result.report.models if each.text] == [64, 64]


def test_every_trial_has_a_name_of_its_own(sweep_file: Callable[..., Path]) -> None:
    grid = {"steps.0.quantize.ignore": [[], ["lm_head"], ["lm-head"]]}
    names = [trial.name for trial in Sweep.load(sweep_file(grid=grid)).trials]
    assert len(set(names)) == 3
    assert names[0] == "ignorenone"


def test_names_of_trials_are_names_of_directories(sweep_file: Callable[..., Path]) -> None:
    """That of the unchanged recipe, too, and those of long lists."""
    many = [f"model.layers.{i}.self_attn.q_proj" for i in range(40)]
    trials = [{}, {"steps.0.quantize.ignore": many}, {"steps.0.quantize.ignore": [*many, "lm_head"]}]
    found = Sweep.load(sweep_file(trials=trials)).trials
    assert found[0].name == "base"
    assert len({trial.name for trial in found}) == 3
    assert all(len(trial.name) < 150 and Path(trial.recipe.output).name == trial.name for trial in found)


@pytest.mark.parametrize(
    ("sweep", "sentence"),
    [
        ({}, "nothing varies; give grid or trials"),
        ({"grid": {SCHEME: []}}, "is empty; give at least one"),
        ({"gird": {}}, "sweep.gird: Extra inputs are not permitted"),
        ({"grid": {SCHEME: ["W4A61", "W8A61"]}}, r"(?s)trial W4A61: .*unknown scheme.*\ntrial W8A61: .*unknown scheme"),
        ({"grid": {"model": ["builtin:smelt-6m", "other"]}}, "model cannot vary"),
        ({"grid": {"steps.7.quantize.scheme": ["W4A16"]}}, "the recipe has no steps.7"),
        ({"trials": [{"seed": 1}, {"seed": 1}]}, "two trials are identical: seed1"),
        ({"grid": {SCHEME: ["W4A16"]}, "exclude": [{}]}, "exclude has an entry without fields"),
        ({"grid": {SCHEME: ["W4A16"]}, "exclude": [{SCHEME: "W4A16"}]}, "exclude leaves no trial"),
        ({"grid": {SCHEME: ["W4A16"]}, "exclude": [{SCHEME: "w4a16"}]}, "w4a16, which is not among its values in grid"),
        (
            {"grid": {SCHEME: ["W4A16"]}, "exclude": [{"steps.0.quantize.shceme": "W4A16"}]},
            "which is not in grid; did you mean steps.0.quantize.scheme?",
        ),
    ],
)
def test_mistakes_are_reported_before_any_work(
    sweep: dict[str, Any], sentence: str, sweep_file: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(SmeltError, match=sentence):
        Sweep.load(sweep_file(**sweep))
    assert not (tmp_path / "out").exists()


def test_a_trial_that_would_fail_later_is_found_before_the_first_begins(
    sweep_file: Callable[..., Path], tmp_path: Path
) -> None:
    sweep = Sweep.load(sweep_file(grid={"steps.0.quantize.group_size": [64, 100]}))
    with pytest.raises(SmeltError, match=r"trial groupsize100: .*100") as raised:
        run_sweep(sweep)
    assert "groupsize64" not in str(raised.value)
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_drafts_are_not_measured_in_a_sweep(sweep_file: Callable[..., Path]) -> None:
    sweep = Sweep.load(sweep_file(grid={SCHEME: ["W8A16", "W3A16"]}), ["evaluate.drafter=lookup", "evaluate.speed={}"])
    with pytest.raises(SmeltError, match=r"evaluate\.drafter: is not measured in a sweep"):
        run_sweep(sweep)


def test_trials_share_one_report_and_finished_ones_are_not_run_again(
    sweep_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sweep_file(grid={SCHEME: ["W8A16", "W3A16"]})
    first = run_sweep(Sweep.load(path))
    assert first.report is not None
    assert [model.name for model in first.report.models] == ["builtin:smelt-6m", "W8A16", "W3A16"]
    perplexities = [model.text.perplexity for model in first.report.models if model.text]
    assert perplexities[2] > perplexities[1]
    card = (first.checkpoints["W3A16"] / "README.md").read_text()
    assert f"{perplexities[2]:.2f}" in card
    claims = Claims.read(first.checkpoints["W3A16"]).measured
    assert claims is not None
    assert claims.text is not None
    assert claims.text.perplexity == perplexities[2]
    assert load(tmp_path / "out") == first.report

    made = {f: f.stat().st_mtime_ns for f in (tmp_path / "out").rglob("*.safetensors")}
    monkeypatch.setattr("smelt.compress.evaluation.opened.read", lambda *_: pytest.fail("measured again"))
    assert run_sweep(Sweep.load(path)).report == first.report
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "out").rglob("*.safetensors")} == made


@pytest.mark.slow
def test_an_interrupted_sweep_continues_with_what_is_missing(
    sweep_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sweep_file(grid={SCHEME: ["W8A16", "W3A16"]})
    original, ran = sweeping.run_trial, []

    def interrupted(trial, *rest):  # type: ignore[no-untyped-def]
        if trial.name == "W3A16" and "W3A16" not in ran:
            ran.append("W3A16")
            raise KeyboardInterrupt
        return original(trial, *rest)

    monkeypatch.setattr(sweeping, "run_trial", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(Sweep.load(path))
    first = tmp_path / "out/trials/W8A16/checkpoint/model.safetensors"
    before = first.stat().st_mtime_ns
    assert len(run_sweep(Sweep.load(path)).checkpoints) == 2
    assert first.stat().st_mtime_ns == before


def test_a_failed_trial_does_not_stop_the_others_and_is_reported(
    sweep_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sweeping.run_trial
    monkeypatch.setattr(
        sweeping, "run_trial", lambda trial, *rest: "no luck" if trial.name == "W8A16" else original(trial, *rest)
    )
    result = run_sweep(Sweep.load(sweep_file(grid={SCHEME: ["W8A16", "W3A16"]})))
    assert result.failed == {"W8A16": "no luck"}
    assert result.report is not None
    assert [model.name for model in result.report.candidates] == ["W3A16"]
    assert any("trial W8A16 failed" in sentence for sentence in result.report.warnings)


@pytest.mark.slow
def test_the_text_that_the_model_writes_is_written_once(
    sweep_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from smelt.compress.pipeline import self_text

    original, count = self_text.self_written_windows, []

    def counting(*arguments):  # type: ignore[no-untyped-def]
        count.append(1)
        return original(*arguments)

    monkeypatch.setattr(self_text, "self_written_windows", counting)
    top = {"calibrate": {"source": "self", "samples": 2, "length": 16}, "evaluate": False}
    grid = {SCHEME: ["W8A16", "W4A16"], "steps.0.quantize.rounding": ["gptq"]}
    result = run_sweep(Sweep.load(sweep_file(top, grid=grid)))
    assert len(count) == 1
    assert result.report is None
    shared = [json.loads((path / "smelt.json").read_text())["data"]["sha256"] for path in result.checkpoints.values()]
    assert shared[0] == shared[1]


@pytest.mark.slow
def test_ray_runs_the_same_trials_to_the_same_bytes(sweep_file: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'ray[serve]'")
    path = sweep_file({"evaluate": False}, grid={SCHEME: ["W8A16", "W3A16"]}, resources={"cpus": 1})
    command = [sys.executable, "-m", "smelt.compress.cli", "sweep", str(path), "--json"]
    here = subprocess.run([*command, "--output", str(tmp_path / "here")], capture_output=True, text=True, check=False)
    assert here.returncode == 0, here.stderr
    there = subprocess.run(
        [*command, "--output", str(tmp_path / "there"), "--ray", "local"], capture_output=True, text=True, check=False
    )
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["checkpoints"].keys() == {"W8A16", "W3A16"}
    for name in ("W8A16", "W3A16"):
        one, other = (
            tmp_path / where / "trials" / name / "checkpoint/model.safetensors" for where in ("here", "there")
        )
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_ray_that_is_unavailable_is_reported(sweep_file: Callable[..., Path]) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'ray[serve]'")
    path = sweep_file({"evaluate": False}, grid={SCHEME: ["W8A16"]}, resources={"gpus": 3})
    command = [sys.executable, "-m", "smelt.compress.cli", "sweep", str(path), "--ray", "local"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"smelt: sweep\.resources: a trial requests 3 GPUs, but the largest machine .* has 0", done.stderr)


def test_without_ray_the_sentence_says_what_to_install(
    sweep_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SmeltError, match=r"pip install 'ray\[serve\]'"):
        run_sweep(Sweep.load(sweep_file({"evaluate": False}, grid={SCHEME: ["W8A16"]})), ray="local")


def test_a_dry_run_plans_all_trials_and_writes_nothing(sweep_file: Callable[..., Path], tmp_path: Path) -> None:
    file = sweep_file(grid={SCHEME: ["W8A16", "NVFP4A16"]}, trials=[])
    file.write_text(file.read_text().replace("group_size: 64", "rounding: nearest"))
    found = CliRunner().invoke(app, ["sweep", str(file), "--dry-run"])
    assert found.exit_code == 0, found.output
    assert "W8A16: roughly" in found.stdout
    assert "2 trials, no problems found: roughly" in found.stdout
    as_data = json.loads(CliRunner().invoke(app, ["sweep", str(file), "--dry-run", "--json"]).stdout)["trials"]
    assert set(as_data) == {"W8A16", "NVFP4A16"}
    assert all(plan["predicted"]["disk_bytes"] > 0 for plan in as_data.values())
    assert not (tmp_path / "out").exists()
    bad = CliRunner().invoke(app, ["sweep", str(file), "--dry-run", "--set", "model=builtin:nothing"])
    assert bad.exit_code == 1
    assert "no such builtin model" in bad.output
