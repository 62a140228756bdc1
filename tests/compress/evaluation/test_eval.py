"""``smelt eval`` from end to end: what it measures, what it keeps, what it refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from smelt.compress import Evaluate, Recipe, SmeltError, evaluate, run
from smelt.compress.cli import app
from smelt.compress.evaluation import measure
from smelt.compress.evaluation.settings import SpeedSettings
from smelt.compress.reporting.report_files import load, save
from smelt.compress.results.report import ReportData
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from ...tiny import SMELT_6M

TEXT_ONLY = Evaluate(windows=4, length=64, samples=0, speed=False)
SPEED = SpeedSettings(prompt=16, generate=8, concurrency=[2], repeats=6)
ONCE = SpeedSettings(prompt=16, generate=8, concurrency=[2], repeats=1)
ALL = Evaluate(windows=6, length=96, samples=2, tasks=["smelt_continuation"], limit=40, speed=SPEED)


@pytest.fixture(scope="module")
def w4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """smelt-6m in 4 bits."""
    recipe = {
        "model": "builtin:smelt-6m",
        "output": str(tmp_path_factory.mktemp("w4") / "w4"),
        "calibrate": {"samples": 8, "length": 64},
        "steps": [{"quantize": {"scheme": "W4A16", "group_size": 64}}],
        "evaluate": False,
    }
    return run(Recipe.model_validate(recipe)).checkpoint


@pytest.fixture(scope="module")
def interrupted(w4: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ReportData, Path]:
    """Everything but speed, which an interrupt prevented."""
    output = tmp_path_factory.mktemp("eval") / "out"

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "measure_speed", stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate([w4], baseline="builtin:smelt-6m", settings=ALL, output=output)
    return load(output), output


@pytest.fixture(scope="module")
def measured(interrupted: tuple[ReportData, Path], w4: Path) -> tuple[ReportData, Path]:
    """Everything: the interrupted evaluation continued."""
    output = interrupted[1]
    return evaluate([w4], baseline="builtin:smelt-6m", settings=ALL, output=output), output


def test_perplexity_and_bits_per_byte_are_transformers(measured: tuple[ReportData, Path], w4: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    for model, path in zip(measured[0].models, (SMELT_6M, w4), strict=True):
        text = model.text
        assert text is not None
        tokens = _builtin_windows(6, 96)
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits[:, :-1].double()
        nll = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        assert text.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-3)
        assert text.nll == pytest.approx(nll.sum(1).tolist(), rel=3e-3)  # one window averages less
        size = sum(len(tokenizer.decode(window[1:]).encode()) for window in tokens.tolist())
        assert text.bits_per_byte == pytest.approx(nll.sum().item() / math.log(2) / size, rel=1e-3)


def test_everything_asked_for_is_measured(measured: tuple[ReportData, Path], w4: Path) -> None:
    report, output = measured
    assert report.status == "complete"
    assert [model.role for model in report.models] == ["baseline", "candidate"]
    for model in report.models:
        assert {task.metric for task in model.tasks} == {"acc", "acc_norm"}
        assert [task.items for task in model.tasks] == [40, 40]
        assert len(model.samples) == 2
        speed = model.speed
        assert speed is not None
        assert speed.interleaved
        assert [load.concurrency for load in speed.loads] == [2]
        assert len(speed.decode_rate.values) == 6
        assert speed.first_token.median > 0
        assert sum(part.seconds for part in speed.decode_time) < 1
        assert "Smelt's" in json.dumps(speed.kernels) or "F.linear" in json.dumps(speed.kernels)
    against = report.candidates[0].against
    assert against is not None
    assert against.size is not None
    sizes = [sum(f.stat().st_size for f in path.glob("*.safetensors")) for path in (SMELT_6M, w4)]
    assert against.size.ratio == pytest.approx(sizes[1] / sizes[0], rel=0.01)
    assert against.decode is not None
    assert against.decode.interval is not None
    assert against.reasons
    assert report.machine.read_bytes_per_second
    assert {path.name for path in output.iterdir()} == {
        "journal",
        "pareto.svg",
        "report.html",
        "report.json",
        "report.md",
    }


def test_flipped_answers_are_those_of_the_items(measured: tuple[ReportData, Path]) -> None:
    before, after = measured[0].models
    assert after.against is not None
    change = next(c for c in after.against.tasks if c.metric == "acc")
    pairs = list(zip(before.tasks[0].by_item, after.tasks[0].by_item, strict=True))
    assert change.gained == sum(b > a for a, b in pairs)
    assert change.lost == sum(b < a for a, b in pairs)
    assert change.difference == pytest.approx((sum(b for _, b in pairs) - sum(a for a, _ in pairs)) / 40)


def test_saved_reports_say_the_same(measured: tuple[ReportData, Path]) -> None:
    report, output = measured
    assert load(output) == report
    assert report.verdict in (output / "report.html").read_text()
    text = (output / "report.md").read_text()
    assert "W4A16" in text
    assert "](pareto.svg)" in text
    assert "<svg" in (output / "pareto.svg").read_text()


def test_what_is_measured_is_not_measured_again(
    measured: tuple[ReportData, Path], w4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, output = measured

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("smelt.compress.evaluation.opened.read", never)
    monkeypatch.setattr(measure, "measure_speed", never)
    monkeypatch.setattr("smelt.compress.evaluation.scoring.tasks.Tasks.run", never)
    settings = Evaluate.model_validate(report.settings)
    assert evaluate([w4], baseline="builtin:smelt-6m", settings=settings, output=output) == report


def test_one_checkpoint_alone_is_measured_without_a_comparison(tmp_path: Path) -> None:
    report = evaluate(["builtin:smelt-6m"], settings=TEXT_ONLY, output=tmp_path / "out")
    (model,) = report.models
    assert model.against is None
    assert model.text is not None
    assert "perplexity" in report.verdict


@pytest.mark.slow
def test_models_that_do_not_fit_together_are_timed_one_after_another(
    w4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smelt.compress.evaluation.speed.free_memory", lambda _: 0)
    settings = TEXT_ONLY.model_copy(update={"speed": ONCE})
    report = evaluate([w4], baseline="builtin:smelt-6m", settings=settings, output=tmp_path / "out")
    against = report.candidates[0].against
    assert against is not None
    assert against.decode is not None
    assert against.decode.interval is None
    assert any("one model after another" in sentence for sentence in report.warnings)


def test_another_tokenizer_is_compared_by_bytes(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Characters as tokens: each stands for one byte of this text, so bits per byte are bits per token."""
    path = tiny(vocab_size=128)
    text = (tmp_path / "text.txt").absolute()
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    characters = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="\x00"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="\x01").save_pretrained(path)
    settings = Evaluate(text=str(text), windows=4, length=32, samples=0, speed=False)
    report = evaluate([path], baseline="builtin:smelt-6m", settings=settings, output=tmp_path / "out")
    before, after = report.models
    assert after.against is not None
    assert after.against.perplexity is None
    assert after.against.kl is None
    assert after.against.bits_per_byte is not None
    assert before.text is not None
    assert after.text is not None
    assert sum(after.text.bytes) == pytest.approx(sum(before.text.bytes), abs=40)
    assert after.text.bits_per_byte == pytest.approx(
        sum(after.text.nll) / math.log(2) / (after.text.windows * 31), rel=1e-6
    )
    assert any("bits per byte can" in sentence for sentence in report.warnings)


