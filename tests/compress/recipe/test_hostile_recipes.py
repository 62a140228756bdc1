"""Recipes that no one means well with: each ends in a sentence, soon, and in little memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from smelt.compress import Recipe, SmeltError
from smelt.compress.evaluation.flags import evaluation_settings, speed_settings
from smelt.compress.evaluation.gates import Gate
from smelt.compress.export import export
from smelt.compress.pipeline.plan import Plan
from smelt.compress.reporting.report_files import load
from smelt.compress.sweep.trials import Sweep
from smelt.models.directory.find import find_checkpoint, find_model

GOOD = """\
model: builtin:smelt-6m
output: {output}
calibrate: {{samples: 2, length: 16}}
evaluate: {{windows: 2, length: 16, speed: false}}
steps:
  - quantize: {{scheme: W4A16, group_size: 64}}
"""
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 8)
)


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    """No case may take long."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise AssertionError("this took more than 20 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _refused(tmp_path: Path, *overrides: str, text: str | None = None) -> str:
    """What is said of a recipe, by loading it or by planning it; nothing is written."""
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD.format(output=tmp_path / "out") if text is None else text)
    try:
        problems = Plan.make(Recipe.load(path, list(overrides))).problems
    except SmeltError as error:
        said = str(error)
    else:
        said = "\n".join(map(str, problems))
    assert said, "nothing was said"
    assert not (tmp_path / "out").exists()
    said.encode()
    return said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BOMB, "more than 20000 values"),
        (MERGE_BOMB, "more than 20000 values"),
        ("a: " + "[" * 5000, "nests deeper than 50"),
        ("a: " + "{a: " * 5000, "nests deeper than 50"),
        ("- " * 5000, "nests deeper than 50"),
        ("a: b\n" * 60_000, "larger than 256 KiB"),
        ("".join(f"key{i}: 1\n" for i in range(15_000)), "more mistakes"),
        ("model: 2026-01-01\n", ":1: '2026-01-01' is read as a date by YAML"),
        ("model: !!set {a, b}\n", "!!set is not supported"),
        ("model: !!binary aGk=\n", "!!binary is not supported"),
        ("model: !!int abc\n", "'abc' is not a valid int"),
        ("model: !!float abc\n", "'abc' is not a valid float"),
        ("model: !!bool perhaps\n", "'perhaps' is not a valid bool"),
        ("model: !!timestamp soon\n", "is read as a date by YAML"),
        ("model: !!python/object/apply:os.system [ls]\n", "is not supported"),
        ("2: x\n", "the key 2 is not a string"),
        ("yes: x\n", "the key True is not a string"),
        ("? [a]\n: x\n", "is not supported"),
        ("<<: 3\n", "<< takes a mapping"),
        ('model: "a\\0b"\n', "contains the character U+0000"),
        ('model: "\\ud800"\n', "contains the character U+D800"),
        ('"\\ud800": 1\n', "contains the character U+D800"),
        (f"seed: {'9' * 5000}\n", "is not a valid int"),
        (f"seed: 0x{'f' * 5000}\n", "exceeds 64 bits"),
        ("a: &a [*a]\n", "an alias refers to a value that contains it"),
    ],
)
def test_yaml_within_limits(text: str, expected: str, tmp_path: Path) -> None:
    assert expected in _refused(tmp_path, text=text)


