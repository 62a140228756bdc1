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
        ({"pre_tokenizer": pre_tokenizers.Split(Regex(r"\w+"), "isolated")}, "it uses its default"),
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


def _sentencepiece(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *PIECES])}
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.add_tokens([AddedToken("▁<tool>", normalized=False)])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