def test_a_model_that_gives_nan_is_named_and_the_rest_is_kept(w4: Path, tmp_path: Path) -> None:
    broken = _copy(tmp_path / "broken", lambda model: model.model.norm.weight.fill_(3e38))
    with pytest.raises(SmeltError, match="broken gives NaN on the builtin evaluation text"):
        evaluate([w4, broken], baseline="builtin:smelt-6m", settings=TEXT_ONLY, output=tmp_path / "out")
    report = load(tmp_path / "out")
    assert report.status == "partial"
    assert report.missing == ["the text read by broken"]
    assert report.candidates[0].text is not None
    assert "artial" in (tmp_path / "out/report.html").read_text()


def test_a_broken_model_with_huge_logits_is_reported_not_an_error(tmp_path: Path) -> None:
    broken = _copy(tmp_path / "huge", lambda model: model.model.norm.weight.mul_(1e5))
    report = evaluate([broken], baseline="builtin:smelt-6m", settings=TEXT_ONLY, output=tmp_path / "out")
    text = report.candidates[0].text
    assert text is not None
    assert text.perplexity > 1e100
    assert load(tmp_path / "out").candidates[0].text == text


def test_a_change_in_the_middle_of_a_file_or_in_the_tokenizer_is_noticed(tmp_path: Path) -> None:
    model = _copy(tmp_path / "mine", lambda _: None)

    def measured() -> float:
        text = evaluate([model], settings=TEXT_ONLY, output=tmp_path / "out").models[0].text
        assert text is not None
        return text.perplexity

    before = measured()
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 100_000] = bytes(100_000)
    weights.write_bytes(data)
    changed = measured()
    assert changed != before
    tasks = Evaluate(windows=2, length=32, samples=0, tasks=["smelt_last_word"], limit=5, speed=False)
    first = evaluate([model], settings=tasks, output=tmp_path / "out").models[0].tasks
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][: len(tokenizer["model"]["merges"]) // 8]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert evaluate([model], settings=tasks, output=tmp_path / "out").models[0].tasks != first


def test_an_earlier_report_is_not_taken_for_that_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def task(metric: str, text: str) -> Evaluate:
        (tmp_path / "data.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "more"}) + "\n")
        (tmp_path / "mine.yaml").write_text(
            f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/data.jsonl}}\n"
            "output_type: loglikelihood_rolling\ntest_split: train\ndoc_to_text: ''\ndoc_to_target: text\n"
            f"metric_list: [{{metric: {metric}}}]\n"
        )
        return Evaluate(windows=2, length=32, samples=0, tasks=[str(tmp_path / "mine.yaml")], speed=False)

    good = evaluate(["builtin:smelt-6m"], settings=task("bits_per_byte", "a text"), output=tmp_path / "out")
    assert [result.items for result in good.models[0].tasks] == [2]
    other = evaluate(["builtin:smelt-6m"], settings=task("bits_per_byte", "another"), output=tmp_path / "out")
    assert other.models[0].tasks[0].value != good.models[0].tasks[0].value, "the data changed"
    with pytest.raises(
        SmeltError, match=r"mine\.yaml: lm-eval has no metric 'bits_per_bite'; did you mean bits_per_byte"
    ):
        evaluate(["builtin:smelt-6m"], settings=task("bits_per_bite", "a text"), output=tmp_path / "out")
    broken = task("bits_per_byte", "a third").model_copy(update={"fewshot": 1})
    monkeypatch.setattr("lm_eval.evaluator.evaluate", lambda **_: {}["no such thing"])
    with pytest.raises(
        SmeltError, match=r"mine answered by builtin:smelt-6m: the task failed \(KeyError: 'no such thing'\)"
    ):
        evaluate(["builtin:smelt-6m"], settings=broken, output=tmp_path / "out")
    report = load(tmp_path / "out")
    assert report.status == "partial"
    assert report.missing == ["mine answered by builtin:smelt-6m"]


