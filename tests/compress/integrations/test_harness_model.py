"""Smelt's engine under lm-eval against lm-eval's own model over transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from smelt.compress import Recipe, run
from smelt.compress.integrations.lm_eval import SmeltLM
from smelt.runtime import RuntimeProblem
from smelt.system.errors import SmeltError
from torch.utils import collect_env
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...tiny import REPOSITORY, SMELT_6M, save_model

BUILTIN_TASKS = REPOSITORY / "compress" / "evaluation" / "builtin_tasks"
SHARED_TASKS = REPOSITORY / "tests" / "tasks"
NEAR = 1e-3
SHORT = 64


def _hf(path: Path, **options: Any) -> HFLM:
    return HFLM(pretrained=str(path), dtype="float32", device="cpu", batch_size=8, **options)


@pytest.fixture(scope="module", autouse=True)
def _machine_described_once() -> Iterator[None]:
    """lm-eval starts processes to describe the machine in each result, which takes longer than the small model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect_env, "get_pretty_env_info", cache(collect_env.get_pretty_env_info))
        yield


@pytest.fixture(scope="module")
def ours() -> SmeltLM:
    return SmeltLM(str(SMELT_6M), dtype="float32", quiet=True)


@pytest.fixture(scope="module")
def theirs() -> HFLM:
    return _hf(SMELT_6M)


@pytest.fixture(scope="module")
def short() -> tuple[SmeltLM, HFLM]:
    """Both, with a model length of 64."""
    ours = SmeltLM(str(SMELT_6M), dtype="float32", quiet=True, max_model_len=SHORT)
    return ours, _hf(SMELT_6M, max_length=SHORT)


@pytest.fixture(scope="module")
def tasks() -> TaskManager:
    return TaskManager(include_path=[str(BUILTIN_TASKS), str(SHARED_TASKS)], include_defaults=False)


def _evaluated(model: LM, task: str, tasks: TaskManager, limit: int | None) -> tuple[dict[str, float], list[Any]]:
    """A task's metrics, and what the model answered to each request."""
    found = simple_evaluate(model, tasks=[task], task_manager=tasks, limit=limit, bootstrap_iters=0)
    assert found is not None
    metrics = {
        name: value
        for name, value in found["results"][task].items()
        if isinstance(value, float | int) and "_stderr" not in name and name != "sample_len"
    }
    answers = [
        answer
        for sample in found["samples"][task]
        for answers_of_request in sample["resps"]
        for answer in answers_of_request
    ]
    return metrics, answers


def _assert_agree(ours: list[Any], theirs: list[Any]) -> None:
    """Answers agree: log probabilities nearly, all else exactly."""
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, tuple):
            assert mine[0] == pytest.approx(other[0], abs=NEAR)
            assert mine[1] == other[1]
        elif isinstance(mine, float):
            assert mine == pytest.approx(other, abs=NEAR)
        else:
            assert mine == other


def _assert_same_evaluation(ours: LM, theirs: LM, task: str, tasks: TaskManager, limit: int | None) -> None:
    mine, my_answers = _evaluated(ours, task, tasks, limit)
    other, other_answers = _evaluated(theirs, task, tasks, limit)
    assert mine
    assert mine == pytest.approx(other, rel=NEAR, abs=NEAR)
    _assert_agree(my_answers, other_answers)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "limit"), [("smelt_last_word", 40), ("smelt_continuation", 20), ("smelt_text", 20)])
def test_builtin_tasks_score_as_with_transformers(
    task: str, limit: int, ours: SmeltLM, theirs: HFLM, tasks: TaskManager
) -> None:
    _assert_same_evaluation(ours, theirs, task, tasks, limit)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("task", "limit"),
    [
        ("shared_lambada", 30),
        ("shared_blimp_anaphor_gender_agreement", 30),
        ("shared_blimp_determiner_noun_agreement_1", 30),
        ("shared_gsm8k", 4),
        ("shared_blimp_regular_plural_subject_verb_agreement_1", 30),
        ("shared_blimp_wh_questions_object_gap", 30),
        ("shared_hellaswag", 20),
        ("shared_piqa", 20),
        ("shared_arc_easy", 20),
        ("shared_arc_challenge", 20),
    ],
)
@pytest.mark.usefixtures("shared")
def test_public_tasks_score_as_with_transformers(
    task: str, limit: int, ours: SmeltLM, theirs: HFLM, tasks: TaskManager
) -> None:
    _assert_same_evaluation(ours, theirs, task, tasks, limit)


