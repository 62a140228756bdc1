"""What the plan of a distillation says, and refuses, before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.compress.pipeline.plan import Plan
from smelt.compress.recipe.file import read_document
from smelt.system.hardware.resources import compute_dtype
from transformers import AutoTokenizer

from ...tiny import make_model, save_model
from .small import Make, losses_of, problems_of


@pytest.mark.slow
def test_a_teacher_of_fewer_blocks_and_a_short_context(
    distilled: Make, tiny: Callable[..., Path], few_words: str
) -> None:
    teacher = tiny("opt", num_hidden_layers=2, max_position_embeddings=32)
    recipe = distilled(tiny(), teacher=str(teacher), hidden=1.0, data=few_words, tokens=30 * 4 * 32)
    run(recipe, progress=False)
    losses = losses_of(Path(recipe.output))
    assert losses[-1] < 0.8 * losses[0]
    longer = distilled(tiny(), teacher=str(teacher), length=64)
    assert "64 tokens exceed the teacher's context length of 32" in problems_of(longer)


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


@pytest.mark.parametrize(
    ("scheme", "trained"), [("W4A16", 5_770_496), ("W4in8", 6 * 786_432)], ids=["all", "the linears' upper bits"]
)
def test_memory_is_that_of_what_is_trained(scheme: str, trained: int, recipe: Callable[..., Recipe]) -> None:
    def planned(*, small_states: bool) -> int:
        train = {"data": "builtin", "tokens": "20k", "length": 32, "batch": 4, "small_states": small_states}
        made = recipe("builtin:smelt-6m", scheme=scheme, train=train)
        return Plan.make(made).prepared[0].cost(4, 32).of_each(1)

    # Two moments of each trained weight, in 8 bits instead of 32.
    assert planned(small_states=False) - planned(small_states=True) == 6 * trained


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
        assert said in problems_of(recipe)
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