def test_a_tokenizer_of_another_model_is_reported(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny(vocab_size=256)
    AutoTokenizer.from_pretrained(SMELT_6M).save_pretrained(path)
    with pytest.raises(SmeltError, match=r"its tokenizer produces token id .* but the model has only 256"):
        evaluate([path], settings=TEXT_ONLY, output=tmp_path / "out")


def test_different_texts_are_not_compared(measured: tuple[ReportData, Path], w4: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Quite another text, which says the same thing again. " * 200)
    settings = TEXT_ONLY.model_copy(update={"text": str(tmp_path / "other.txt")})
    report = evaluate([w4], baseline=measured[1], settings=settings, output=tmp_path / "out")
    against = report.candidates[0].against
    assert against is not None
    assert against.perplexity is None
    assert against.bits_per_byte is None
    assert any("neither perplexity nor bits per byte is compared" in sentence for sentence in report.warnings)


def test_a_text_that_one_read_further_is_not_compared(w4: Path, tmp_path: Path) -> None:
    """A window more changes the average more than quantization does."""
    settings = TEXT_ONLY.model_copy(update={"windows": 16, "length": 32})
    evaluate(["builtin:smelt-6m"], settings=settings, output=tmp_path / "before")
    settings = settings.model_copy(update={"windows": 17})
    report = evaluate([w4], baseline=tmp_path / "before", settings=settings, output=tmp_path / "out")
    against = report.candidates[0].against
    assert against is not None
    assert (against.perplexity, against.bits_per_byte) == (None, None)
    assert any("17 x 32 tokens" in sentence and "16 x 32 tokens" in sentence for sentence in report.warnings)


def test_a_text_that_is_shorter_than_asked_for_is_mentioned(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A short text. " * 40)
    settings = TEXT_ONLY.model_copy(update={"text": str(tmp_path / "short.txt"), "windows": 64, "length": 32})
    report = evaluate(["builtin:smelt-6m"], settings=settings, output=tmp_path / "out")
    text = report.models[0].text
    assert text is not None
    assert text.windows < 64
    assert [s for s in report.warnings if f"short.txt has {text.windows} windows of 32 tokens, and windows is 64" in s]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--fail-if", "ppl>+2%"], "relative to a baseline; give one with --baseline"),
        (["--fail-if", "kl>0.1"], "relative to a baseline"),
        (["--fail-if", "decode<1", "--speed", "none"], "about speed, which is not measured"),
        (["--fail-if", "task:piqa<0.5"], "none is measured; name it with --tasks"),
        (["--fail-if", "draft_speedup<1"], "give a --drafter"),
    ],
)
def test_gates_on_what_is_not_measured_are_refused_at_once(options: list[str], says: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["eval", "builtin:smelt-6m", "--output", str(tmp_path / "out"), *options])
    assert found.exit_code == 1
    assert says in found.stderr
    assert not (tmp_path / "out").exists()


def test_an_interrupted_evaluation_is_partial_and_continues(
    interrupted: tuple[ReportData, Path], measured: tuple[ReportData, Path]
) -> None:
    report, again = interrupted[0], measured[0]
    assert report.status == "partial"
    assert report.missing == [f"the speed of {model.name}" for model in report.models]
    assert again.status == "complete"
    for before, after in zip(report.models, again.models, strict=True):
        assert before.text is not None
        assert (after.text, after.tasks, after.samples) == (before.text, before.tasks, before.samples)
        assert before.speed is None
        assert after.speed is not None


@pytest.mark.slow
def test_an_interrupt_ends_with_one_sentence_and_leaves_no_process(w4: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "smelt.compress", "eval", str(w4), "--baseline", "builtin:smelt-6m"]
    command += ["--windows", "2", "--length", "32", "--samples", "0", "--output", str(tmp_path / "out")]
    command += ["--speed", "prompt=16,generate=900,concurrency=8,repeats=100"]
    # Tests that run in the background of a shell are started with interrupts ignored, which a child would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 60
        while len(started := psutil.Process(process.pid).children(recursive=True)) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the processes that measure did not start"
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        _, output = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert output.splitlines()[-1] == "smelt: interrupted; the same command continues where this one stopped"
    assert "Traceback" not in output
    assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert load(tmp_path / "out").status == "partial"


def test_a_kept_baseline_is_used_as_it_was_measured(
    measured: tuple[ReportData, Path], w4: Path, tmp_path: Path
) -> None:
    report, output = measured
    settings = Evaluate(windows=6, length=96, samples=0, tasks=["smelt_continuation"], limit=40, speed=False)
    again = evaluate([w4], baseline=output / "report.json", settings=settings, output=tmp_path / "out")
    assert again.models[0].text == report.models[0].text
    new, old = again.candidates[0].against, report.candidates[0].against
    assert new is not None
    assert old is not None
    assert new.perplexity == old.perplexity
    assert new.tasks == old.tasks
    assert new.kl is None
    assert new.decode is None


def test_a_baseline_from_another_machine_is_refused_unless_allowed(
    measured: tuple[ReportData, Path], w4: Path, tmp_path: Path
) -> None:
    report, _ = measured
    foreign = report.model_copy(update={"machine": report.machine.model_copy(update={"processor": "Another 9000"})})
    (tmp_path / "foreign").mkdir()
    save(foreign, tmp_path / "foreign")
    settings = Evaluate(windows=6, length=96, samples=0, speed=False)
    with pytest.raises(SmeltError, match=r"measured on another machine .*Another 9000.*--allow-foreign-baseline"):
        evaluate([w4], baseline=tmp_path / "foreign", settings=settings, output=tmp_path / "out")
    allowed = evaluate(
        [w4],
        baseline=tmp_path / "foreign",
        settings=settings,
        output=tmp_path / "out",
        allow_foreign_baseline=True,
    )
    assert any("another machine" in sentence for sentence in allowed.models[0].warnings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tasks": ["nowhere.yaml"]}, "nowhere.yaml: file not found"),
        ({"text": "nowhere.txt"}, "text: nowhere.txt: text file not found"),
        ({"device": "tpu"}, "device: device is 'tpu'; it must be cpu or cuda"),
        ({"length": 4096}, "length: 4096 tokens exceed the context length of"),
        (
            {"speed": {"prompt": 1000, "generate": 100}},
            "speed: a prompt of 1000 and 100 generated tokens exceed the context length",
        ),
    ],
)
def test_bad_settings_are_reported_before_any_work(settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match=sentence):
        evaluate(["builtin:smelt-6m"], settings=Evaluate.model_validate(settings), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_data_that_is_missing_is_named_with_where_to_get_it(tmp_path: Path) -> None:
    task = tmp_path / "mine.yaml"
    task.write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: lost.jsonl}\noutput_type: loglikelihood_rolling\n"
        "test_split: train\ndoc_to_text: ''\ndoc_to_target: text\n"
    )
    with pytest.raises(SmeltError, match=r"mine\.yaml: its data file lost\.jsonl was not found"):
        evaluate(["builtin:smelt-6m"], settings=Evaluate(tasks=[str(task)], speed=False), output=tmp_path / "out")
    asked = Evaluate(tasks=["lambada_openai", "smelt_last_wort"])
    with pytest.raises(SmeltError) as raised:
        evaluate(["builtin:smelt-6m"], settings=asked, output=tmp_path / "out")
    missing, unknown = str(raised.value).split("\n")
    assert "lambada_openai: its data, the dataset 'EleutherAI/lambada_openai' of the Hugging Face hub" in missing
    assert "hf download --repo-type dataset EleutherAI/lambada_openai" in missing
    assert "'smelt_last_wort' is neither an lm-eval task nor a YAML file; did you mean smelt_last_word" in unknown


