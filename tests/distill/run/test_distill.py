"""The distill step: what it wins back, what it leaves as it is, and what it refuses."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress import Recipe, SmeltError, run
from smelt.compress.pipeline.plan import Plan
from smelt.compress.recipe.file import read_document
from smelt.distill.losses.probabilities import most_likely
from smelt.distill.run.cached_teacher import CachedTeacherLogits
from smelt.distill.run.text_writer import Writer
from smelt.distill.run.training_text import training_windows
from smelt.distill.run.written_text import written_by
from smelt.distill.settings import TrainingText
from smelt.distill.training.batches import TrainingBatch
from smelt.distill.training.objective import Distilling
from smelt.distill.training.teachers import StoredTeacher
from smelt.system.hardware.resources import compute_dtype
from smelt.system.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...tiny import SMELT_6M, make_model, save_model

TRAINING = {"tokens": 8 * 4 * 32, "length": 32, "batch": 4, "learning_rate": 2e-3}
Make = Callable[..., Recipe]
# The command line, but for a snapshot after every step.
ALWAYS_SAVING = """
from smelt.compress.cli import main
from smelt.distill.training import trainer
trainer._SNAPSHOT_SECONDS, trainer._SNAPSHOT_SHARE = 0.0, 1e9
main()
"""


@pytest.fixture
def distilled(tmp_path: Path) -> Make:
    """``distilled(model, {"prune": …}, loss=…)``: a small recipe of some steps, then a distill step with changes."""

    def build(
        model: Path | str, *before: dict[str, Any], after: list[dict[str, Any]] | None = None, **changes: Any
    ) -> Recipe:
        return Recipe.model_validate(
            {
                "model": str(model),
                "output": str(tmp_path / "out"),
                "calibrate": {"samples": 4, "length": 32},
                "evaluate": {"windows": 4, "length": 32, "samples": 0, "speed": False},
                "steps": [*before, {"distill": {**TRAINING, **changes}}, *(after or [])],
            }
        )

    return build


@pytest.fixture
def few_words(tmp_path: Path) -> str:
    """A text of five windows, which even random weights learn in a moment."""
    path = tmp_path / "few.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and a miller grinds 200 sacks of rye. " * 6)
    return str(path)


def _training(out: Path, step: int = 0) -> dict[str, Any]:
    return json.loads((out / "checkpoint" / "smelt.json").read_text())["steps"][step]["training"]


def _losses(out: Path, step: int = 0) -> list[float]:
    """Of the steps of training; what was measured before them has none."""
    return [point["loss"] for point in _training(out, step)["curve"] if point["step"]]


def _problems(recipe: Recipe) -> str:
    return "\n".join(str(problem) for problem in Plan.make(recipe).problems)


@pytest.mark.slow
def test_a_pruned_model_comes_nearer_to_its_teacher(distilled: Make) -> None:
    recipe = distilled(
        "builtin:smelt-6m",
        {"prune": {"structure": "blocks", "count": 2}},
        tokens=24 * 4 * 64,
        length=64,
        learning_rate=5e-4,
    )
    report = run(recipe, progress=False).report
    out = Path(recipe.output)
    logged = _training(out, 1)
    held_out = [point["held_out"] for point in logged["curve"] if point["held_out"]]
    assert logged["curve"][0]["step"] == 0
    assert held_out[-1]["teacher"] < 0.9 * held_out[0]["teacher"]
    assert [each["step"] for each in logged["samples"]] == [0, 12, 24]
    assert all(each["texts"][0]["text"] for each in logged["samples"])
    # What transformers computes with the checkpoint is what was measured last.
    model = AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    assert len(model.model.layers) == 4
    assert "trained on 6,144 tokens" in " ".join(report.candidates[0].warnings)
    rows = list(csv.DictReader((out / "training-step-1.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, 25))
    assert float(rows[-1]["tokens"]) == 24 * 4 * 64


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"loss": "reverse_kl", "temperature": 2.0}, marks=pytest.mark.slow),
        pytest.param({"loss": {"method": "jsd", "beta": 0.3}, "accumulate": 2}, marks=pytest.mark.slow),
        {"cross_entropy": 0.5, "hidden": 1.0, "attention": 1.0, "schedule": "wsd"},
        {"cross_entropy": 1.0, "small_states": True, "average": 0.9},
        {"stored": 16, "temperature": 1.5},
        pytest.param({"checkpointing": True, "skip_spikes": 100.0, "weight_decay": 0.1}, marks=pytest.mark.slow),
        {"checkpointing": True, "dtype": torch.bfloat16, "attention": 1.0},
    ],
    ids="-".join,
)
def test_every_way_of_training_lowers_its_loss(
    changes: dict[str, Any], distilled: Make, tiny: Callable[..., Path], few_words: str
) -> None:
    pruned = {"prune": {"structure": "ffn", "ratio": 0.5, "multiple": 32}}
    changes = dict(changes)
    recipe = distilled(
        tiny(dtype=changes.pop("dtype", torch.float32)), pruned, data=few_words, tokens=30 * 4 * 32, **changes
    )
    run(recipe, progress=False)
    losses = _losses(Path(recipe.output), 1)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "architecture",
    [
        "gemma2",
        "mixtral",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("opt", "gpt2", "qwen3", "gpt_neox")),
    ],
)
def test_architectures_learn(architecture: str, distilled: Make, tiny: Callable[..., Path], few_words: str) -> None:
    pruned = {"prune": {"structure": "blocks", "count": 1}}
    recipe = distilled(tiny(architecture), pruned, data=few_words, tokens=30 * 4 * 32, hidden=0.5)
    result = run(recipe, progress=False)
    losses = _losses(Path(recipe.output), 1)
    assert losses[-1] < 0.7 * losses[0]
    AutoModelForCausalLM.from_pretrained(result.checkpoint)


@pytest.mark.slow
def test_zeros_and_shapes_stay(distilled: Make, tiny: Callable[..., Path]) -> None:
    recipe = distilled(
        tiny(),
        {"prune": {"structure": "ffn", "ratio": 0.5, "multiple": 64}},
        {"prune": {"structure": "2:4", "score": "magnitude"}},
        after=[{"quantize": {"scheme": "W4A16", "group_size": 32}}],
    )
    before = distilled(
        tiny(),
        {"prune": {"structure": "ffn", "ratio": 0.5, "multiple": 64}},
        {"prune": {"structure": "2:4", "score": "magnitude"}},
    )
    assert _problems(recipe) == ""
    result = run(before, progress=False)
    weights = load_file(result.checkpoint / "model.safetensors")
    down = weights["model.layers.0.mlp.down_proj.weight"]
    assert down.shape == (128, 128)
    assert ((down.view(-1, 4) != 0).sum(1) == 2).all()
    assert weights["model.embed_tokens.weight"].count_nonzero() > 0.999 * weights["model.embed_tokens.weight"].numel()
    run(recipe, fresh=True, progress=False)
    restored = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    codes = dict(restored.named_modules())["model.layers.0.mlp.down_proj"]
    assert codes is not None


def test_a_teacher_can_be_another_model_with_the_same_tokens(
    distilled: Make, tiny: Callable[..., Path], few_words: str
) -> None:
    recipe = distilled(tiny(), teacher=str(SMELT_6M), hidden=1.0, data=few_words, tokens=30 * 4 * 32)
    run(recipe, progress=False)  # of another width: the projection is learned
    losses = _losses(Path(recipe.output))
    assert losses[-1] < 0.7 * losses[0]
    names = load_file(Path(recipe.output) / "checkpoint" / "model.safetensors").keys()
    assert not [name for name in names if "projection" in name]


def test_from_random_weights_of_the_same_shape(distilled: Make, tiny: Callable[..., Path]) -> None:
    path = tiny()
    recipe = distilled(path, student="random", cross_entropy=1.0, learning_rate=1e-8)
    result = run(recipe, progress=False)
    before, after = (load_file(each / "model.safetensors") for each in (path, result.checkpoint))
    name = "model.layers.0.mlp.up_proj.weight"
    assert after[name].std() == pytest.approx(0.02, rel=0.1)  # the configuration's initializer_range
    assert not torch.equal(before[name], after[name])
    assert torch.equal(after["model.norm.weight"].round(decimals=4), torch.ones(128))


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    data = {
        "model": str(tiny(dtype=torch.bfloat16)),
        "output": "unused",
        "calibrate": {"samples": 4, "length": 32},
        "evaluate": False,
        "steps": [{"distill": {**TRAINING, "tokens": 40 * 4 * 32, "cross_entropy": 0.5, "average": 0.95}}],
    }
    recipe.write_text(json.dumps(data))
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    command = [sys.executable, "-c", ALWAYS_SAVING, "run", str(recipe), "--output", str(killed)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    snapshot = killed / "journal" / "step-0" / "snapshot.json"
    while not snapshot.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert snapshot.exists()
    assert not (killed / "checkpoint").exists()
    for out in (killed, quiet):
        run(Recipe.model_validate({**data, "output": str(out)}), progress=False)
    # Every file: no time, date or place of either run is in them.
    one, other = ({f.name: f.read_bytes() for f in (out / "checkpoint").iterdir()} for out in (killed, quiet))
    assert {"model.safetensors", "smelt.json", "README.md"} <= one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    rows = list(csv.DictReader((killed / "training-step-0.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["student", pytest.param("teacher", marks=pytest.mark.slow)])
def test_written_text_is_the_same_after_an_interruption(
    writer: str, distilled: Make, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pruned = tiny(), {"prune": {"structure": "blocks", "count": 1}}
    data = {"source": "builtin", "writer": writer, "prompt": 8, **({"share": 0.6} if writer == "student" else {})}
    recipe = distilled(path, pruned, data=data, tokens=10 * 4 * 32)
    quiet = recipe.model_copy(update={"output": str(tmp_path / "quiet")})
    result = run(quiet, progress=False)
    track = Progress.track

    def stopped(progress: Progress, items: Any, *rest: Any) -> Any:
        for number, item in enumerate(track(progress, items, *rest)):
            if isinstance(items, range) and len(items) == 10 and number == 5:
                raise KeyboardInterrupt
            yield item

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "track", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, progress=False)
    again = run(recipe, progress=False)
    one, other = (load_file(each.checkpoint / "model.safetensors") for each in (again, result))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_only_what_the_student_wrote_counts(
    distilled: Make, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TrainingBatch] = []
    whole = Distilling.loss

    def watched(learner: Distilling, batch: TrainingBatch) -> Any:
        if torch.is_grad_enabled():
            seen.append(batch)
        return whole(learner, batch)

    monkeypatch.setattr(Distilling, "loss", watched)
    path = tiny()
    data = {"source": "builtin", "writer": "student", "prompt": 8, "temperature": 0.0}
    run(distilled(path, data=data, tokens=2 * 4 * 32, learning_rate=1e-12), progress=False)
    batch = seen[0]
    assert batch.counted is not None
    assert torch.equal(batch.counted[0], torch.tensor([0.0] * 7 + [1.0] * 24 + [0.0]))  # the last predicts nothing
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        expected = model(batch.tokens).logits[:, 7:-1].argmax(-1)
    assert torch.equal(batch.tokens[:, 8:], expected)  # greedily, so each is the most likely one after those before


@pytest.mark.slow
def test_what_is_written_ends_with_the_end_token() -> None:
    """What would come after it is no answer, and does not count."""
    writer = Writer(SMELT_6M, torch.float32, torch.device("cpu"), 60, 12, 4096)
    writer._bias = {0: 3.0}  # so that some end soon
    prompts = torch.tensor([[0, 895, 390, 4]] * 12)
    tokens, written = writer.continued(prompts, 1.0, 3)
    forever, all_written = writer.continued(prompts, 1.0, 3, ends=False)
    writer.close()
    assert all_written[:, 4:].all()
    ended = 0
    for row, which, longer in zip(tokens, written, forever, strict=True):
        stop = int(which.nonzero().max()) + 1
        assert which[4:stop].all()
        assert not which[:4].any()
        assert torch.equal(row[:stop], longer[:stop])
        assert not (row[4 : stop - 1] == 0).any()
        if stop < 60:
            ended += 1
            assert (row[stop - 1 :] == 0).all()
    assert 0 < ended < 12


def test_the_loss_is_that_of_answers_alone(
    distilled: Make, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a batch in two passes, which have unequal numbers of them."""
    path, model = tmp_path / "pairs.jsonl", tiny()
    records = [{"q": "What follows? " * (1 + i % 5), "a": f" It is {i + 1}."} for i in range(300)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    seen: list[TrainingBatch] = []
    whole = Distilling.loss
    monkeypatch.setattr(Distilling, "loss", lambda learner, batch: (seen.append(batch), whole(learner, batch))[1])
    data = {"source": str(path), "field": "q", "completion": "a"}
    settings = {"cross_entropy": 1, "learning_rate": 1e-12, "tokens": 8 * 4 * 32, "accumulate": 2}
    run(distilled(model, data=data, **settings), progress=False)
    first = next(i for i, batch in enumerate(seen) if len(batch.tokens) == 2)
    parts = seen[first : first + 2]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = weight = 0.0
    for part in parts:
        assert part.counted is not None
        with torch.no_grad():
            logits = reference(part.tokens).logits[:, :-1].double()
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part.tokens[:, 1:].flatten(), reduction="none")
        total += float((each * part.counted[:, :-1].flatten()).sum())
        weight += part.weight
    assert parts[0].weight != parts[1].weight
    curve = _training(tmp_path / "out")["curve"]
    assert next(point["loss"] for point in curve if point["step"] == 1) == pytest.approx(total / weight, rel=1e-2)