def test_merge_keys_give_way_to_what_stands_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: m\noutput: out\nsteps: [{quantize: {scheme: W8A16}}]\n"
        "calibrate: &c {length: 32}\nevaluate: {length: 64, <<: [*c, {windows: 5, length: 16}]}\n"
    )
    recipe = Recipe.load(path)
    assert recipe.evaluate
    assert (recipe.evaluate.length, recipe.evaluate.windows) == (64, 5)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"seed={2**70}", "exceeds 64 bits"),
        (f"seed={2**40}", "less than or equal to 4294967295"),
        ("steps.0.quantize.rounding={method: gptq, damping: .nan}", "finite"),
        ("steps.0.quantize.guard={max_layer_error: .inf}", "finite"),
        ("steps.0.quantize={scheme: auto, target: {bits: .nan}}", "finite"),
        ("steps.0.prune={structure: ffn, ratio: .nan}", "finite"),
        ("steps.0={distill: {tokens: 400k, learning_rate: .inf}}", "finite"),
        ("steps.0={distill: {tokens: 400k, loss: {method: jsd, beta: .nan}}}", "finite"),
        (f"steps.0={{distill: {{tokens: '{'9' * 400}'}}}}", "is not a number of tokens"),
        ("steps.0.quantize.ignore=['re:a{99999999999999999999}']", "is not a regular expression"),
        (f"steps.0.quantize.ignore=['re:{'(' * 5000}']", "is not a regular expression"),
        ("steps.0.quantize={scheme: W8A16, rounding: nested, guard: {max_layer_error: 0.1, otherwise: fallback, fallback: W8A8}}", "nested is for scheme W4in8"),
        ("steps.0.quantize={scheme: W4in8, overrides: [{targets: ['re:.*mlp.*'], scheme: W4A16}]}", "nested is for scheme W4in8 or W8A16, and model.layers.0.mlp"),
        ("steps.0.quantize={scheme: W4A16, overrides: [{targets: ['re:.*mlp.*'], rounding: nested}]}", "nested is for scheme W4in8 or W8A16, and model.layers.0.mlp"),
        ("steps.0.quantize={scheme: W4A16, overrides: [{targets: ['re:.*mlp.*'], scheme: W4in8, rounding: gptq}]}", "is rounded by nested or nearest, not by gptq"),
        ("steps.0.quantize={scheme: W4A16, train: {data: builtin, tokens: 20k}, overrides: [{targets: ['re:.*mlp.*'], scheme: W4in8}]}", "train would train the upper four bits of an override's 8"),
        ("steps.0.quantize={scheme: auto, target: {bits: 5}, rounding: nested}", "nested is for scheme W4in8 or W8A16, and model.layers.0"),
        ("steps=[{prune: {structure: '2:4'}}, {quantize: {scheme: W4IN8, transforms: [rotate]}}]", "the zeros of steps.0 would be lost (transforms: rotate)"),
        ("steps.0.quantize={scheme: W4A16, rounding: signround, overrides: [{targets: ['re:.*q_proj'], rounding: {method: signround, iterations: 7}}]}", "has the same options in all of them"),
        ("calibrate.source=" + "[" * 5000, "nests deeper"),
        ("calibrate.samples=2026-01-01", "is read as a date by YAML"),
        (".".join("a" * 5000) + "=1", "more than 50 levels"),
        ("steps.²=1", "the recipe has no steps.²"),
        ("extends=other.yaml", "extends can only be set in a recipe file"),
    ],
)  # fmt: skip
def test_numbers_and_overrides(override: str, expected: str, tmp_path: Path) -> None:
    assert expected in _refused(tmp_path, override)


@pytest.mark.parametrize(
    "field",
    [
        "model",
        "output",
        "adapter",
        "calibrate.source",
        "evaluate.text",
        "steps.0.quantize.train.teacher",
        "steps.0.quantize.train.data",
        "steps.0.quantize.train.stored_at",
        "steps.0.prune.corpus",
    ],
)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("~nosuchuser/x", "user 'nosuchuser' not found"),
        ("x" * 300, "File name too long"),
        ("x/" * 3000, "File name too long"),
        ("''", "the path is empty"),
    ],
)
def test_names_that_no_file_has(field: str, name: str, expected: str, tmp_path: Path) -> None:
    said = _refused(tmp_path, f"{field}={name}")
    assert expected in said
    assert field in said


