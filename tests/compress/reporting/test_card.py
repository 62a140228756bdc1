"""Model cards: the hub's metadata, the measured table, and nothing of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from smelt.compress import Recipe, run
from smelt.compress.reporting.card import card
from smelt.compress.reporting.markdown import plain
from smelt.models.directory.directory import ModelDirectory

from ...tiny import SMELT_6M
from .. import report_samples


@pytest.fixture
def card_of(recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., tuple[ModelCard, str]]:
    """``card_of(front matter)`` compresses a model whose own card begins with it."""

    def build(front: str = "") -> tuple[ModelCard, str]:
        model = shutil.copytree(SMELT_6M, tmp_path / "a-model")
        (model / "README.md").write_text(front)
        result = run(recipe(model, group_size=64))
        text = (result.checkpoint / "README.md").read_text()
        return ModelCard(text), text

    return build


def test_the_hub_reads_the_card_and_finds_what_it_needs(card_of: Callable[..., tuple[ModelCard, str]]) -> None:
    parsed, text = card_of("---\nlicense: apache-2.0\nlanguage: [en]\nbase_model: someone/original\n---\n# A model\n")
    data = parsed.data.to_dict()
    assert data["license"] == "apache-2.0"
    assert data["language"] == ["en"]
    assert data["base_model"] == "someone/original"
    assert data["library_name"] == "transformers"
    assert "compressed-tensors" in data["tags"]
    (result,) = parsed.data.eval_results or []
    assert result.metric_type == "perplexity"
    assert f"| {result.metric_value:.2f} |" in text
    for way in ("AutoModelForCausalLM", "vllm serve", "smelt chat"):
        assert way in text
    recipe = yaml.safe_load(text.partition("```json\n")[2].rpartition("```")[0].rpartition("```json")[2])
    assert recipe["steps"][0]["quantize"]["scheme"] == "W4A16"


def test_vllm_is_recommended_only_where_it_loads_the_checkpoint(recipe: Callable[..., Recipe]) -> None:
    result = run(recipe("builtin:smelt-6m", {"evaluate": False}, group_size=64, embeddings="int8", ignore=[]))
    text = (result.checkpoint / "README.md").read_text()
    assert "vllm serve" not in text
    assert "not support an 8-bit embedding" in text
    (model,) = result.report.candidates
    assert {loader.name.split()[0]: loader.loads for loader in model.loaders} == {
        "transformers": True,
        "vLLM": False,
        "llama.cpp": True,
    }


def test_a_cache_that_transformers_does_not_quantize_needs_the_plug_in(recipe: Callable[..., Recipe]) -> None:
    cache = {"dtype": "int8", "scales": "token"}
    result = run(recipe("builtin:smelt-6m", {"evaluate": False}, group_size=64, kv_cache=cache))
    assert 'config=config_for("PATH")' in (result.checkpoint / "README.md").read_text()
    (model,) = result.report.candidates
    loader = next(each for each in model.loaders if each.name == "transformers")
    assert loader.loads
    assert "keys and values are not quantized there" in loader.sentence


@pytest.mark.slow
def test_a_long_pattern_is_no_path(recipe: Callable[..., Recipe]) -> None:
    pattern = "re:" + "|".join(f"model.layers.{i}.mlp.down_proj" for i in range(40))
    result = run(recipe("builtin:smelt-6m", group_size=64, ignore=["lm_head", pattern]))
    assert pattern in (result.checkpoint / "README.md").read_text()


def test_paths_of_this_machine_stay_out(card_of: Callable[..., tuple[ModelCard, str]], tmp_path: Path) -> None:
    parsed, text = card_of()
    assert str(tmp_path) not in text
    # The hub would make a link of it, to a model of somebody else.
    assert "base_model" not in parsed.data.to_dict()
    assert "Compressed from a-model by Smelt" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "front",
    [
        "---\n: [\n---\n",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("---\njust words\n---\n", "no front matter", "---\n")
        ),
    ],
)
def test_a_card_that_cannot_be_read_is_no_obstacle(front: str, card_of: Callable[..., tuple[ModelCard, str]]) -> None:
    parsed, _ = card_of(front)
    assert "license" not in parsed.data.to_dict()


def test_names_and_verdicts_become_neither_markdown_nor_html_nor_fields(tmp_path: Path) -> None:
    hostile = report_samples.hostile()
    baseline, bad = hostile.models
    bad = bad.model_copy(update={"name": "a](https://evil.test) `b` <script>x</script>\n---\nlicense: mine\n# big"})
    report = hostile.model_copy(
        update={"models": [baseline, bad], "verdict": "**so** <img src=x> [go](http://evil.test)"}
    )
    original = tmp_path / "<b>model `x`"
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    original.mkdir()
    (checkpoint / "config.json").write_text("{}")
    deep = "x: " + "[" * 5000
    (original / "README.md").write_text(f"---\nlanguage: {{a: {{b: c}}}}\nlicense: !!binary aGk=\n{deep}\n---\n")
    text = card(report, checkpoint, ModelDirectory(str(original), original))
    data = ModelCard(text).data.to_dict()
    assert "license" not in data
    assert "language" not in data
    body = text.split("\n---\n", 1)[1].split("\n---\n")[-1].split("## Recipe")[0].split("## Use")[0]
    html = MarkdownIt("commonmark").enable("table").enable("strikethrough").render(body)
    assert "<script" not in html
    assert "<img" not in html
    assert "<a " not in html
    assert html.count("<h1>") == 1


@pytest.mark.parametrize(
    ("link", "file", "expected"),
    [
        ("https://example.test/licence", "LICENSE", "LICENSE"),
        ("LICENSE.txt", "LICENSE.txt", "LICENSE.txt"),
        ("https://example.test/licence", None, "https://example.test/licence"),
        ("LICENSE", None, None),
    ],
)
def test_the_licence_is_the_copy_in_the_checkpoint(
    link: str, file: str | None, expected: str | None, tmp_path: Path
) -> None:
    report = report_samples.hostile()
    original, checkpoint = tmp_path / "original", tmp_path / "checkpoint"
    original.mkdir()
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    if file is not None:
        (checkpoint / file).write_text("terms")
    (original / "README.md").write_text(f"---\nlicense: other\nlicense_name: theirs\nlicense_link: {link}\n---\n")
    data = ModelCard(card(report, checkpoint, ModelDirectory("original", original))).data.to_dict()
    assert data["license_name"] == "theirs"
    assert data.get("license_link") == expected


def test_no_address_in_a_name_becomes_a_link() -> None:
    name = "see www.evil.test, WWW.evil.test and http://evil.test"
    said = plain(name)
    # GitHub's Markdown makes links of these three without any marks around them.
    assert not any(start in said.lower() for start in ("www.", "http://", "https://"))
    assert name in MarkdownIt("commonmark").render(said)


@pytest.mark.slow
def test_a_card_links_to_no_package_index(card_of: Callable[..., tuple[ModelCard, str]]) -> None:
    _, text = card_of()
    assert "://" not in text
    assert "by Smelt " in text
