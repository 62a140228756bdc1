"""Output directories: whose they are, what may be replaced, and failures while writing."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from smelt.compress import Evaluate, Recipe, SmeltError, evaluate, run
from smelt.compress.reporting.report_files import load
from smelt.system.storage.run_directory import Output

Build = Callable[..., Recipe]


def _contents(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


@pytest.fixture
def small(recipe: Build, tiny: Callable[..., Path]) -> Build:
    model = tiny()

    def build(top: dict[str, object] | None = None, **quantize: object) -> Recipe:
        return recipe(model, top, **{"group_size": 32, **quantize})

    return build


def test_a_foreign_directory_is_left_alone(small: Build, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("three years of work")
    for fresh in (False, True):
        with pytest.raises(SmeltError, match="was not made by Smelt"):
            run(small(), fresh=fresh)
    assert _contents(out) == {"thesis.txt": b"three years of work"}


def test_a_file_in_the_way(small: Build, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(SmeltError, match="is a file"):
        run(small())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_writable(small: Build, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(SmeltError, match="not writable"):
        run(small({"output": str(locked / "out")}))


def test_a_read_only_file_system_is_reported(small: Build) -> None:
    with pytest.raises(SmeltError, match="output"):
        run(small({"output": "/proc/smelt-out"}))


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("left", [[], ["lock"], ["lock", "run.json.partial"]])
def test_a_run_killed_as_it_began_does_not_block_the_next(
    left: list[str], fresh: bool, small: Build, tmp_path: Path
) -> None:
    journal = tmp_path / "out" / "journal"
    journal.mkdir(parents=True)
    for name in left:
        (journal / name).touch()
    assert run(small({"evaluate": False}), fresh=fresh).checkpoint.exists()


def test_activations_of_a_killed_run_are_removed(small: Build, tmp_path: Path) -> None:
    built = small({"evaluate": False})
    run(built)
    (tmp_path / "out" / "checkpoint" / "smelt.json").unlink()
    lost = tmp_path / "out" / "journal" / "step-0" / "activations-0.bin"
    lost.parent.mkdir(exist_ok=True)
    lost.touch()
    run(built, fresh=True)
    assert not lost.exists()


def test_an_empty_directory_is_fine(small: Build, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run(small()).checkpoint.exists()


def test_a_finished_run_returns_at_once_and_changes_nothing(small: Build, tmp_path: Path) -> None:
    first = run(small())
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "out").rglob("*.safetensors")}
    again = run(small())
    assert again.report == first.report
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "out").rglob("*.safetensors")} == before


def test_another_recipe_is_refused_and_says_what_differs(small: Build) -> None:
    run(small(rounding="nearest"))
    with pytest.raises(SmeltError, match=r"steps\.0\.quantize\.rounding\.method: 'nearest' -> 'hqq'.*--fresh"):
        run(small(rounding="hqq"))
    made = run(small(rounding="hqq"), fresh=True).report.candidates[0].recipe
    assert made is not None
    assert made["steps"][0]["quantize"]["rounding"]["method"] == "hqq"


def test_what_was_changed_meanwhile_is_noticed(recipe: Build, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Otherwise a resumed run would mix blocks of two models, texts or tokenizers."""
    model, text = tiny(num_hidden_layers=4), tmp_path / "text.txt"
    text.write_text("The harbour was quiet, and the boats lay still under a pale sky. " * 200)
    top = {"calibrate": {"source": str(text), "samples": 4, "length": 32}, "evaluate": False}
    run(recipe(model, top, group_size=32))

    weights = model / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    assert len(raw) > 3 << 20, "its middle is in neither end that is read at once"
    before = bytes(raw)
    raw[len(raw) // 2] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(SmeltError, match=r"holds another run .model: "):
        run(recipe(model, top, group_size=32))
    weights.write_bytes(before)

    with text.open("a") as file:
        file.write("Nobody had seen the keeper.")
    with pytest.raises(SmeltError, match=rf"holds another run .files\.{text}: "):
        run(recipe(model, top, group_size=32))
    text.write_text("The harbour was quiet, and the boats lay still under a pale sky. " * 200)

    tokenizer = model / "tokenizer.json"
    data = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps({**data, "normalizer": {"type": "Lowercase"}}))
    with pytest.raises(SmeltError, match=r"holds another run .tokenizer and other files: "):
        run(recipe(model, top, group_size=32))
    tokenizer.write_text(json.dumps(data))
    run(recipe(model, top, group_size=32), fresh=True)


