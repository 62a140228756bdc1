"""A model behind a server scores, continues and is reported like one on the engine."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import Result
from lm_eval.models.openai_completions import LocalCompletionsAPI
from smelt.compress import Evaluate, SmeltError, evaluate
from smelt.compress.cli import app
from smelt.compress.evaluation.scoring.on_server import RemoteModel
from smelt.compress.evaluation.scoring.tasks import Tasks
from smelt.compress.evaluation.settings import SpeedSettings
from smelt.compress.integrations.lm_eval import SmeltLM
from smelt.compress.reporting.report_files import load
from smelt.compress.results.result import TaskResult
from smelt.models.text.text_source import TextSource
from smelt.models.text.windows import evaluation_windows
from smelt.runtime import Engine, SamplingParams
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ....runtime.measure.proxy import Proxy, listening, without
from ....runtime.serve.serving import Serving, served, serving
from ....tiny import REPOSITORY, SMELT_6M, save_model

NEAR = 1e-4
TEXT_ONLY = Evaluate(windows=4, length=64, samples=0, speed=False)
SCORED = ["smelt_continuation", "smelt_last_word", "smelt_text"]
GENERATING = """
task: goes_on
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
generation_kwargs:
  until: [".", "<|end|>"]
  max_gen_toks: 12
  do_sample: false
"""
BEGINNINGS = ["The city of", "When the rain had ceased", "Once upon a time there was", "It was the best of", "A"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(SMELT_6M, dtype="float32", max_num_seqs=16, quiet=True)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Serving]:
    with serving([served(engine)]) as found:
        yield found


@pytest.fixture(scope="module")
def remote(server: Serving) -> RemoteModel:
    return RemoteModel(server.url, tokenizer="builtin:smelt-6m")


@pytest.fixture(scope="module")
def goes_on(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A task of which the model is right in three of five items."""
    folder = tmp_path_factory.mktemp("task")
    params = SamplingParams(max_tokens=12, temperature=0, stop=(".",))
    outputs = engine.generate(BEGINNINGS, params)
    answers = [output.outputs[0].text if i < 3 else "else" for i, output in enumerate(outputs)]
    rows = [{"text": text, "answer": answer} for text, answer in zip(BEGINNINGS, answers, strict=True)]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "goes_on.yaml").write_text(GENERATING.format(data=folder / "items.jsonl"))
    return str(folder / "goes_on.yaml")


def _windows(count: int, length: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    return evaluation_windows(TextSource("builtin", "evaluation"), tokenizer, count, length).tokens.tolist()


def _assert_same(ours: list[TaskResult], theirs: list[TaskResult]) -> None:
    assert [(each.metric, each.filter, each.items) for each in ours] == [
        (each.metric, each.filter, each.items) for each in theirs
    ]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.value == pytest.approx(other.value, rel=NEAR)
        for one, another in zip(mine.by_item, other.by_item, strict=True):
            assert one == pytest.approx(another, rel=NEAR, abs=NEAR)


def test_scores_are_the_engines(remote: RemoteModel, engine: Engine) -> None:
    windows = _windows(12, 300)
    pairs = [(each[: 1 + 20 * i], each[1 + 20 * i : 8 + 24 * i]) for i, each in enumerate(windows)]
    # What the model itself would say is the most likely token everywhere.
    said = engine.generate(windows[0][:40], SamplingParams(max_tokens=10, temperature=0))[0].outputs[0].token_ids
    pairs += [(windows[0][:40], said), ([5], [6]), (windows[1][:290] * 3, windows[2][:100])]
    found, wanted = remote.score(pairs), engine.score(pairs)
    assert all(score.is_best for score in found[12])
    assert len({score.is_best for scores in found for score in scores}) == 2
    for mine, theirs in zip(found, wanted, strict=True):
        assert [score.logprob for score in mine] == pytest.approx([score.logprob for score in theirs], abs=NEAR)
        assert [score.is_best for score in mine] == [score.is_best for score in theirs]


def test_continuations_are_the_engines(remote: RemoteModel, engine: Engine) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0),
        SamplingParams(max_tokens=30, temperature=0, stop=(" the", "."), repetition_penalty=1.3),
        SamplingParams(max_tokens=9, temperature=0.8, top_k=1),
    ]
    prompts: list[Any] = [(text, each) for text in BEGINNINGS for each in params]
    prompts += [(_windows(1, 50)[0], params[0])]
    wanted = [engine.generate(prompt, each)[0].outputs[0].text for prompt, each in prompts]
    assert remote.complete(prompts) == wanted
    assert [sample.prompt for sample in remote.continuations(BEGINNINGS)] == BEGINNINGS