@pytest.mark.slow
def test_a_training_that_makes_it_worse_says_so(distilled: Make, tmp_path: Path) -> None:
    text = tmp_path / "noise.txt"
    text.write_text(" ".join(["zq", "xv", "kj", "wq"] * 3000))
    pruned = {"prune": {"structure": "blocks", "count": 1}}
    recipe = distilled(SMELT_6M, pruned, data=str(text), learning_rate=0.1, tokens=12 * 4 * 32)
    done = json.loads((run(recipe, progress=False).checkpoint / "smelt.json").read_text())["steps"][1]["done"]
    assert done[0].startswith("training made the model worse: its loss on held-out text was ")


def test_the_best_weights_are_kept(distilled: Make, tiny: Callable[..., Path], few_words: str, tmp_path: Path) -> None:
    """Those from before, if training only made them worse."""
    pruned = {"prune": {"structure": "blocks", "count": 1}}
    settings = {"learning_rate": 0.5, "tokens": 12 * 4 * 32, "keep": "best"}
    recipe = distilled(tiny(), pruned, data=few_words, **settings)  # of a few windows one is held out, too
    result = run(recipe, progress=False)
    done = json.loads((result.checkpoint / "smelt.json").read_text())["steps"][1]["done"]
    assert len(done) == 1
    assert "the weights after step 0 are kept, which were the best" in done[0]
    before = recipe.model_copy(update={"steps": recipe.steps[:1], "output": str(tmp_path / "before")})
    files = [each.checkpoint / "model.safetensors" for each in (result, run(before, progress=False))]
    one, other = (load_file(file) for file in files)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_runs_share_what_is_stored_of_a_teacher(
    distilled: Make, tiny: Callable[..., Path], tmp_path: Path, few_words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, model = tmp_path / "shared", tiny()
    settings = {"data": few_words, "stored": 8, "cross_entropy": 0.5}
    asked: list[int] = []
    logged: list[dict[str, torch.Tensor]] = []
    logits_of = CachedTeacherLogits._logits_of
    monkeypatch.setattr(CachedTeacherLogits, "_logits_of", lambda *given: (asked.append(1), logits_of(*given))[1])

    def trained(path: Path, **changes: Any) -> None:
        asked.clear()
        recipe = distilled(path, **settings, **changes).model_copy(update={"evaluate": False})
        logged.append(load_file(run(recipe, progress=False, fresh=True).checkpoint / "model.safetensors"))

    trained(model)
    for times in (1, 0):
        trained(model, stored_at=str(shared))
        assert len(asked) == times
        assert all(torch.equal(logged[0][name], each) for name, each in logged[-1].items())
    assert len(list(shared.iterdir())) == 1
    # Another teacher of the same shape has other logits, wherever it differs.
    other = save_model(make_model("llama", torch.float32), tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    trained(model, teacher=str(other), stored_at=str(shared))
    assert len(list(shared.iterdir())) == 2


def test_a_changed_recipe_is_not_continued(
    distilled: Make, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny()
    with monkeypatch.context() as patch:
        patch.setattr("smelt.distill.training.trainer.Trainer._snapshot", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(distilled(path), progress=False)
    changed = distilled(path, learning_rate=1e-3)
    with pytest.raises(SmeltError, match=r"distill\.learning_rate: 0\.002 -> 0\.001"):
        run(changed, progress=False)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_batch(
    distilled: Make, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, whole = distilled(tiny()), Distilling.loss
    count = [0]

    def broken(learner: Distilling, batch: TrainingBatch) -> Any:
        loss, parts = whole(learner, batch)
        count[0] += torch.is_grad_enabled()
        return (loss * torch.nan if count[0] == 3 else loss), parts

    monkeypatch.setattr(Distilling, "loss", broken)
    with pytest.raises(SmeltError, match=r"training failed at step 3: the loss is nan .*failed-batch-step-0"):
        run(recipe, progress=False)
    out = Path(recipe.output)
    assert load_file(out / "failed-batch-step-0.safetensors")["tokens"].shape == (4, 32)
    assert not (out / "checkpoint").exists()


@pytest.mark.slow
def test_parts_that_were_taken_away_stay_away(distilled: Make, tiny: Callable[..., Path], few_words: str) -> None:
    path, pruned = tiny("opt"), {"prune": {"structure": "attention", "count": 1}}
    for changes in ({}, {"student": "random", "cross_entropy": 1.0}):
        result = run(distilled(path, pruned, data=few_words, **changes), fresh=True, progress=False)
        parts = json.loads((result.checkpoint / "config.json").read_text())["layer_parts"]
        gone = parts.index("mlp")
        weights = load_file(result.checkpoint / "model.safetensors")
        closing = [each for name, each in weights.items() if f"layers.{gone}.self_attn.out_proj" in name]
        assert len(closing) == 2
        assert not any(each.any() for each in closing)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("rows", "stored"),
    [(4160, None), (4100, 8), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4100, None), (4160, 8)))],
)
def test_vocabularies_may_be_padded_differently(
    rows: int, stored: int | None, distilled: Make, tiny: Callable[..., Path], few_words: str
) -> None:
    teacher, student = tiny(vocab_size=rows), tiny(vocab_size=4128)
    recipe = distilled(student, teacher=str(teacher), stored=stored, data=few_words, tokens=30 * 4 * 32)
    run(recipe, progress=False)
    losses = _losses(Path(recipe.output))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["student", pytest.param("teacher", marks=pytest.mark.slow)])
