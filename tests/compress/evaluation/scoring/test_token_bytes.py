"""Bytes of windows that cut characters, beside those of the text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from smelt.compress.evaluation.scoring.token_bytes import bytes_of
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ....tiny import SMELT_6M

TEXT = "Die Bäume, naïve café — 北京 и Москва, 🚀🚀 Größe! " * 6


def _sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's: what has no piece is spelled in bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=list("abcdefghijklm ▁"))
    tokenizer.train_from_iterator(["Die naive cafe in a time of need"], trainer)
    data = tokenizer.to_str().replace('"special":true', '"special":false')
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(data), unk_token="<unk>", bos_token="<s>")


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_windows_that_cut_characters_have_the_texts_bytes_together(kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M) if kind == "bytes" else _sentencepiece()
    tokens = tokenizer(TEXT, add_special_tokens=False).input_ids
    for length in (1, 3, 7):
        count = len(tokens) // length * length
        found = bytes_of(torch.tensor(tokens[:count]).view(-1, length), tokenizer)
        rest = bytes_of(torch.tensor([tokens[count:]]), tokenizer)[0] if tokens[count:] else 0
        assert sum(found) + rest == len(TEXT.encode())


def test_of_a_model_that_spells_in_bytes(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
    tokens = torch.tensor([tokenizer(TEXT).input_ids])
    # Its first word has a space that the text does not; the beginning token has no text.
    assert bytes_of(tokens, tokenizer) == [len(TEXT.encode()) + 1]