def _requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in arguments]  # type: ignore[arg-type]


def _beginnings(tasks: TaskManager, count: int) -> list[str]:
    """Beginnings of passages, some of them longer than what the short models read."""
    documents = tasks.load(["smelt_text"])["tasks"]["smelt_text"].eval_docs
    return [documents[i]["text"][: 60 + 90 * i] for i in range(count)]


@pytest.mark.parametrize("task", ["smelt_last_word", "smelt_continuation", "smelt_text"])
def test_what_exceeds_the_models_length_is_cut_as_transformers_is_given_it(
    task: str, short: tuple[SmeltLM, HFLM], tasks: TaskManager
) -> None:
    ours, theirs = short
    _assert_same_evaluation(ours, theirs, task, tasks, 8)
    for item in tasks.load([task])["tasks"][task].eval_docs.select(range(8)):
        assert len(ours.tok_encode(item.get("context") or item["text"])) > SHORT + 1


def test_prompts_that_exceed_the_models_length_are_cut_from_the_left(
    short: tuple[SmeltLM, HFLM], tasks: TaskManager
) -> None:
    ours, theirs = short
    settings = {"until": ["nothing"], "max_gen_toks": 20}
    asked = [(text, settings) for text in _beginnings(tasks, 6)]
    assert len(ours.tok_encode(asked[0][0])) < SHORT - 20 < len(ours.tok_encode(asked[-1][0]))
    _assert_agree(
        ours.generate_until(_requests("generate_until", asked)),
        theirs.generate_until(_requests("generate_until", asked)),
    )


def test_no_room_for_a_prompt_is_reported(short: tuple[SmeltLM, HFLM]) -> None:
    with pytest.raises(RuntimeProblem, match="the task generates 64 tokens, but the model's context length is 64"):
        short[0].generate_until(_requests("generate_until", [("Once", {"max_gen_toks": SHORT})]))


def test_empty_contexts_and_spaces_at_the_ends_are_transformers(ours: SmeltLM, theirs: HFLM) -> None:
    pairs = [
        ("", "The rain had imprisoned eleven persons."),
        ("", " persons"),
        ("", "<|endoftext|>The rain"),
        ("<|endoftext|>", "The rain"),
        ("<|endoftext|>The rain", " had"),
        ("The rain had ", "imprisoned"),
        ("The rain had   ", " imprisoned them  "),
        ("The rain.\n\n", "It was Mrs. Lavington"),
        ("The ra", "in had"),
    ]
    _assert_agree(
        ours.loglikelihood(_requests("loglikelihood", pairs)), theirs.loglikelihood(_requests("loglikelihood", pairs))
    )