@pytest.mark.parametrize("field", ["calibrate.source", "evaluate.text"])
def test_what_is_no_text_file_is_not_waited_for(field: str, tmp_path: Path) -> None:
    fifo = tmp_path / "text.txt"
    os.mkfifo(fifo)
    assert "is a FIFO, not a text file" in _refused(tmp_path, f"{field}={fifo}")
    assert "is a device, not a text file" in _refused(tmp_path, f"{field}=/dev/zero")


def test_a_directory_of_anything_is_not_searched_for_a_dataset(tmp_path: Path) -> None:
    for number in range(101):
        (tmp_path / "many" / str(number)).mkdir(parents=True)
        for name in range(100):
            (tmp_path / "many" / str(number) / str(name)).touch()
    assert "holds more than 10000 files" in _refused(tmp_path, f"calibrate.source={tmp_path / 'many'}")


READS = "steps.0.quantize.rounding=gptq"  # a method that reads the calibration text


def test_text_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "\\ud800 is half a pair"}\n')
    assert "half of a surrogate pair" in _refused(tmp_path, f"calibrate.source={file}", READS)
    file.write_text('{"text": ' + "[" * 100_000 + "\n")
    assert ":1: is not JSON" in _refused(tmp_path, f"calibrate.source={file}", READS)


def test_recipes_and_reports_are_files(tmp_path: Path) -> None:
    fifo = tmp_path / "report.json"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(SmeltError, match=r"cannot be read \(it is a"):
            Recipe.load(path)
        with pytest.raises(SmeltError, match=r"cannot be read \(it is a"):
            load(path)
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(SmeltError, match="is not JSON"):
        load(deep)


def test_a_long_chain_of_extends_ends(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    with pytest.raises(SmeltError, match="more than 20 recipes extend each other"):
        Recipe.load(tmp_path / "0.yaml")


def test_a_sweep_of_a_million_trials_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    seeds = ", ".join(map(str, range(1000)))
    path.write_text(
        GOOD.format(output=tmp_path / "out") + f"sweep: {{grid: {{seed: [{seeds}], calibrate.samples: [{seeds}]}}}}\n"
    )
    with pytest.raises(SmeltError, match="has 1000000 trials"):
        Sweep.load(path)


def test_half_written_directories_are_not_suggested(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.partial").mkdir()
    (tmp_path / ".checkpoint").mkdir()
    with pytest.raises(SmeltError, match=r"directory not found$"):
        find_model(str(tmp_path / "checkpoin"))
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(SmeltError, match=r"did you mean checkpoint\?"):
        find_model(str(tmp_path / "checkpoin"))


@pytest.mark.parametrize("name", ["x" * 300, "~nosuchuser", "a\0b", "\udcff", ""])
def test_commands_refuse_names_that_no_file_has(name: str, tmp_path: Path) -> None:
    for find in (find_model, find_checkpoint):
        with pytest.raises(SmeltError):
            find(name)
    with pytest.raises(SmeltError):
        export("builtin:smelt-6m", "dense", Path(name))
    with pytest.raises(SmeltError):
        load(Path(name or "nowhere"))


def test_an_output_leaves_room_for_the_name_that_is_worked_under(tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match="File name too long"):
        export("builtin:smelt-6m", "dense", tmp_path / ("x" * 250))


@pytest.mark.parametrize("gate", ["ppl>1e999", "ppl<-1e999%", "kl>1e400"])
def test_gates_that_could_never_fall(gate: str) -> None:
    with pytest.raises(SmeltError, match="could never fail"):
        Gate.parse(gate)


@pytest.mark.parametrize("tasks", [",", "", "piqa,,boolq", " "])
def test_tasks_that_name_none(tasks: str) -> None:
    with pytest.raises(SmeltError, match="has an empty name"):
        evaluation_settings(tasks=tasks, speed="none")


@pytest.mark.parametrize("speed", ["prompt=²", "prompt=" + "9" * 5000, "concurrency=1,²"])
def test_speeds_that_are_no_numbers(speed: str) -> None:
    with pytest.raises(SmeltError, match="whole number"):
        speed_settings(speed)
