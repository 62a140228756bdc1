"""A GGUF file's tokenizer, without llama.cpp: what each token is called, and what is said where text may be cut otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from gguf import TokenType
from smelt.compress.export.gguf_tokenizer import tokenizer_of
from smelt.system.errors import SmeltError
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ...tiny import SMELT_6M

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "a", "b", "c", "▁a", "bc", "▁abc", "▁ab"]
MERGES = [("▁", "a"), ("b", "c"), ("▁a", "bc"), ("▁a", "b")]


def test_a_sentencepiece_tokenizer_keeps_the_order_of_its_merges() -> None:
    found = tokenizer_of(_sentencepiece(MERGES), 270, [2])
    fields = found.fields
    assert fields["tokenizer.ggml.model"] == "llama"
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    by_name = dict(zip(tokens, scores, strict=True))
    assert by_name["▁a"] > by_name["bc"] > by_name["▁abc"] > by_name["▁ab"] > by_name["a"]
    types = dict(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True))
    assert types["<unk>"] == TokenType.UNKNOWN
    assert types["<s>"] == types["</s>"] == TokenType.CONTROL
    assert types["<0x0A>"] == TokenType.BYTE
    assert types[" <tool>"] == TokenType.USER_DEFINED
    assert types["[PAD269]"] == TokenType.UNUSED
    assert types["▁ab"] == TokenType.NORMAL
    assert fields["tokenizer.ggml.add_space_prefix"] is True
    assert (fields["tokenizer.ggml.add_bos_token"], fields["tokenizer.ggml.add_eos_token"]) == (True, False)
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (1, 2)


def test_merges_that_llama_cpp_would_add_are_counted() -> None:
    # "▁ab" + "c" makes "▁abc" in llama.cpp, and here only "▁a" + "bc" does.
    said = "\n".join(tokenizer_of(_sentencepiece(MERGES), 270, []).notes)
    assert "lacks 1 such merges" in said
    assert tokenizer_of(_sentencepiece([*MERGES, ("▁ab", "c")]), 270, []).notes == []


def test_a_byte_level_tokenizer_is_recognized_by_what_it_does() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    fields = tokenizer_of(tokenizer, 4096, [0, 5]).fields
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.tokens"][5] == "<|end|>"
    assert fields["tokenizer.ggml.token_type"][5] == TokenType.CONTROL
    assert fields["tokenizer.ggml.eos_token_id"] == 0
    assert fields["tokenizer.ggml.eot_token_id"] == 5
    assert len(fields["tokenizer.ggml.merges"]) == 3834


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {
                "pre_tokenizer": pre_tokenizers.Sequence(
                    [pre_tokenizers.Split(Regex(r"\w+"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
                )
            },
            "it uses its default",
        ),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, "it uses its default"),
        ({"normalizer": normalizers.NFC()}, "does not normalize text (NFC)"),
    ],
)
def test_what_may_be_cut_differently_is_said(change: dict[str, Any], sentence: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    for name, value in change.items():
        setattr(tokenizer.backend_tokenizer, name, value)
    found = tokenizer_of(tokenizer, 4096, [])
    assert any(sentence in note for note in found.notes)
    assert found.fields["tokenizer.ggml.pre"] == ("default" if "pre_tokenizer" in change else "gpt-2")


def test_what_cannot_be_carried_over_is_refused() -> None:
    with pytest.raises(SmeltError, match="token id 4095, but the embedding has only 4000 rows"):
        tokenizer_of(AutoTokenizer.from_pretrained(SMELT_6M), 4000, [])
    unigram = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("a", -1.0)], unk_id=0)))
    with pytest.raises(SmeltError, match="of the kind Unigram"):
        tokenizer_of(unigram, 10, [])


@pytest.mark.parametrize(
    ("model", "pre_tokenizer", "sentence"),
    [
        (models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]), pre_tokenizers.Metaspace(), "neither works on bytes"),
        (models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"), pre_tokenizers.ByteLevel(), "end_of_word_suffix"),
        (models.BPE({"a": 0}, []), pre_tokenizers.ByteLevel(), "has no merges"),
    ],
)
def test_bpe_that_llama_cpp_has_not_is_refused(model: Any, pre_tokenizer: Any, sentence: str) -> None:
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizer
    with pytest.raises(SmeltError, match=sentence):
        tokenizer_of(PreTrainedTokenizerFast(tokenizer_object=made), 10, [])


def test_bytes_that_also_fall_back_are_no_sentencepiece() -> None:
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer_of(PreTrainedTokenizerFast(tokenizer_object=made), 3, []).fields["tokenizer.ggml.model"] == "gpt2"


def test_tokens_that_llama_cpp_takes_for_one_are_refused() -> None:
    tokenizer = _sentencepiece(MERGES)
    tokenizer.backend_tokenizer.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("  ", normalized=False)])
    with pytest.raises(SmeltError, match="two of its tokens are '  '"):
        tokenizer_of(tokenizer, 280, [])
    padded = _sentencepiece(MERGES)
    padded.backend_tokenizer.add_tokens(["[PAD275]"])  # a row's own name
    tokens = tokenizer_of(padded, 280, []).fields["tokenizer.ggml.tokens"]
    assert len(set(tokens)) == 280


def test_what_a_sentencepiece_tokenizer_does_to_text_is_said() -> None:
    tokenizer = _sentencepiece(MERGES)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Replace("x", "a")]
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    found = tokenizer_of(tokenizer, 270, [])
    assert any("(Digits, NFKC, Replace)" in note for note in found.notes)
    assert found.fields["tokenizer.ggml.add_space_prefix"] is True


def test_tokens_that_no_merge_makes_are_counted() -> None:
    """llama.cpp merges "b" and "c", since the two make a token."""
    without = [pair for pair in MERGES if pair != ("b", "c")]
    assert "lacks 1 such merges" in "\n".join(tokenizer_of(_sentencepiece([*without, ("▁ab", "c")]), 270, []).notes)


def test_ends_and_what_surrounds_text() -> None:
    tokenizer = _sentencepiece(MERGES)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<e{i}>" for i in range(4)]})
    ends = [2, *(tokenizer.convert_tokens_to_ids(f"<e{i}>") for i in range(4))]
    found = tokenizer_of(tokenizer, 280, ends)
    assert [found.fields[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == ends[:3]
    assert any("also end with <e2>, <e3>," in note for note in found.notes)
    assert not any("around texts" in note for note in found.notes)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> </s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert any("around texts" in note for note in tokenizer_of(tokenizer, 280, ends).notes)
    tokenizer.add_tokens([AddedToken("<sep>", rstrip=True)])
    assert any("1 added tokens (<sep> is one)" in note for note in tokenizer_of(tokenizer, 280, ends).notes)


def test_a_model_without_an_end() -> None:
    """Its end is a token that never comes: of none, llama.cpp takes one of the vocabulary for it."""
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    tokenizer.eos_token = tokenizer.bos_token = None
    padded = tokenizer_of(tokenizer, 4100, [], begin=7)
    assert padded.fields["tokenizer.ggml.token_type"][padded.fields["tokenizer.ggml.eos_token_id"]] == TokenType.UNUSED
    assert padded.fields["tokenizer.ggml.bos_token_id"] == 7
    assert any("does not stop by itself" in note for note in padded.notes)
    full = tokenizer_of(tokenizer, 4096, [])
    assert "tokenizer.ggml.eos_token_id" not in full.fields
    assert any("then stops at token 11" in note for note in full.notes)


def test_chat_templates_keep_their_names() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    tokenizer.chat_template = {"tool_use": "T", "default": "D", "rag": "R"}
    fields = tokenizer_of(tokenizer, 4096, []).fields
    assert fields["tokenizer.chat_template"] == "D"
    assert fields["tokenizer.chat_template.tool_use"] == "T"
    assert fields["tokenizer.chat_templates"] == ["tool_use", "rag"]
    tokenizer.chat_template = {"rag": "R"}
    found = tokenizer_of(tokenizer, 4096, [])
    assert found.fields["tokenizer.chat_template"] == "R"
    assert any("uses 'rag'" in note for note in found.notes)


def _sentencepiece(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *PIECES])}
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.add_tokens([AddedToken("▁<tool>", normalized=False)])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