def test_generation_ends_where_transformers_does(ours: SmeltLM, theirs: HFLM, tasks: TaskManager) -> None:
    asked = [
        (text, settings)
        for text in _beginnings(tasks, 4)
        for settings in (
            {"until": ".", "max_gen_toks": 40},
            {"until": [" the", "\n"], "max_gen_toks": 24},
            {"until": [], "max_new_tokens": 7, "temperature": 0.0},
            {"until": ["nothing"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7},
        )
    ]
    found = ours.generate_until(_requests("generate_until", asked))
    _assert_agree(found, theirs.generate_until(_requests("generate_until", asked)))
    assert not any(text.count(".") for text in found[::4])


def test_an_empty_context_is_continued_from_the_beginning_token(ours: SmeltLM, theirs: HFLM) -> None:
    settings = {"until": ["nothing"], "max_gen_toks": 12}
    found = ours.generate_until(_requests("generate_until", [("", settings)]))
    assert found[0]
    # transformers cannot be given an empty context.
    _assert_agree(found, theirs.generate_until(_requests("generate_until", [("<|endoftext|>", settings)])))


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_a_beginning_token_is_added_as_asked(add_bos_token: bool) -> None:
    ours = SmeltLM(str(SMELT_6M), dtype="float32", quiet=True, add_bos_token=add_bos_token)
    theirs = _hf(SMELT_6M, add_bos_token=add_bos_token)
    assert ours.tok_encode("The rain")[:1] == [0] if add_bos_token else ours.tok_encode("The rain")[:1] != [0]
    pairs = [("The rain", " had imprisoned"), ("<|endoftext|>The rain", " had"), ("", "The rain")]
    _assert_agree(
        ours.loglikelihood(_requests("loglikelihood", pairs)), theirs.loglikelihood(_requests("loglikelihood", pairs))
    )
    texts = [("The rain had imprisoned eleven persons.",)]
    _assert_agree(
        ours.loglikelihood_rolling(_requests("loglikelihood_rolling", texts)),
        theirs.loglikelihood_rolling(_requests("loglikelihood_rolling", texts)),
    )
    asked = [("The rain", {"until": ["nothing"], "max_gen_toks": 12})]
    _assert_agree(
        ours.generate_until(_requests("generate_until", asked)),
        theirs.generate_until(_requests("generate_until", asked)),
    )


def test_texts_of_a_sentencepiece_tokenizer_begin_as_with_transformers(shared: Path) -> None:
    path = shared / "models" / "stories260K"
    asked = [(text, {"until": ["."], "max_gen_toks": 20}) for text in ("Once upon", "Lily went to", "One day,")]
    found = SmeltLM(str(path), dtype="float32", quiet=True).generate_until(_requests("generate_until", asked))
    _assert_agree(found, _hf(path).generate_until(_requests("generate_until", asked)))


@pytest.mark.parametrize("stop", [" ", " the", "\n"])
def test_stops_of_a_sentencepiece_tokenizer_are_those_of_transformers(stop: str, shared: Path) -> None:
    """A text that is decoded alone lacks its first space, at which the engine, for which the prompt is before it, would stop."""
    path = shared / "models" / "stories260K"
    asked = [(text, {"until": [stop], "max_gen_toks": 20}) for text in ("Once upon", "Lily went to", "One day,")]
    found = SmeltLM(str(path), dtype="float32", quiet=True).generate_until(_requests("generate_until", asked))
    _assert_agree(found, _hf(path).generate_until(_requests("generate_until", asked)))
    assert all(found)


def test_a_template_without_a_system_role_gets_none_as_with_transformers(ours: SmeltLM, theirs: HFLM) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "[{{ m.content }}]{% endfor %}"
    )
    turns = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Hi"}]
    before = ours.tokenizer.chat_template, theirs.tokenizer.chat_template
    ours.tokenizer.chat_template = theirs.tokenizer.chat_template = template
    try:
        assert ours.apply_chat_template(turns) == theirs.apply_chat_template(turns) == "[Hi]"
        ours.tokenizer.chat_template = "{{ raise_exception('no') }}"
        with pytest.raises(SmeltError, match="chat template fails"):
            ours.apply_chat_template(turns)
    finally:
        ours.tokenizer.chat_template, theirs.tokenizer.chat_template = before


def test_a_special_token_can_be_a_stop_string(tmp_path: Path) -> None:
    """A model that writes <|end|> where smelt-6m writes a comma."""
    model = AutoModelForCausalLM.from_pretrained(SMELT_6M)
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    both = tokenizer.convert_tokens_to_ids([",", "<|end|>"])
    with torch.no_grad():
        model.get_input_embeddings().weight[both] = model.get_input_embeddings().weight[both[::-1]]
    path = save_model(model, tmp_path / "model")
    ours, theirs = SmeltLM(str(path), dtype="float32", quiet=True), _hf(path)
    stopped, going_on = (
        [("When the rain had ceased", {"until": [stop], "max_gen_toks": 30})] for stop in ("<|end|>", "nothing")
    )
    found = ours.generate_until(_requests("generate_until", stopped))
    _assert_agree(found, theirs.generate_until(_requests("generate_until", stopped)))
    assert found != ours.generate_until(_requests("generate_until", going_on))