def test_who_writes_has_no_tokens_that_the_other_lacks(
    writer: str, distilled: Make, tiny: Callable[..., Path], few_words: str
) -> None:
    """Hot enough that tokens of the padding, a third of all, would come at once."""
    large, small = tiny(vocab_size=6144), tiny(vocab_size=4128)
    student, teacher = (large, small) if writer == "student" else (small, large)
    data = {"source": few_words, "writer": writer, "prompt": 8, "temperature": 2.0}
    run(distilled(student, teacher=str(teacher), data=data, tokens=4 * 4 * 32), progress=False)


def test_stored_logits_ignore_tokens_that_only_the_student_has() -> None:
    """A student that agrees on all others has nothing to learn, as beside a teacher that runs."""
    torch.manual_seed(0)
    logits = torch.randn(1, 6, 100)
    student = torch.cat((logits, torch.randn(1, 6, 28)), dim=-1)[0]
    batch = TrainingBatch(torch.zeros(1, 6, dtype=torch.int64), windows=torch.tensor([0]))
    places, kept = most_likely(logits[0], 100, 1.0)
    stored = StoredTeacher("forward_kl", lambda _: (places.unsqueeze(0), kept.unsqueeze(0)), 1.0, 100)
    value, gradient = stored.read(batch)(student, slice(0, 6))
    assert gradient.shape == student.shape
    assert value.abs().max() < 1e-5
    assert gradient.abs().max() < 1e-5