def test_a_file_that_is_called_as_a_recipes_word_is_nothing_to_it(
    small: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = small({"evaluate": False})
    run(built)
    monkeypatch.chdir(tmp_path)
    for word in ("text", "train", "nearest"):
        (tmp_path / word).write_text("something else")
    run(built)


def test_what_a_run_leaves_that_is_killed_as_it_ends_is_removed(small: Build, tmp_path: Path) -> None:
    run(small())
    left = tmp_path / "out" / "journal" / "step-0" / "block-00000.safetensors"
    left.parent.mkdir(exist_ok=True)
    left.touch()
    run(small())
    assert not left.parent.exists()


def test_a_run_that_fails_removes_its_own_staging_directory_only(tmp_path: Path) -> None:
    """Not that of the next, which waits for nothing but the lock."""
    first = Output(tmp_path / "out", {"kind": "run"})
    removed: list[bool] = []

    def remove(path: Path, **_: object) -> None:
        with pytest.raises(SmeltError, match="another run is working"):
            Output(tmp_path / "out", {"kind": "run"}).__enter__()
        removed.append(path == first.staging)

    first.__enter__()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smelt.system.storage.run_directory.shutil.rmtree", remove)
        first.__exit__(ValueError, ValueError(), None)
    assert removed == [True]


def test_starting_over_does_not_remove_what_is_read(small: Build, recipe: Build, tmp_path: Path) -> None:
    pruned = {"evaluate": False, "steps": [{"prune": {"structure": "blocks", "score": "influence", "count": 1}}]}
    made = run(small(pruned)).checkpoint
    before = _contents(made)
    again = recipe(made, pruned)
    with pytest.raises(SmeltError, match=r"--fresh would remove .*checkpoint, which this run reads; choose another"):
        run(again, fresh=True)
    assert _contents(made) == before


def test_starting_over_is_about_what_the_same_command_made(small: Build, tmp_path: Path) -> None:
    made = run(small({"evaluate": False})).checkpoint
    before = _contents(made)
    settings = Evaluate(windows=2, length=16, samples=0, speed=False)
    for fresh in (False, True):
        with pytest.raises(SmeltError, match="holds what `smelt run` made; choose another output"):
            evaluate([made], settings=settings, output=tmp_path / "out", fresh=fresh)
    assert _contents(made) == before


def test_a_changed_model_is_noticed(small: Build, tiny: Callable[..., Path], recipe: Build, tmp_path: Path) -> None:
    built = small()
    run(built)
    file = Path(built.model) / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 0x40
    file.write_bytes(raw)
    with pytest.raises(SmeltError, match="holds another run"):
        run(small())


def test_two_runs_do_not_share_a_directory(small: Build, tmp_path: Path) -> None:
    run(small())
    with (tmp_path / "out" / "journal" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SmeltError, match="another run is working"):
            run(small())


@pytest.mark.slow
def test_a_full_disk_is_reported_and_nothing_half_written_stays(small: Build, tmp_path: Path) -> None:
    """A limit on file size stands in for the full disk: writes fail half-way, as they do there."""
    built = small({"evaluate": False})
    (tmp_path / "recipe.yaml").write_text(json.dumps(built.model_dump(mode="json")))
    limit = 40_000
    done = subprocess.run(
        [sys.executable, "-m", "smelt.compress.cli", "run", str(tmp_path / "recipe.yaml")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "file-size limit is reached" in done.stderr
    out = tmp_path / "out"
    assert not (out / "checkpoint").exists()
    assert not list(out.rglob("*.partial"))
    assert run(built).checkpoint.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_really_full_disk(small: Build, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2200k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        with pytest.raises(SmeltError, match=r"disk is full|is free"):
            run(small({"output": str(disk / "out"), "evaluate": False}, scheme="W8A16"))
        assert not (disk / "out" / "checkpoint").exists()
        assert not list(disk.rglob("*.partial"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_task_that_fails_leaves_what_was_measured(small: Build, tmp_path: Path) -> None:
    """And is no reason to read the text otherwise, or to call the report complete."""
    items = tmp_path / "items.jsonl"
    items.write_text('{"q": "The river ran", "a": "on"}\n' * 4)
    (tmp_path / "code.py").write_text("def score(doc, results):\n    raise ValueError('no score')\n")
    task = tmp_path / "broken.yaml"
    task.write_text(
        f"task: broken\ndataset_path: json\ndataset_kwargs:\n  data_files: {items}\ntest_split: train\noutput_type: generate_until\n"
        'doc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\ngeneration_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 4\nprocess_results: !function code.score\n'
        "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
    )
    tasks = {"windows": 2, "length": 16, "samples": 0, "speed": False, "tasks": [str(task)], "trust_task_code": True}
    with pytest.raises(SmeltError, match="no score"):
        run(small({"evaluate": tasks}))
    report = load(tmp_path / "out" / "report.json")
    assert report.status == "partial"
    assert report.models[0].text is not None
    assert report.models[0].text.computed_by == "Smelt's runtime"
    assert any("broken" in each for each in report.missing)
