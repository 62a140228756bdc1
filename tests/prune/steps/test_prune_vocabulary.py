"""A smaller vocabulary: its tokenizer against the whole one on text of its corpus and other text, its model against the whole one's rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import run
from smelt.compress.pipeline.plan import Plan
from smelt.models.text.windows import recut
from smelt.prune.structure.vocabulary import Vocabulary
from smelt.runtime import Engine, SamplingParams
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .recipe import recipe_of

CORPUS = """The harbour was quiet, and the boats lay still under a pale sky. Nobody had seen the keeper for three days.

"We should go and look," said the girl; her brother nodded. They took a lamp, some bread, and walked to the lighthouse.
"""
OTHER = "Zweiundvierzig Bäume: naïve café, 北京 2024! if (x < y) { return x * 37; } 🚀"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(CORPUS)
    return path


def _prune(corpus: Path) -> dict[str, Any]:
    return {"prune": {"structure": "vocabulary", "corpus": str(corpus)}}


def _tokens(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)


@torch.no_grad()
def test_text_of_the_corpus_is_read_as_before(tiny: Callable[..., Path], corpus: Path, tmp_path: Path) -> None:
    model = tiny("llama")
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune(corpus))).checkpoint
    before, after = (AutoTokenizer.from_pretrained(path) for path in (model, checkpoint))
    assert len(after) < 600
    assert _tokens(after, CORPUS) == _tokens(before, CORPUS)
    assert after.decode(after(OTHER).input_ids) == OTHER
    whole, small = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (model, checkpoint))
    assert small.config.vocab_size == len(after) == small.lm_head.weight.shape[0]
    names = [after.convert_ids_to_tokens(number) for number in range(len(after))]
    old = torch.tensor(before.convert_tokens_to_ids(names))
    expected = whole(torch.tensor([before(CORPUS).input_ids])).logits[..., old]
    assert torch.equal(small(torch.tensor([after(CORPUS).input_ids])).logits, expected)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert names[getattr(small.config, name)] == before.convert_ids_to_tokens(getattr(whole.config, name))


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["qwen3", "gpt_neox", "opt"])
def test_then_quantized_and_served(architecture: str, tiny: Callable[..., Path], corpus: Path, tmp_path: Path) -> None:
    steps = [_prune(corpus), {"quantize": {"scheme": "W8A16", "group_size": 64, "rounding": "gptq"}}]
    checkpoint = run(recipe_of(tiny(architecture, torch.bfloat16), tmp_path / "out", *steps)).checkpoint
    engine = Engine(checkpoint)
    served = engine.generate(["The harbour was"], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))[0]
    assert max(served.outputs[0].token_ids) < engine.model.spec.vocabulary < 600


def test_forbidden_tokens_stay_forbidden(tiny: Callable[..., Path], corpus: Path, tmp_path: Path) -> None:
    model = tiny("llama")
    before = AutoTokenizer.from_pretrained(model)
    kept, other = before(" lighthouse").input_ids, before(" Zweiundvierzig").input_ids
    path = model / "generation_config.json"
    written = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(written | {"suppress_tokens": kept[:1], "bad_words_ids": [kept, other]}))
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune(corpus))).checkpoint
    after = AutoTokenizer.from_pretrained(checkpoint)
    generation = GenerationConfig.from_pretrained(checkpoint)
    assert after.convert_ids_to_tokens(generation.suppress_tokens) == before.convert_ids_to_tokens(kept[:1])
    names = [after.convert_ids_to_tokens(word) for word in generation.bad_words_ids]
    assert names == [before.convert_ids_to_tokens(kept)]


def _byte_fallback() -> Tokenizer:
    """As Llama 2's and Gemma's are."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])  # type: ignore[assignment]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer.train_from_iterator(
        [TRAINING], trainers.BpeTrainer(vocab_size=900, special_tokens=special[:3] + special[3:])
    )
    return _without_bytes_as_special(tokenizer)


def _without_bytes_as_special(tokenizer: Tokenizer) -> Tokenizer:
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [each for each in data["added_tokens"] if not each["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(data))


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer.decoder = decoders.Metaspace()  # type: ignore[assignment]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<s>", "<unk>"], unk_token="<unk>")
    tokenizer.train_from_iterator([TRAINING], trainer)
    return tokenizer


TRAINING = (
    CORPUS + " The old words were written by another hand, and nobody could read them any more. 0123456789 " * 3
) * 5


@pytest.mark.parametrize("make", [_byte_fallback, _unigram])
def test_other_kinds_of_tokenizers(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    whole = make()
    whole.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(tmp_path)
    text = CORPUS.split("\n")[0]
    used = whole.encode(text).ids
    kept = vocabulary.closed(used)
    assert set(used) <= set(kept)
    assert len(kept) < whole.get_vocab_size()
    vocabulary.write(kept, tmp_path)
    small = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert small.get_vocab_size() == len(kept)
    assert small.encode(text).tokens == whole.encode(text).tokens
    assert [kept[number] for number in small.encode(text).ids] == used
    assert small.decode(small.encode(text).ids) == whole.decode(used)
    if make is _byte_fallback:
        assert small.decode(small.encode(OTHER).ids) == whole.decode(whole.encode(OTHER).ids)


def test_calibration_windows_are_cut_again(tiny: Callable[..., Path], corpus: Path, tmp_path: Path) -> None:
    model = tiny("llama")
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune(corpus))).checkpoint
    before, after = (AutoTokenizer.from_pretrained(path) for path in (model, checkpoint))
    tokens = torch.tensor(before(CORPUS).input_ids[:40]).view(2, 20)
    assert before.decode(tokens.flatten()) == after.decode(recut(tokens, before, after).flatten())
    other = torch.tensor(before(OTHER * 3).input_ids[:60]).view(3, 20)
    again = recut(other, before, after)
    assert again.shape == (3, 20)
    assert before.decode(other.flatten()).startswith(after.decode(again.flatten()).rstrip("\ufffd"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "steps.0.prune.corpus: "),
        ("\n \n", "steps.0.prune.corpus: "),
    ],
)
def test_a_corpus_that_is_not_there_or_empty_is_said_before_any_work(
    text: str | None, said: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    if text is not None:
        corpus.write_text(text)
    plan = Plan.make(recipe_of(tiny(), tmp_path / "out", _prune(corpus)))
    assert [problem for problem in plan.problems if str(problem).startswith(said)], [str(p) for p in plan.problems]


def test_a_model_without_tokenizer_json_is_refused(tiny: Callable[..., Path], corpus: Path, tmp_path: Path) -> None:
    model = tiny()
    data = json.loads((model / "tokenizer.json").read_text())
    data["model"] = {"type": "WordLevel", "vocab": {"<unk>": 0, "the": 1}, "unk_token": "<unk>"}
    (model / "tokenizer.json").write_text(json.dumps(data))
    plan = Plan.make(recipe_of(model, tmp_path / "out", _prune(corpus)))
    assert any("holds a WordLevel model" in str(problem) for problem in plan.problems), [str(p) for p in plan.problems]