def test_a_full_disk_is_noticed_while_text_is_tokenized(tmp_path: Path) -> None:
    """numpy's own way of writing loses the error, and zeros would be what is trained on."""
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    text = TrainingText(source="builtin", writer="teacher", prompt=4).text()
    path = tmp_path / "text.bin"
    path.with_name("text.bin.partial").symlink_to("/dev/full")
    with pytest.raises(SmeltError, match="the disk is full"):
        training_windows(text, tokenizer, 16, 70, path, Progress(False))
    assert not path.exists()


@pytest.mark.parametrize("left", [0, 45, 70, 86])
def test_text_that_is_written_again_is_what_it_would_have_been(left: int, tmp_path: Path) -> None:
    """Whatever was in the file when it was killed, also held-out windows: these never become training windows."""
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    settings = TrainingText(source="builtin", writer="teacher", prompt=4)
    windows = training_windows(settings.text(), tokenizer, 16, 70, tmp_path / "text.bin", Progress(False))

    class Fake:
        def continued(self, prompts: torch.Tensor, temperature: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(seed)
            more = torch.randint(100, (len(prompts), 16 - prompts.shape[1]), generator=generator)
            tokens = torch.cat((prompts, more), dim=1)
            return tokens, tokens % 3 > 0

        def close(self) -> None:
            closed.append(True)

    def written(path: Path) -> bytes:
        written_by(Fake, settings, windows, path, 1, Progress(False))  # type: ignore[arg-type]
        return path.read_bytes() + path.with_suffix(".learned").read_bytes()

    closed: list[bool] = []
    expected = written(tmp_path / "whole.bin")
    assert closed == [True]
    tokens, learned = (
        expected[: (windows.count + windows.kept) * windows.nbytes],
        expected[-16 * (windows.count + windows.kept) :],
    )
    (tmp_path / "again.bin.partial").write_bytes(tokens[: left * windows.nbytes])
    (tmp_path / "again.learned.partial").write_bytes(learned[: left * 16])
    assert written(tmp_path / "again.bin") == expected


@pytest.mark.slow
def test_a_teacher_of_fewer_blocks_and_a_short_context(
    distilled: Make, tiny: Callable[..., Path], few_words: str
) -> None:
    teacher = tiny("opt", num_hidden_layers=2, max_position_embeddings=32)
    recipe = distilled(tiny(), teacher=str(teacher), hidden=1.0, data=few_words, tokens=30 * 4 * 32)
    run(recipe, progress=False)
    losses = _losses(Path(recipe.output))
    assert losses[-1] < 0.8 * losses[0]
    longer = distilled(tiny(), teacher=str(teacher), length=64)
    assert "64 tokens exceed the teacher's context length of 32" in _problems(longer)


def test_memory_and_time_are_those_of_the_teacher_that_will_read(distilled: Make) -> None:
    alone = Plan.make(distilled("builtin:smelt-6m"))
    pruned = Plan.make(distilled("builtin:smelt-6m", {"prune": {"structure": "blocks", "count": 4}}))
    blocks = 4 * 786_944  # parameters that the student loses and the teacher does not
    apart = alone.prepared[0].cost(4, 32).operations - pruned.prepared[1].cost(4, 32).operations
    assert apart == pytest.approx(6 * blocks * 8 * 4 * 32, rel=1e-6)


def test_memory_of_processes_is_what_each_keeps_when_weights_are_sharded(distilled: Make) -> None:
    recipe = distilled("builtin:smelt-6m", length=256)
    plan = Plan.make(recipe)
    cost, numel = plan.prepared[0].cost(4, 32), 5_770_496
    alone, half = cost.of_each(1), cost.of_each(2)
    # Gradients, masters and two moments, of which another process has half; teacher and student come whole. In bfloat16, gradients are
    # in both dtypes.
    gradients = 2 + 4 if compute_dtype(torch.bfloat16) == torch.bfloat16 else 4
    assert alone - half == pytest.approx(numel * (gradients + 4 + 8) / 2, rel=1e-3)
    copies, sharded = (Plan.make(recipe, processes=2, shards=shards).cost.memory for shards in (1, 2))
    assert copies - sharded == 2 * (alone - half)


def test_what_cannot_be_is_refused_before_any_work(distilled: Make, tiny: Callable[..., Path], tmp_path: Path) -> None:
    other = save_model(make_model("llama", torch.float32), tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<never seen>"])
    tokenizer.save_pretrained(other)
    short = tmp_path / "short.txt"
    short.write_text("Only a few words.")
    for recipe, said in (
        (distilled(tiny(), teacher=str(other)), "other and the student have different tokenizers"),
        (
            distilled(tiny(), {"prune": {"structure": "vocabulary", "corpus": "builtin"}}),
            "the original and the student have different tokenizers",
        ),
        (distilled(tiny(), data=str(short)), "short.txt: too short: a batch of 4 windows of 32 tokens"),
        (distilled(tiny(), data="nowhere.txt"), "nowhere.txt: text file not found"),
        (distilled(tiny(), teacher="./nobody"), "directory not found"),
        (distilled(tiny(), length=512, tokens=4096), "512 tokens exceed the model's context length; use at most 128"),
        (distilled(tiny("gemma2"), attention=1.0), "the model does not use torch's scaled_dot_product_attention"),
        (distilled(tiny(), stored=8, stored_at="/dev/null/x"), "/dev/null is not a writable directory"),
        (
            distilled(tiny(), {"prune": {"structure": "2:4"}}, student="random"),
            "the zeros of steps.0 would be lost",
        ),
        (
            distilled(tiny(), {"quantize": {"scheme": "W8A16"}}),
            "quantized weights cannot be changed",
        ),
    ):
        assert said in _problems(recipe)
        assert not Path(recipe.output).exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": "many"}, "'many' is not a number of tokens"),
        ({"tokens": 100}, "100 tokens are less than one step of 4 windows of 32"),
        ({"accumulate": 3}, "accumulate 3 does not divide the batch of 4"),
        ({"loss": "forwardkl"}, "unknown loss 'forwardkl'"),
        ({"loss": {"method": "jsd", "beta": 1.5}}, "beta"),
        ({"loss": "reverse_kl", "stored": 8}, "reverse_kl needs all of the teacher's logits"),
        ({"data": {"writer": "student", "prompt": 32}}, "a prompt of 32 tokens leaves nothing to generate"),
        (
            {"data": {"writer": "student"}, "length": 64, "tokens": 9999, "cross_entropy": 0.5},
            "writer: student excludes cross_entropy",
        ),
        ({"data": {"writer": "teacher", "prompt": 4, "share": 0.5}}, "share is for writer: student"),
        ({"hidden": 1.0, "cross_entropy": 1.0}, "with cross_entropy: 1 there is no teacher"),
    ],
)
def test_impossible_settings_are_reported(changes: dict[str, Any], said: str, distilled: Make) -> None:
    with pytest.raises(ValueError, match=said):
        distilled("builtin:smelt-6m", **changes)


@pytest.mark.parametrize(("text", "tokens"), [("400k", 400_000), ("2.5M", 2_500_000), ("1b", 10**9), ("4096", 4096)])
def test_numbers_of_tokens_are_read_as_people_write_them(text: str, tokens: int, distilled: Make) -> None:
    step = distilled("builtin:smelt-6m", tokens=text).steps[0].distill
    assert step is not None
    assert step.tokens == tokens


def test_scientific_notation_in_recipes_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: 1e-3\nb: 2.5E4\nc: '1e-3'\nd: 1e\n")
    assert read_document(path, ["e=3e-4"]).data == {"a": 1e-3, "b": 2.5e4, "c": "1e-3", "d": "1e", "e": 3e-4}