@pytest.fixture(scope="module")
def measured(remote: RemoteModel, goes_on: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a server beside the checkpoint."""
    settings = Evaluate(
        windows=6,
        length=96,
        samples=2,
        tasks=[*SCORED, goes_on],
        limit=8,
        speed=SpeedSettings(prompt=16, generate=8, concurrency=[2], repeats=2),
    )
    output = tmp_path_factory.mktemp("eval") / "out"
    evaluate([], baseline="builtin:smelt-6m", servers=[remote], settings=settings, output=output, progress=False)
    return output


def test_another_servers_speed_is_its_own(remote: RemoteModel, engine: Engine, tmp_path: Path) -> None:
    """Though it serves the same model."""
    speed = SpeedSettings(prompt=8, generate=4, concurrency=[1], repeats=1)
    settings = Evaluate(windows=1, length=16, samples=0, speed=speed)
    with serving([served(engine)]) as other:
        found = [
            evaluate([], servers=[each], settings=settings, output=tmp_path / "out", progress=False).models[0].speed
            for each in (remote, RemoteModel(other.url, tokenizer="builtin:smelt-6m"), remote)
        ]
    assert found[0] != found[1]
    assert found[0] == found[2]


@pytest.mark.slow
def test_a_server_is_a_model_of_the_report(measured: Path, server: Serving) -> None:
    report = load(measured)
    assert report.status == "complete"
    ours, theirs = report.models
    assert (theirs.name, theirs.role, theirs.path) == (f"smelt-6m on {server.url[7:]}", "candidate", server.url)
    assert theirs.scheme.startswith("served by Smelt ")
    assert theirs.size is None
    assert ours.size is not None
    against = theirs.against
    assert against is not None
    assert against.size is None
    assert against.perplexity is not None
    # bfloat16 beside float32.
    assert against.perplexity.ratio == pytest.approx(1, abs=2e-2)
    assert against.perplexity.interval is not None
    assert {change.task for change in against.tasks} == {*SCORED, "goes_on"}
    assert len(theirs.samples) == 2
    schema = json.loads((REPOSITORY / "docs/report.schema.json").read_text())
    jsonschema.validate(json.loads((measured / "report.json").read_text()), schema)
    for name in ("report.md", "report.html"):
        text = (measured / name).read_text()
        assert theirs.name in text.replace("\\", "")
        assert theirs.scheme in text.replace("\\", "")
    assert (measured / "pareto.svg").exists()
    assert theirs.scheme in report.summary()


@pytest.mark.slow
def test_its_speed_is_measured_in_turns(measured: Path) -> None:
    report = load(measured)
    for model in report.models:
        assert model.speed is not None
        assert model.speed.interleaved
        assert len(model.speed.decode_rate.values) == 2
        assert [load.concurrency for load in model.speed.loads] == [2]
    theirs = report.models[1].speed
    assert theirs is not None
    assert (theirs.load_seconds, theirs.peak_memory_bytes, theirs.decode_bytes_per_token) == (None, None, None)
    against = report.models[1].against
    assert against is not None
    assert against.decode is not None
    assert against.loads.keys() == {"2"}
    assert (against.reasons, against.predicted_decode, against.memory) == ([], None, None)
    assert any("speeds of servers include HTTP" in sentence for sentence in report.warnings)


@pytest.mark.slow
def test_the_text_and_the_tasks_are_scored_as_on_the_engine(measured: Path, engine: Engine, goes_on: str) -> None:
    theirs = load(measured).models[1]
    scores = engine.score([(window[:1], window[1:]) for window in _windows(6, 96)])
    assert theirs.text is not None
    sums = [-math.fsum(score.logprob for score in window) for window in scores]
    assert theirs.text.nll == pytest.approx(sums, rel=NEAR)
    assert theirs.text.perplexity == pytest.approx(math.exp(sum(sums) / (6 * 95)), rel=NEAR)
    assert theirs.text.computed_by.startswith("Smelt ")
    tasks = Tasks.find([*SCORED, goes_on])
    harness = SmeltLM(engine=engine, disable_tqdm=True)
    for name in tasks.loaded:
        wanted = tasks.run(name, harness, 8, None)
        _assert_same([result for result in theirs.tasks if result.task == name], wanted)
    (right,) = [result for result in theirs.tasks if result.task == "goes_on"]
    assert right.by_item == [1, 1, 1, 0, 0]


def test_finished_measurements_are_kept_while_the_server_says_the_same(
    server: Serving, goes_on: str, tmp_path: Path
) -> None:
    settings = TEXT_ONLY.model_copy(update={"tasks": [goes_on], "samples": 1})
    proxy = Proxy(server.url)
    with listening(proxy) as url:
        for is_kept in (False, True):
            model = RemoteModel(url, tokenizer=str(SMELT_6M))
            proxy.passed.clear()
            evaluate([], servers=[model], settings=settings, output=tmp_path / "out", progress=False)
            assert bool(proxy.passed) != is_kept
        changed = AutoModelForCausalLM.from_pretrained(SMELT_6M, dtype=torch.float32)
        with torch.no_grad():
            changed.get_input_embeddings().weight.mul_(1.05)
        path = save_model(changed, tmp_path / "changed")
        with serving([served(Engine(path, dtype="float32", quiet=True))]) as other:
            proxy.upstream = other.url
            model = RemoteModel(url, tokenizer=str(SMELT_6M))
            proxy.passed.clear()
            evaluate([], servers=[model], settings=settings, output=tmp_path / "out", progress=False)
            assert proxy.passed


def _eval(url: str, *options: str, output: Path) -> Result:
    fast = ["--speed", "none", "--windows", "2", "--length", "32", "--samples", "0", "--output", str(output)]
    return CliRunner().invoke(app, ["eval", "--server", url, *fast, *options])


def _refusal(result: Result) -> str:
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("smelt: ")]
    return line


def test_the_command(server: Serving, tmp_path: Path) -> None:
    options = ["--tokenizer", "builtin:smelt-6m", "--model", "smelt-6m", "--tasks", "smelt_last_word", "--limit", "4"]
    done = _eval(server.url, *options, output=tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "served by Smelt" in done.stdout
    assert "text:     perplexity" in done.stdout
    assert "task:     smelt_last_word" in done.stdout
    assert [model.size for model in load(tmp_path / "out").models] == [None]
    failed = _eval(server.url, *options, "--fail-if", "size>1", output=tmp_path / "out")
    assert failed.exit_code == 1
    assert "has no size" in failed.stderr


def _without_echo(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "echo"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_without_echo, "returns no log probabilities of prompts (`echo` with `logprobs`)"),
        (without("logprobs"), "returns no log probabilities of prompts (`echo` with `logprobs`)"),
        (without("ids"), "takes no prompts of token ids"),
    ],
    ids=["ignored", "refused", "texts"],
)
def test_what_needs_log_probabilities_is_left_out_and_it_is_said(
    change: Any, why: str, server: Serving, engine: Engine, goes_on: str, tmp_path: Path
) -> None:
    with listening(Proxy(server.url, change=change)) as url:
        model = RemoteModel(url, tokenizer="builtin:smelt-6m")
        settings = TEXT_ONLY.model_copy(update={"tasks": [*SCORED, goes_on], "samples": 1, "limit": 5})
        report = evaluate([], servers=[model], settings=settings, output=tmp_path / "out", progress=False)
    assert report.status == "complete"
    assert report.warnings == [
        f"{model.name} {why}, so the text's perplexity, smelt_continuation, smelt_last_word and smelt_text cannot be"
        " measured on it"
    ]
    (found,) = report.models
    assert found.text is None
    assert [(result.task, result.by_item) for result in found.tasks] == [("goes_on", [1, 1, 1, 0, 0])]
    assert len(found.samples) == 1
    assert f"note: {report.warnings[0]}" in report.summary()


def test_a_server_beside_a_checkpoint_that_can_do_more(server: Serving, tmp_path: Path) -> None:
    with listening(Proxy(server.url, change=_without_echo)) as url:
        model = RemoteModel(url, tokenizer="builtin:smelt-6m")
        settings = TEXT_ONLY.model_copy(update={"samples": 1})
        report = evaluate(["builtin:smelt-6m"], servers=[model], settings=settings, output=tmp_path, progress=False)
    assert report.status == "complete"
    assert [each.text is None for each in report.models] == [False, True]
    assert [len(each.samples) for each in report.models] == [1, 1]


def test_nothing_that_can_be_measured(server: Serving, tmp_path: Path) -> None:
    with listening(Proxy(server.url, change=_without_echo)) as url:
        said = _refusal(_eval(url, "--tokenizer", str(SMELT_6M), "--tasks", "smelt_text", output=tmp_path / "out"))
    assert said.endswith("(`echo` with `logprobs`); ask for tasks that generate, samples or speed")
    assert not (tmp_path / "out").exists()


def _other_tokenizer(folder: Path) -> Path:
    """smelt-6m's, with two tokens exchanged."""
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(SMELT_6M / name, folder / name)
    data = json.loads((SMELT_6M / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    one, other = AutoTokenizer.from_pretrained(SMELT_6M).tokenize("The quick fox")[:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def test_what_is_wrong_is_said(server: Serving, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path / "out"
    assert _refusal(_eval(server.url, output=out)).endswith(
        "does not say what smelt-6m was loaded from; name that checkpoint, or another one with its tokenizer, with --tokenizer"
    )
    tokenizer = _other_tokenizer(tmp_path_factory.mktemp("other"))
    other = _eval(server.url, "--tokenizer", str(tokenizer), output=out)
    assert "is not the tokenizer of smelt-6m on http://" in _refusal(other)
    assert "serves no model 'large'; it serves smelt-6m" in _refusal(_eval(server.url, "--model", "large", output=out))
    assert "is not the address of a server" in _refusal(_eval("here:8000", output=out))
    long = _eval(server.url, "--tokenizer", str(SMELT_6M), "--length", "1024", output=out)
    assert "1024 tokens exceed the context length of" in _refusal(long)
    nothing = CliRunner().invoke(app, ["eval", "--output", str(out)])
    assert _refusal(nothing).endswith("there is nothing to evaluate; give a checkpoint, or a server with --server")
    alone = CliRunner().invoke(app, ["eval", "builtin:smelt-6m", "--tokenizer", "builtin:smelt-6m"])
    assert "--model and --tokenizer are of a server" in _refusal(alone)
    twice = _eval(server.url, "--server", f"{server.url}/v1", "--tokenizer", str(SMELT_6M), output=out)
    assert "is named twice" in _refusal(twice)
    assert not out.exists()


def test_a_failing_server_ends_the_evaluation_with_a_partial_report(server: Serving, tmp_path: Path) -> None:
    proxy = Proxy(server.url)
    with listening(proxy) as url:
        model = RemoteModel(url, tokenizer=str(SMELT_6M))
        proxy.change = lambda body: "out of memory" if body.get("echo") else body
        settings = TEXT_ONLY.model_copy(update={"tasks": ["smelt_last_word"], "limit": 3})
        with pytest.raises(SmeltError, match=r"refused /v1/completions \(400: out of memory\)"):
            evaluate([], servers=[model], settings=settings, output=tmp_path / "out", progress=False)
    report = load(tmp_path / "out")
    assert report.status == "partial"
    assert report.missing == [f"the text read by {model.name}", f"smelt_last_word answered by {model.name}"]


def test_the_server_says_which_tokenizer_it_has(server: Serving, tmp_path: Path) -> None:
    """vLLM names the directory or the hub's model that it has loaded."""
    entry = {"id": "smelt-6m", "owned_by": "vllm", "root": str(SMELT_6M), "max_model_len": 512}
    with listening(Proxy(server.url, answers={"/v1/models": {"data": [entry]}})) as url:
        model = RemoteModel(url)
    assert model.directory.path == SMELT_6M
    assert model.max_model_len == 510
    assert model.no_scores is None
    text = model.tokenizer.decode(_windows(1, 30)[0])
    assert model.tokenizer(text).input_ids == AutoTokenizer.from_pretrained(SMELT_6M)(text).input_ids


def test_a_text_is_read_within_the_servers_length(server: Serving) -> None:
    """A whole context is scored, which is one token less than the server's, as it has to generate one."""
    model = RemoteModel(server.url, tokenizer=str(SMELT_6M))
    window = (_windows(4, 300)[0] * 4)[:1023]
    (scores,) = model.score([(window[:1], window[1:])])
    assert len(scores) == 1022
    with pytest.raises(SmeltError, match="maximum context length is 1024"):
        model.score([([*window, 5], [6])])


@pytest.mark.slow
def test_lm_evals_client_scores_as_the_engine(server: Serving, engine: Engine, goes_on: str) -> None:
    theirs = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="smelt-6m",
        tokenizer=str(SMELT_6M),
        tokenizer_backend="huggingface",
        max_length=1024,
        num_concurrent=4,
    )
    ours = SmeltLM(engine=engine, disable_tqdm=True)
    tasks = Tasks.find([*SCORED, goes_on])
    for name, limit in (("smelt_continuation", 60), ("smelt_last_word", 60), ("smelt_text", 20), ("goes_on", 5)):
        _assert_same(tasks.run(name, theirs, limit, None), tasks.run(name, ours, limit, None))