def test_a_task_that_leaves_no_room_for_a_prompt_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(
        "task: long\ndataset_path: json\ndataset_kwargs: {data_files: data.jsonl}\noutput_type: generate_until\n"
        "test_split: train\ndoc_to_text: text\ndoc_to_target: text\ngeneration_kwargs: {max_gen_toks: 2000}\n"
        "metric_list: [{metric: exact_match}]\n".replace("data.jsonl", str(tmp_path / "data.jsonl"))
    )
    (tmp_path / "data.jsonl").write_text('{"text": "words"}\n')
    with pytest.raises(
        SmeltError, match="long generates up to 2000 tokens, but the context length of builtin:smelt-6m is 1024"
    ):
        evaluate(["builtin:smelt-6m"], settings=Evaluate(tasks=[str(path)], speed=False), output=tmp_path / "out")


def test_missing_checkpoints_are_all_reported(tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match=r"(?s)\./one: directory not found.*\./two: directory not found"):
        evaluate(["./one", "./two"], output=tmp_path / "out")
    with pytest.raises(SmeltError, match="is named twice"):
        evaluate(["builtin:smelt-6m"], baseline="builtin:smelt-6m", output=tmp_path / "out")


def test_the_output_of_a_run_is_not_overwritten(w4: Path) -> None:
    with pytest.raises(SmeltError, match="holds what `smelt run` made"):
        evaluate(["builtin:smelt-6m"], settings=TEXT_ONLY, output=w4.parent)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("promt=12", "unknown key 'promt'.*did you mean prompt"),
        ("prompt=many", "prompt must be a whole number"),
        ("512", "expected key=value"),
        ("generate=1", "--speed generate"),
        ("prompt=1,2", "prompt must be a whole number"),
    ],
)
def test_a_load_that_cannot_be_understood_is_reported(flag: str, sentence: str) -> None:
    from smelt.compress.evaluation.flags import speed_settings

    with pytest.raises(SmeltError, match=sentence):
        speed_settings(flag)