def test_settings_that_the_engine_does_not_know_are_reported_and_leave_nothing_running(ours: SmeltLM) -> None:
    good = ("The rain", {"until": ["nothing"], "max_gen_toks": 8})
    bad = ("The rain", {"do_sample": True, "temperature": 0.5, "num_beams": 4, "penalty_alpha": 0.6})
    alone = ours.generate_until(_requests("generate_until", [good]))
    with pytest.raises(RuntimeProblem, match="ask for num_beams, penalty_alpha, which the engine does not support"):
        ours.generate_until(_requests("generate_until", [good, bad]))
    assert ours.generate_until(_requests("generate_until", [good])) == alone


def test_a_least_number_of_tokens_is_that_of_transformers(ours: SmeltLM, theirs: HFLM) -> None:
    asked = [("The rain", {"until": ["nothing"], "max_gen_toks": 12, "min_new_tokens": 9})]
    _assert_agree(
        ours.generate_until(_requests("generate_until", asked)),
        theirs.generate_until(_requests("generate_until", asked)),
    )


def test_a_questions_context_is_computed_once(tasks: TaskManager) -> None:
    fresh = SmeltLM(str(SMELT_6M), dtype="float32", quiet=True)
    computed: list[int] = []
    execute = fresh.engine.executor.execute

    def counting(plan):  # type: ignore[no-untyped-def]
        computed.append(plan.tokens)
        return execute(plan)

    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    # One question of each of some passages: questions of one passage share more than their own context.
    questions = list(range(2, 42, 4))
    task = tasks.load(["smelt_continuation"])["tasks"]["smelt_continuation"]
    expected = 0
    for question in task.eval_docs.select(questions):
        context = tokenizer(question["context"]).input_ids
        answers = [tokenizer(f"{question['context']} {choice}").input_ids for choice in question["choices"]]
        assert all(answer[: len(context)] == context for answer in answers)
        expected += len(context) + sum(len(answer) - len(context) - 1 for answer in answers)
    fresh.engine.executor.execute = counting  # type: ignore[method-assign]
    simple_evaluate(
        fresh,
        tasks=["smelt_continuation"],
        task_manager=tasks,
        samples={"smelt_continuation": questions},
        bootstrap_iters=0,
    )
    assert sum(computed) == expected


def test_a_quantized_checkpoint_scores_as_with_transformers(recipe: Callable[..., Recipe], tasks: TaskManager) -> None:
    checkpoint = run(
        recipe("builtin:smelt-6m", {"evaluate": False}, scheme="W4A16", group_size=64, rounding="nearest")
    ).checkpoint
    ours = SmeltLM(str(checkpoint), dtype="float32", quiet=True)
    # Both restore the codes of a bfloat16 checkpoint in float32, where that is what they compute in.
    restored = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    theirs = HFLM(pretrained=restored, tokenizer=AutoTokenizer.from_pretrained(checkpoint), batch_size=8)
    _assert_same_evaluation(ours, theirs, "smelt_last_word", tasks, 40)


@pytest.mark.slow
def test_lm_eval_runs_smelt_by_name() -> None:
    task = BUILTIN_TASKS / "smelt_last_word.yaml"
    command = ["--model", "smelt", "--model_args", "pretrained=builtin:smelt-6m", "--tasks", str(task), "--limit", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "smelt ({'pretrained': 'builtin:smelt-6m'})" in done.stdout
    assert "|smelt_last_word|" in done.stdout
    assert "|perplexity|" in done.stdout


def test_processes_without_lm_eval_pay_nothing_for_that() -> None:
    """torch calls the hook at every import."""
    script = (
        "import sys, torch; print(sorted({m.partition('.')[0] for m in sys.modules} & {'lm_eval', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


@pytest.mark.slow
def test_registering_keeps_lm_evals_own_models() -> None:
    script = (
        "from smelt.compress.integrations.lm_eval_registration import register; register(); register()\n"
        "from lm_eval.api.registry import get_model; print(get_model('hf').__name__, get_model('smelt').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["HFLM", "SmeltLM"]
