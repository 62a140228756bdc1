"""The distill step: what it wins back, what it leaves as it is, and what it refuses."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress import SmeltError, run
from smelt.distill.losses.probabilities import most_likely
from smelt.distill.run.cached_teacher import CachedTeacherLogits
from smelt.distill.run.text_writer import Writer
from smelt.distill.training.batches import TrainingBatch
from smelt.distill.training.objective import Distilling
from smelt.distill.training.teachers import StoredTeacher
from transformers import AutoModelForCausalLM

from ...tiny import SMELT_6M, make_model, save_model
from .small import Make, losses_of, problems_of, training_of


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
    logged = training_of(out, 1)
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
    losses = losses_of(Path(recipe.output), 1)
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
    losses = losses_of(Path(recipe.output), 1)
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
    assert problems_of(recipe) == ""
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
    losses = losses_of(Path(recipe.output))
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
        logits = model(batch.tokens).logits[:, 7:-1]
    # Greedily, so each is the most likely one after those before; in bfloat16 those that are nearly as likely may be.
    behind = logits.max(-1).values - logits.gather(-1, batch.tokens[:, 8:, None])[..., 0]
    assert behind.max() < 0.25 * logits.std()  # any other one is several times as far
    assert (behind == 0).float().mean() > 0.8


@pytest.mark.slow
def test_what_is_written_ends_with_the_end_token() -> None:
    """What would come after it is no answer, and does not count."""
    writer = Writer(SMELT_6M, torch.device("cpu"), 60, 12, 4096)
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
    curve = training_of(tmp_path / "out")["curve"]
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
    losses = losses_of(Path(recipe.output))
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