def test_a_load_is_read_as_it_is_written() -> None:
    from smelt.compress.evaluation.flags import speed_settings

    found = speed_settings("prompt=512,generate=128,concurrency=1,8,32")
    assert found == SpeedSettings(prompt=512, generate=128, concurrency=[1, 8, 32])
    assert speed_settings("none") is False


def test_the_command_prints_a_summary_and_gates_decide_its_status(w4: Path, tmp_path: Path) -> None:
    command = ["eval", str(w4), "--baseline", "builtin:smelt-6m"]
    command += [
        "--windows",
        "4",
        "--length",
        "64",
        "--samples",
        "0",
        "--speed",
        "none",
        "--output",
        str(tmp_path / "o"),
    ]
    command += ["--fail-if", "size>-10%", "--fail-if", "size>-90%"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "smaller" in done.stdout.splitlines()[0]
    assert done.stdout.strip().endswith("report.html")
    (message,) = done.stderr.splitlines()
    assert message.startswith("smelt: gate size>-90% failed: ")


def _copy(path: Path, change: Callable[[Any], object]) -> Path:
    """smelt-6m with something changed."""
    shutil.copytree(SMELT_6M, path)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        change(model)
    model.save_pretrained(path)
    return path


def _builtin_windows(count: int, length: int) -> torch.Tensor:
    from smelt.models.text.text_source import TextSource
    from smelt.models.text.windows import evaluation_windows

    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    return evaluation_windows(TextSource("builtin", "evaluation"), tokenizer, count, length).tokens
